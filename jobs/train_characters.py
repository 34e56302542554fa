"""Which character comes next? Elastic training of a small recurrent network on text.

    spark-submit jobs/train_characters.py --num-proc 3 --min-num-proc 1

Data: Python's own language reference, which is in its standard library as the text that ``help("for")`` shows. It is
cut into windows of 65 characters, each of which predicts its last 64 from those before.
"""

from __future__ import annotations

import argparse
import json
import math

import elastic_spark as es

WINDOW = 64
#: The characters that are told apart; all others are the last one.
ALPHABET = "".join(map(chr, range(32, 127))) + "\n\0"


def main() -> None:
    options = parse_options()

    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName(options.job_name).getOrCreate()
    result = es.run(
        train,
        kwargs={"epochs": options.epochs, "lr": options.lr},
        num_proc=options.num_proc,
        min_num_proc=options.min_num_proc,
        max_num_proc=options.max_num_proc,
        data={"train": prepare(spark, options.characters)},
        global_batch=options.global_batch,
        checkpoint_uri=options.checkpoint_uri,
        data_uri=options.data_uri,
        tracking_uri=options.tracking_uri,
        experiment="characters",
        job_name=options.job_name,
        work_dir=options.work_dir,
    )
    print(json.dumps({"run_id": result.run_id, "events": result.events_path, **result[0], **result.summary}))
    spark.stop()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training of a character language model.")
    parser.add_argument("--characters", type=int, default=400_000, help="how much of the text to take")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=64, help="windows of one step over all workers")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--num-proc", type=int, default=2, help="workers to start with")
    parser.add_argument("--min-num-proc", type=int, default=1, help="below it the job waits for new workers")
    parser.add_argument("--max-num-proc", type=int, default=None, help="more than this are never used")
    parser.add_argument("--checkpoint-uri", default=None, help="directory that outlives the workers and the driver")
    parser.add_argument("--data-uri", default=None, help="where the rows are frozen; shared with the executors")
    parser.add_argument("--tracking-uri", default=None, help="MLflow store; default: what MLflow is set to")
    parser.add_argument("--job-name", default="characters", help="a second start under the same name resumes the first")
    parser.add_argument("--work-dir", default=None, help="holds <job-name>/events.jsonl, the log of the job")
    return parser.parse_args()


def prepare(spark, characters):
    """Rows of (codes int[65]): windows of the text, each beginning with the last character of the one before."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:characters]
    code = {character: i for i, character in enumerate(ALPHABET)}
    codes = [code.get(character, len(ALPHABET) - 1) for character in text]
    windows = [(i, codes[i : i + WINDOW + 1]) for i in range(0, len(codes) - WINDOW, WINDOW)]
    table = spark.createDataFrame(windows, "begin int, codes array<int>")
    return table.repartition(4, "begin").sortWithinPartitions("begin").drop("begin")


def train(ctx, epochs, lr):
    import horovod.torch as hvd
    import torch
    from torch import nn

    class Net(nn.Module):
        """One GRU over embedded characters; scores of the next one at each place."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(len(ALPHABET), 32)
            self.memory = nn.GRU(32, 96, batch_first=True)
            self.scores = nn.Linear(96, len(ALPHABET))

        def forward(self, codes):  # int64[rows, length] -> float32[rows, length, characters]
            return self.scores(self.memory(self.embedding(codes))[0])

    torch.set_num_threads(1)  # one core each
    torch.manual_seed(0)
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=lr), named_parameters=model.named_parameters()
    )
    state = es.ElasticState(model=model, optimizer=optimizer, bits=math.log2(len(ALPHABET)))

    @hvd.elastic.run
    def loop(state):
        for batch in ctx.batches("train", state, epochs=epochs):
            codes = batch["codes"].long()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())
            (loss * batch.weight).backward()
            optimizer.step()
            state.bits = 0.9 * state.bits + 0.1 * loss.item() / math.log(2)
            state.commit(loss=loss.item(), bits_per_character=state.bits)
        return {"bits_per_character": state.bits, "steps": state.step, "sample": sample(model)}

    return loop(state)


def sample(model, length=120, begin="The "):
    """What the model writes, one character at a time."""
    import torch

    torch.manual_seed(0)
    codes = [ALPHABET.index(character) for character in begin]
    with torch.no_grad():
        for _ in range(length):
            scores = model(torch.tensor([codes[-WINDOW:]]))[0, -1]
            codes.append(int(torch.multinomial(torch.softmax(scores / 0.7, dim=0), 1)))
    return "".join(ALPHABET[code] for code in codes)


if __name__ == "__main__":
    main()
