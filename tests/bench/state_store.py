"""The checkpoint store against the disk and against torch: one JSON line.

    python tests/bench/state_store.py [folder] [trials]

A state of 302 MB (25.2 M parameters, Adam). Each trial takes every measure once, in turn, so that a noisy moment hits
all alike; figures are medians, ``*_min_s`` the best. ``write_ratio``: median over trials of plain time by our time.

* ``disk_limit_mb_s``: the same bytes written in order to one file, then fsync.
* ``write_mb_s``: `CheckpointStore.write_part`: the same, hashed, with the meta file and the directories synced.
* ``load_verify_s`` and ``verify_s``: `load` (tensors in memory, every byte checked) and `verify` (constant memory).
* ``torch_save_s``, ``torch_load_s``: `torch.save` with fsync, `torch.load`; nothing is checked. Files are read from the
  page cache, as after a restart on the same machine.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from elastic_spark.checkpoint import CheckpointStore


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {f"{name}/{i}": torch.randn(1024, 1024, generator=generator) for name in names for i in range(24)}


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(folder: str, trials: int) -> dict[str, float]:
    tensors, store = state(), CheckpointStore(f"{folder}/store")
    plain_path, torch_path = f"{folder}/plain", f"{folder}/torch.pt"

    def plain() -> None:
        with open(plain_path, "wb", buffering=0) as file:
            for tensor in tensors.values():
                file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
            os.fsync(file.fileno())

    def torch_save() -> None:
        with open(torch_path, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    times: dict[str, list[float]] = {}
    for trial in range(trials):

        def take(name: str, action: Callable[[], object]) -> None:
            times.setdefault(name, []).append(timed(action))

        take("plain", plain)
        os.unlink(plain_path)
        take("write", lambda trial=trial: store.write_part(trial, tensors, {}, token="t"))
        store.discard(trial, "t")
        checkpoint = store.commit(trial, "c", [store.write_part(trial, tensors, {}, token="c")], fields={})
        take("load_verify", lambda checkpoint=checkpoint: store.load(checkpoint))
        take("verify", lambda checkpoint=checkpoint: store.verify(checkpoint))
        store.discard(trial, "c")
        take("torch_save", torch_save)
        take("torch_load", lambda: torch.load(torch_path))
        os.unlink(torch_path)
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    result = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    result |= {f"{name}_min_s": min(values) for name, values in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["plain"], times["write"], strict=True))
    return result | {
        "trials": trials,
        "megabytes": megabytes,
        "write_mb_s": megabytes / result["write_s"],
        "disk_limit_mb_s": megabytes / result["plain_s"],
        "write_ratio": ratio,
        "torch_save_load_s": result["torch_save_s"] + result["torch_load_s"],
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None)
    try:
        figures = measure(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 9)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
