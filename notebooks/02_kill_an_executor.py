# Databricks notebook source
# MAGIC %md
# MAGIC # 2. Kill an executor, and look
# MAGIC
# MAGIC Three workers train; in the middle of it one of them sends `kill -9` to the JVM of its own executor. The others go on
# MAGIC from the step where they are, Spark brings another executor, and it is taken in while training goes on.

# COMMAND ----------

if "spark" not in globals():
    from elastic_spark.testing import StandaloneCluster

    cluster = StandaloneCluster(workers=3).start()
    spark = cluster.session()

# COMMAND ----------

from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(pixels, digits)]
df = spark.createDataFrame(rows, ["image", "digit"]).repartition(4, "digit")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A fault on purpose
# MAGIC Only rank 1, only at step 40, and never in local mode, where the JVM is the driver's.

# COMMAND ----------


def kill_own_executor():
    import psutil

    for process in psutil.Process().parents():
        if any(word.endswith("CoarseGrainedExecutorBackend") for word in process.cmdline()):
            process.kill()


def train(ctx, epochs):
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
        for batch in ctx.batches("train", state, epochs=epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"].float()), batch["digit"].long()) * batch.weight
            loss.backward()
            optimizer.step()
            state.commit(loss=loss.item())
            if state.step == 40 and hvd.rank() == 1:
                kill_own_executor()
            if state.step > 40 and hvd.size() < 3:
                time.sleep(0.2)  # digits are learnt faster than an executor starts: give it the time to come back
        return state.step

    return loop(state)


# COMMAND ----------

import elastic_spark as es

result = es.run(train, kwargs={"epochs": 15}, num_proc=3, min_num_proc=1, data={"train": df}, global_batch=128)

# COMMAND ----------

# MAGIC %md
# MAGIC ## What it cost
# MAGIC No row lost, none trained twice, no step undone; and the pause between two steps in which the survivors found
# MAGIC together.

# COMMAND ----------

from elastic_spark.report import render_text

print(render_text(result.summary))

# COMMAND ----------

for change in result.summary["changes"]:
    pause = "-" if change["pause_s"] is None else f"{change['pause_s']:.2f} s"
    print(f"{change['from_size']} -> {change['to_size']} workers, pause {pause}: {change['cause']}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The timeline
# MAGIC The whole story as one page, which is also an artifact of the run: workers as bars, changes, throughput, checkpoints.
# MAGIC It is made from the event log alone.

# COMMAND ----------

from elastic_spark.core.events import read_log
from elastic_spark.report import render_html

with open(result.events_path, encoding="utf-8") as lines:
    page = render_html(read_log(lines), "an executor was killed")

if "displayHTML" in globals():  # Databricks
    displayHTML(page)
else:
    with open("timeline.html", "w", encoding="utf-8") as file:
        file.write(page)
    print("open timeline.html in a browser")

# COMMAND ----------

if "cluster" in globals():
    cluster.stop()
