# Databricks notebook source
# MAGIC %md
# MAGIC # 3. A stage of a Spark ML pipeline
# MAGIC
# MAGIC `ElasticTorchEstimator` is an `Estimator` as any other: it goes into a `Pipeline`, into a `CrossValidator`, and what it
# MAGIC fits can be saved, loaded and applied to a DataFrame.

# COMMAND ----------

if "spark" not in globals():
    from elastic_spark.testing import StandaloneCluster

    cluster = StandaloneCluster(workers=3).start()
    spark = cluster.session()

# COMMAND ----------

from pyspark.ml.linalg import Vectors
from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
rows = [(Vectors.dense(image), f"digit {digit}") for image, digit in zip(pixels, digits)]
df = spark.createDataFrame(rows, ["pixels", "name"]).coalesce(2).cache()
train_df, test_df = df.randomSplit([0.8, 0.2], seed=0)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The pipeline
# MAGIC Spark's own stages make features and labels; the last stage is trained by elastic workers. With `validation` the weights
# MAGIC with the lowest validation loss are kept, and `patience` ends the training early.

# COMMAND ----------

import functools
import tempfile

import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import MinMaxScaler, StringIndexer

import elastic_spark as es

store = tempfile.mkdtemp()  # where executors are on other machines: shared storage, as /Volumes/...
estimator = es.ElasticTorchEstimator(
    model=torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
    optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
    loss=torch.nn.CrossEntropyLoss(),
    feature_cols=["features"],
    label_cols=["label"],
    prediction_col="scores",
    validation=0.1,
    batch_size=128,
    epochs=8,
    patience=5,
    num_proc=2,
    min_num_proc=1,
    store=store,
)
pipeline = Pipeline(
    stages=[
        StringIndexer(inputCol="name", outputCol="label", stringOrderType="alphabetAsc"),
        MinMaxScaler(inputCol="pixels", outputCol="features"),
        estimator,
    ]
)
model = pipeline.fit(train_df)

# COMMAND ----------

for epoch in model.stages[-1].history:
    print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.4f}, validation {epoch['val_loss']:.4f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Predict
# MAGIC `transform` runs on the executors, and keeps columns, order and rows.

# COMMAND ----------

from pyspark.sql import functions as F

scored = model.transform(test_df).cache()
guess = F.array_position("scores", F.array_max("scores")) - 1
accuracy = scored.select(F.avg((guess == F.col("label")).cast("double"))).first()[0]
print(f"{accuracy:.1%} of the held-out images are read correctly")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Save, load, and get the same

# COMMAND ----------

from pyspark.ml import PipelineModel

model.write().overwrite().save(f"{store}/digits")
loaded = PipelineModel.load(f"{store}/digits")
before = [row["scores"] for row in scored.select("scores").collect()]
after = [row["scores"] for row in loaded.transform(test_df).select("scores").collect()]
print("the loaded pipeline predicts the same:", before == after)

# COMMAND ----------

if "cluster" in globals():
    cluster.stop()
