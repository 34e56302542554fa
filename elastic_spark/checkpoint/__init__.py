"""Durable checkpoints: a verified store on any file system, written in the background.

::

    worker:  BackgroundWriter -> CheckpointStore.write_part       -> WrittenPart, told to the driver
    driver:  CheckpointStore.commit (manifest last)               -> Checkpoint, `prune`
    resume:  CheckpointStore.newest_valid, then `load` on the workers, verified as it is read

    uri/step-000000000120-<token>/state.safetensors     tensors, named <object>/<key>; of a large state one file from
                                                        each rank, state-<part>-of-<parts>.safetensors
                                  meta.json             everything else
                                  manifest.json         written last: step, cursor, sizes, SHA-256, parent, own digest

No file here is a pickle, none is written in place, none is mapped into memory.
"""

from elastic_spark.checkpoint.background import BackgroundWriter, WriteOutcome
from elastic_spark.checkpoint.manifest import JSON, Checkpoint, Rejected, StoredFile, WrittenPart, gist
from elastic_spark.checkpoint.store import CheckpointStore
from elastic_spark.checkpoint.tensorfile import shares

__all__ = [
    "JSON",
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "Rejected",
    "StoredFile",
    "WriteOutcome",
    "WrittenPart",
    "gist",
    "shares",
]
