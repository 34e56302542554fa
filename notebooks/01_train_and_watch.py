# Databricks notebook source
# MAGIC %md
# MAGIC # 1. Train, and watch
# MAGIC
# MAGIC A small network learns to read handwritten digits, on the executors of this Spark session. On Databricks the session
# MAGIC is there, on a cluster in *Dedicated* access mode. Elsewhere, in Jupyter for example, the next cell starts a small
# MAGIC Spark cluster on this machine: a real master, real workers, and nothing left behind when the notebook ends.

# COMMAND ----------

if "spark" not in globals():
    from elastic_spark.testing import StandaloneCluster

    cluster = StandaloneCluster(workers=3).start()
    spark = cluster.session()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The data: any DataFrame
# MAGIC A column of numbers becomes a tensor `[rows]`, one of lists of equal length `[rows, length]`.

# COMMAND ----------

from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(pixels, digits)]
df = spark.createDataFrame(rows, ["image", "digit"]).repartition(4, "digit")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The training function: runs on every worker
# MAGIC What must survive a lost worker is in `state`. `ctx.batches` gives this worker its share of each global batch, and
# MAGIC `state.commit` ends the step.

# COMMAND ----------


def train(ctx, epochs):
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
        for batch in ctx.batches("train", state, epochs=epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"].float()), batch["digit"].long()) * batch.weight
            loss.backward()
            optimizer.step()
            state.commit(loss=loss.item())
        return {"steps": state.step, "weights": {name: value.numpy() for name, value in model.state_dict().items()}}

    return loop(state)


# COMMAND ----------

# MAGIC %md
# MAGIC ## Run it
# MAGIC Progress is printed below the cell: epoch, step, loss, rows per second, workers, the last change. The job is one run of
# MAGIC the experiment, and its page fills while it trains. `status_port=0` opens a live page on the driver: follow the link
# MAGIC that is printed, if your browser runs there (else forward that port, or name an interface with `status_host`).

# COMMAND ----------

import elastic_spark as es

result = es.run(
    train,
    kwargs={"epochs": 12},
    num_proc=2,
    min_num_proc=1,
    data={"train": df},
    global_batch=128,
    status_port=0,
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## What happened
# MAGIC The verdict: each row was trained once an epoch, by count.

# COMMAND ----------

from elastic_spark.report import render_text

print(render_text(result.summary))
print("MLflow run:", result.run_id)

# COMMAND ----------

# MAGIC %md
# MAGIC What a worker returns comes back by rank: here the weights of rank 0.

# COMMAND ----------

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model.load_state_dict({name: torch.from_numpy(value) for name, value in result[0]["weights"].items()})
guesses = model(torch.tensor(pixels / 16, dtype=torch.float32)).argmax(dim=1).numpy()
accuracy = float((guesses == digits).mean())
print(f"{accuracy:.1%} of the images it was trained on are read correctly, after {result[0]['steps']} steps")

# COMMAND ----------

# MAGIC %md
# MAGIC Done. Where this notebook started a cluster of its own, it ends it.

# COMMAND ----------

if "cluster" in globals():
    cluster.stop()
