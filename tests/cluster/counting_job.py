"""The counting model as a spark-submit job: `counting_job.py FOLDER ROWS EPOCHS`."""

import json
import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

import elastic_spark as es
from elastic_spark.testing.counting import counting_data, train_counting

folder, rows, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
slow, half = str(folder / "slow"), epochs * rows // 24 // 2


def each_step(state):
    if os.path.exists(slow):
        time.sleep(0.04 if state.step < half else 0.4)


spark = SparkSession.builder.getOrCreate()
result = es.run(
    train_counting,
    kwargs={"rows": rows, "epochs": epochs, "log_dir": str(folder / "steps"), "on_step": each_step},
    num_proc=2,
    min_num_proc=1,
    data={"train": counting_data(spark, rows)},
    global_batch=24,
    job_name="job",
    work_dir=str(folder / "runs"),
    checkpoint_uri=str(folder / "checkpoints"),
    rpo_target_s=1.0,
    ckpt_budget=1.0,
    tracking_uri=f"sqlite:///{folder}/mlflow.db",
    experiment="counting",
    verbose=1,
)
story = {"run_id": result.run_id, "w": result[0]["w"].tolist(), "summary": result.summary}
(folder / "result.json").write_text(json.dumps(story, default=str))
