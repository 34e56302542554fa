"""Modules, losses, metrics and optimizers as JSON: how they are saved, and loaded without running foreign bytes.

A pickle runs code when it is loaded, and so does ``torch.export.load``, which unpickles; TorchScript is deprecated. So
a stage is saved as a *recipe*, which names importable code and its arguments, next to tensors as safetensors::

    {"ref": "torch.nn.functional:mse_loss"}                                a function or a class
    {"call": "torch.optim.adam:Adam", "kwargs": {"lr": 0.01}}              functools.partial of one
    {"layers": {"class": ..., "kwargs": {...}, "children": {...}}}         an instance made of torch.nn layers

The last one is read off the instance, layer by layer, and checked by building it again. An instance of a class of
one's own does not tell its arguments: give the class, or a ``functools.partial`` of it, instead.

Loading imports the modules that are named, and builds layers. Of other code it calls only what says that it makes a
module: a subclass of ``torch.nn.Module``, or a function that is annotated to return one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from elastic_spark.errors import ConfigError

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def describe(value: Any, what: str) -> dict[str, Any]:
    """The recipe of ``value``; ``what`` names it in messages.

    Raises ConfigError for what could not be made again from a recipe, and says what to give instead.
    """
    if isinstance(value, nn.Module):
        return {"layers": _describe_instance(value, what)}
    if isinstance(value, functools.partial):
        if value.args:
            raise ConfigError(f"{what}: a functools.partial with positional arguments cannot be saved: name them")
        _require_json(value.keywords, what)
        return {"call": _path_of(value.func, what), "kwargs": dict(value.keywords)}
    return {"ref": _path_of(value, what)}


def restore(recipe: Mapping[str, Any], what: str) -> Any:
    """The value that `describe` was given. Factories come back as such, and are not called.

    Raises ConfigError where the code that it names cannot be imported.
    """
    if "layers" in recipe:
        return _build(recipe["layers"], what)
    if "call" in recipe:
        return functools.partial(_import(recipe["call"], what), **recipe["kwargs"])
    return _import(recipe["ref"], what)


def make_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module of one's own: a copy of an instance, or what a factory makes with torch seeded by ``seed``.

    Raises ConfigError where that is no module.
    """
    import copy

    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = model()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model: {model!r} made a {type(module).__name__}, not a torch.nn.Module")
    return module


def make_restored_module(recipe: Mapping[str, Any]) -> nn.Module:
    """The module of a recipe read from a file. Its weights are arbitrary.

    Raises ConfigError for a factory that does not say that it makes a module.
    """
    made = restore(recipe, "model")
    if isinstance(made, nn.Module):
        return made
    require_module_factory(made)
    return make_module(made, 0)


def require_module_factory(made: Any) -> None:
    """Raises ConfigError unless it is a class of modules, or a function that is annotated to return a module."""
    factory = made.func if isinstance(made, functools.partial) else made
    if not _makes_module(factory):
        raise ConfigError(
            f"model: {factory!r} would not be called when loaded, as it is neither a torch.nn.Module class nor a "
            "function annotated to return one: annotate it"
        )


def _makes_module(factory: Any) -> bool:
    if isinstance(factory, type):
        return issubclass(factory, nn.Module)
    try:
        promised = typing.get_type_hints(factory).get("return")
    except Exception:
        return False
    return isinstance(promised, type) and issubclass(promised, nn.Module)


# ---- names


def _path_of(value: Any, what: str) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        shown = getattr(value, "__qualname__", None) or type(value).__qualname__
        raise ConfigError(
            f"{what}: {shown} of {module or 'nowhere'} cannot be saved, because another process could not import it: "
            "define it at the top level of a module that is shipped with the job (--py-files)"
        )
    path = f"{module}:{name}"
    if _import(path, what) is not value:
        raise ConfigError(f"{what}: {path} names something else by now, so it cannot be saved")
    return path


def _import(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what}: cannot import {path}: {error}. Is its module shipped (--py-files)?") from error
    return found


def _require_json(kwargs: Mapping[str, Any], what: str) -> None:
    for name, value in kwargs.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what}: argument {name}={value!r} cannot be saved as JSON: {error}") from error


# ---- instances made of torch's own layers


def _describe_instance(module: nn.Module, what: str) -> dict[str, Any]:
    layers = _describe_layer(module, what)
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return {**layers, "frozen": frozen} if frozen else layers


def _describe_layer(module: nn.Module, what: str) -> dict[str, Any]:
    """A layer, shown to be right by building it again; a container by its children."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn."):
        raise ConfigError(f"{what}: {_unclear(module)}")
    body: dict[str, Any] = {"class": f"{kind.__module__}:{kind.__qualname__}"}
    if kind in _CONTAINERS:
        body["children"] = {name: _describe_layer(child, what) for name, child in module.named_children()}
        return body
    kwargs = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        value = getattr(module, name, None)
        if name == "bias":
            value = value is not None and value is not False
        if name in ("device", "dtype") or value is None or value == parameter.default:
            continue
        kwargs[name] = value
    body["kwargs"] = kwargs
    try:
        _require_json(kwargs, what)
        again = _build(body, what)
    except Exception as error:
        raise ConfigError(f"{what}: {_unclear(module)} ({error})") from error
    if repr(again) != repr(module) or _shapes(again) != _shapes(module):
        raise ConfigError(f"{what}: {_unclear(module)}")
    return body


def _build(layers: Mapping[str, Any], what: str) -> nn.Module:
    kind = _import(layers["class"], what)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.")):
        raise ConfigError(f"{what}: {layers['class']} is not a layer of torch.nn")
    if "children" in layers:
        children = {name: _build(child, what) for name, child in layers["children"].items()}
        module = kind()
        for name, child in children.items():
            module.add_module(name, child)
    else:
        module = kind(**{name: _hashable(value) for name, value in layers["kwargs"].items()})
    for name in layers.get("frozen", ()):
        module.get_parameter(name).requires_grad_(False)
    return module


def _hashable(value: Any) -> Any:
    """Lists as tuples: JSON has no tuples, and torch shows them apart."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _shapes(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}


def _unclear(module: nn.Module) -> str:
    name = type(module).__qualname__
    return (
        f"an instance of {name} does not tell how it was made, so it cannot be saved: give the class {name}, or "
        f"functools.partial({name}, width=64, ...), in place of the instance"
    )
