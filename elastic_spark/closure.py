"""The training function and its arguments, as bytes for the workers.

cloudpickle, with one difference: code keeps the name of the file that it was written in. cloudpickle replaces it, and a
traceback of the user's own code would then say ``File "<dynamic-code>"`` instead of where to look.
"""

from __future__ import annotations

import collections
import io
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import cloudpickle

from elastic_spark.errors import ConfigError

_ANONYMOUS = "<dynamic-code>"


def _code_with_its_file(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if item == _ANONYMOUS else item for item in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {types.CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """As ``cloudpickle.dumps``, with file names."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call ``fn(*args, **kwargs)``.

    Raises:
        ConfigError: something in it cannot travel; where it can be told, the variable is named.
    """
    try:
        return dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise ConfigError(
            f"the training function cannot be sent to the workers: {error}{_culprit(fn)}. Make files and locks inside "
            "of the function; a SparkSession is for the driver alone: give data by data={...}"
        ) from error


def _culprit(fn: Callable[..., Any]) -> str:
    """The closed-over or global variable that cannot be pickled."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return ""
    cells = zip(code.co_freevars, getattr(fn, "__closure__", None) or (), strict=False)
    candidates = {name: cell.cell_contents for name, cell in cells}
    candidates.update({name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__})
    for name, value in candidates.items():
        try:
            dumps(value)
        except Exception:
            return f" (the variable {name!r}, a {type(value).__name__})"
    return ""
