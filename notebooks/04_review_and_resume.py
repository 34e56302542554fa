# Databricks notebook source
# MAGIC %md
# MAGIC # 4. Review in MLflow, and resume
# MAGIC
# MAGIC A job ends half-way by a mistake in its function. It is found in MLflow, the mistake is mended, and a second start under
# MAGIC the same `job_name` goes on from the newest checkpoint: the same run, and no row trained twice.

# COMMAND ----------

if "spark" not in globals():
    from elastic_spark.testing import StandaloneCluster

    cluster = StandaloneCluster(workers=3).start()
    spark = cluster.session()

# COMMAND ----------

from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(pixels, digits)]
df = spark.createDataFrame(rows, ["image", "digit"]).repartition(4, "digit").sortWithinPartitions("image")

# COMMAND ----------


def train(ctx, epochs, mistake):
    import time

    import horovod.torch as hvd
    import torch
    from torch import nn

    import elastic_spark as es

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=3e-3), named_parameters=model.named_parameters()
    )
    state = es.ElasticState(model=model, optimizer=optimizer)

    @hvd.elastic.run
    def loop(state):
        first = state.step
        for batch in ctx.batches("train", state, epochs=epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"].float()), batch["digit"].long()) * batch.weight
            loss.backward()
            optimizer.step()
            state.commit(loss=loss.item())
            if mistake:
                time.sleep(0.05)  # so that the first start is long enough for a checkpoint
                if state.step == 100:
                    raise ValueError("a mistake at step 100")
        return {"began_at": first, "ended_at": state.step}

    return loop(state)


# COMMAND ----------

# MAGIC %md
# MAGIC ## The first start fails
# MAGIC With the function's own traceback, from the worker where it happened.

# COMMAND ----------

import time

import elastic_spark as es
from elastic_spark.errors import UserCodeFailed

job = {
    "job_name": f"digits-{int(time.time())}",  # this name is what a second start goes on with
    "data": {"train": df},
    "num_proc": 2,
    "min_num_proc": 1,
    "global_batch": 128,
    "rpo_target_s": 1.0,  # a checkpoint each second: the job is short
    "ckpt_budget": 0.2,
}
try:
    es.run(train, kwargs={"epochs": 10, "mistake": True}, **job)
except UserCodeFailed as error:
    print(error)

# COMMAND ----------

# MAGIC %md
# MAGIC ## What MLflow knows of it
# MAGIC The same is on the run's page: the verdict as its description, a chart for each metric, the events, the log of the
# MAGIC worker that failed.

# COMMAND ----------

import mlflow

named = f"tags.`elastic.job` = '{job['job_name']}'"
failed = mlflow.search_runs(search_all_experiments=True, filter_string=named, output_format="list")[0]
print(failed.info.run_id, failed.info.status)
print(failed.data.tags["mlflow.note.content"])

# COMMAND ----------


def artifacts(run_id, path=None):
    for item in mlflow.MlflowClient().list_artifacts(run_id, path):
        yield from artifacts(run_id, item.path) if item.is_dir else [item.path]


print(*artifacts(failed.info.run_id), sep="\n")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Mend it, and start it again
# MAGIC The same name: the same run, from the newest checkpoint that verifies.

# COMMAND ----------

result = es.run(train, kwargs={"epochs": 10, "mistake": False}, **job)
print(result[0])

# COMMAND ----------

from elastic_spark.report import render_text

run = mlflow.get_run(result.run_id)
print("the same run:", run.info.run_id == failed.info.run_id, run.info.status)
print(render_text(result.summary))

# COMMAND ----------

if "cluster" in globals():
    cluster.stop()
