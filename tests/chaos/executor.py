"""What a Spark executor does for a slot, without Spark: runs the agent. Its launch comes pickled on standard input.

Started as ``python -m tests.chaos.executor --executor-id N``; the agent reads that id from the command line, as under
Spark.
"""

from __future__ import annotations

import os
import pickle
import sys

from elastic_spark.agent.main import run_agent

if __name__ == "__main__":
    launch, slot = pickle.loads(sys.stdin.buffer.read())
    for _ in run_agent(launch, slot, 0, {}):
        pass
    os._exit(0)
