"""State as data: any nested state, split into plain JSON and named tensors, and put together again.

This one form serves the broadcast to newcomers, the hash on which all ranks agree, and the checkpoint. It holds what
JSON holds, plus tensors, numpy arrays and scalars, tuples, bytes, and mappings with keys that are not strings. Nothing
else, and so no code: what it cannot hold is refused by name instead of pickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_TAG = "__"


def flatten(value: Any, path: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """``(skeleton, tensors)``: JSON-able, and the tensors by name, in order of appearance. Tensors are not copied.

    Raises:
        TypeError: a value that cannot be held; the message names its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(value, path, tensors), tensors


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)) and path in tensors:
        raise TypeError(f"{path}: two values of this path, as of keys 1 and '1', or 'a/b' and a then b: rename one")
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TAG: "tensor", "at": path}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.kind in "USMm":
            raise TypeError(f"{path}: a numpy array of {value.dtype} cannot be kept; use numbers")
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False)))
        return {_TAG: "array", "at": path, "dtype": value.dtype.str[1:], "shape": list(value.shape)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "is": repr(float(value))}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "is": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "is": [_flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _flatten_mapping(value, path, tensors)
    raise TypeError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be kept in the state without pickle; "
        "give numbers, strings, lists, dicts, tensors, arrays, or an object with state_dict() and load_state_dict()"
    )


def _flatten_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(isinstance(key, str) for key in value) and _TAG not in value:
        return {key: _flatten(item, f"{path}/{key}", tensors) for key, item in value.items()}
    pairs = [
        [_flatten(key, f"{path}/key", tensors), _flatten(item, f"{path}/{key}", tensors)] for key, item in value.items()
    ]
    return {_TAG: "dict", "is": pairs}


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value again; its tensors are those given, not copies."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = skeleton.get(_TAG)
    if kind is None:
        return {key: unflatten(item, tensors) for key, item in skeleton.items()}
    if kind == "tensor":
        return tensors[skeleton["at"]]
    if kind == "array":
        return tensors[skeleton["at"]].cpu().numpy().astype(skeleton["dtype"]).reshape(skeleton["shape"])
    if kind == "float":
        return float(skeleton["is"])
    if kind == "bytes":
        return base64.b64decode(skeleton["is"])
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in skeleton["is"])
    if kind == "dict":
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in skeleton["is"]}
    raise ValueError(f"unknown mark {kind!r} in a stored state")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's content as a flat uint8 tensor on the CPU, sharing memory where it can."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def describe(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """``[name, dtype, shape]`` of each tensor: what a receiver needs to make room for them."""
    return [[name, str(tensor.dtype)[6:], list(tensor.shape)] for name, tensor in tensors.items()]


def carve(flat: torch.Tensor, description: list[list[Any]]) -> dict[str, torch.Tensor]:
    """The tensors of ``description`` out of one flat uint8 buffer that holds them one after the other, as copies."""
    out: dict[str, torch.Tensor] = {}
    for (name, dtype, shape), (start, end) in zip(description, _extents(description), strict=True):
        out[name] = flat[start:end].clone().view(getattr(torch, dtype)).reshape(shape)
    return out


def _extents(description: list[list[Any]]) -> Iterator[tuple[int, int]]:
    start = 0
    for _, dtype, shape in description:
        end = start + math.prod(shape) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        yield start, end
        start = end


def total_bytes(description: list[list[Any]]) -> int:
    """Bytes of all the tensors of a description."""
    return max((end for _, end in _extents(description)), default=0)
