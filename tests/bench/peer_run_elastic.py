"""The peer of `bench_recovery`: ``horovod.spark.run_elastic``, its stock function, the same model, batch and sleep.

python peer_run_elastic.py MASTER_URL FOLDER    a driver; its workers append the time of each step to FOLDER/PID.steps
"""

from __future__ import annotations

import os
import sys
import time


def train(folder: str, step_sleep_s: float) -> None:
    """Stock elastic Horovod, as its documentation shows it."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss_fn = torch.nn.CrossEntropyLoss()
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state: object) -> None:
        with open(os.path.join(folder, f"{os.getpid()}.steps"), "a", buffering=1) as log:
            while True:
                optimizer.zero_grad()
                loss_fn(model(torch.randn(32, 256)), torch.randint(0, 10, (32,))).backward()
                optimizer.step()
                time.sleep(step_sleep_s)
                state.step += 1  # type: ignore[attr-defined]
                state.commit()  # type: ignore[attr-defined]
                log.write(f"{time.time():.4f} {hvd.rank()} {hvd.size()}\n")

    loop(state)


def main(master: str, folder: str) -> None:
    import cloudpickle
    import horovod.spark
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    builder = (
        SparkSession.builder.master(master).config("spark.executor.cores", "1").config("spark.executor.memory", "600m")
    )
    builder.config("spark.driver.host", "127.0.0.1").config("spark.task.maxFailures", "100").getOrCreate()
    options = {"num_proc": 3, "min_num_proc": 1, "max_num_proc": 3, "nics": {"lo"}, "env": dict(os.environ)}
    horovod.spark.run_elastic(train, args=(folder, 0.02), **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
