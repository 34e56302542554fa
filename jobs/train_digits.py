"""Which digit is written there? Elastic training of a small convolutional network on images.

    spark-submit jobs/train_digits.py --num-proc 3 --min-num-proc 1

Data: the 1,797 images of 8 x 8 pixels that come with scikit-learn. Each fifth of them, chosen by a hash, is held out.
"""

from __future__ import annotations

import argparse
import json

import elastic_spark as es


def main() -> None:
    options = parse_options()

    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName(options.job_name).getOrCreate()
    train_rows, val_rows = prepare(spark)
    result = es.run(
        train,
        kwargs={"epochs": options.epochs, "lr": options.lr},
        num_proc=options.num_proc,
        min_num_proc=options.min_num_proc,
        max_num_proc=options.max_num_proc,
        data={"train": train_rows, "val": val_rows},
        global_batch=options.global_batch,
        rpo_target_s=options.rpo_target_s,
        ckpt_budget=0.1,  # the state is small, and the job short
        checkpoint_uri=options.checkpoint_uri,
        data_uri=options.data_uri,
        tracking_uri=options.tracking_uri,
        experiment="digits",
        job_name=options.job_name,
        work_dir=options.work_dir,
    )
    print(json.dumps({"run_id": result.run_id, "events": result.events_path, **result[0], **result.summary}))
    spark.stop()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training on images of digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="rows of one step over all workers")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--num-proc", type=int, default=2, help="workers to start with")
    parser.add_argument("--min-num-proc", type=int, default=1, help="below it the job waits for new workers")
    parser.add_argument("--max-num-proc", type=int, default=None, help="more than this are never used")
    parser.add_argument("--rpo-target-s", type=float, default=10.0, help="age of the newest checkpoint at most")
    parser.add_argument("--checkpoint-uri", default=None, help="directory that outlives the workers and the driver")
    parser.add_argument("--data-uri", default=None, help="where the rows are frozen; shared with the executors")
    parser.add_argument("--tracking-uri", default=None, help="MLflow store; default: what MLflow is set to")
    parser.add_argument("--job-name", default="digits", help="a second start under the same name resumes the first")
    parser.add_argument("--work-dir", default=None, help="holds <job-name>/events.jsonl, the log of the job")
    return parser.parse_args()


def prepare(spark):
    """``(training rows, held-out rows)`` of (image float[64] from 0 to 1, digit int)."""
    from pyspark.sql import functions as F
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    table = spark.createDataFrame(
        [(i, (image / 16).tolist(), int(digit)) for i, (image, digit) in enumerate(zip(images, digits, strict=True))],
        "number int, image array<float>, digit int",
    )
    # In the same order however many executors there are, so that a second start finds the same data.
    table = table.repartition(4, "number").sortWithinPartitions("number")
    held_out = F.pmod(F.hash("number"), F.lit(5)) == 0
    return table.where(~held_out).drop("number"), table.where(held_out).drop("number")


def train(ctx, epochs, lr):
    import horovod.torch as hvd
    import torch
    from torch import nn

    torch.set_num_threads(1)  # one core each
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=lr), named_parameters=model.named_parameters()
    )
    state = es.ElasticState(model=model, optimizer=optimizer)

    @hvd.elastic.run
    def loop(state):
        model.train()
        for batch in ctx.batches("train", state, epochs=epochs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["digit"].long()) * batch.weight
            loss.backward()
            optimizer.step()
            state.commit(loss=loss.item())

        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for batch in ctx.batches("val", epochs=1):
                guess = model(batch["image"]).argmax(dim=1)
                right += (guess == batch["digit"])[: batch.rows].sum()
        right = hvd.allreduce(right, op=hvd.Sum, name="right")
        accuracy = right.item() / ctx.rows("val")
        state.commit(val_accuracy=accuracy)
        return {"val_accuracy": accuracy, "steps": state.step}

    return loop(state)


if __name__ == "__main__":
    main()
