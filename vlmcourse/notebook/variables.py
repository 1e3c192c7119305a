"""Variables that travel between the notebook and its ranks: values in, bytes out, and back.

What is defined in the notebook itself (functions, classes) travels by value, through cloudpickle. Tensors arrive on the
CPU, and detached from the graph that computed them. What cannot travel is named, with its type and the reason. The
bytes are only ever kept in the private folder of a cell (see `jobs.py`): pickles from elsewhere are not read.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle


class CannotTravelError(ValueError):
    """A variable cannot be sent to the ranks, or brought back from them."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Refusal(pickle.PicklingError):
    """A value that is not even tried; the message says what to send instead."""


NEED_GROUP = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers of PyTorch that cannot be built again where there are no ranks."""


def is_open_file(value: object) -> bool:
    """Whether a value is a file that somebody has opened, and not one that is only in memory."""
    standard = (sys.stdin, sys.stdout, sys.stderr)
    return isinstance(value, io.IOBase) and not isinstance(value, io.StringIO | io.BytesIO) and value not in standard


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if is_open_file(obj):
            raise Refusal("an open file stays where it was opened: send its path, or what is in it")
        torch = sys.modules.get("torch")
        if torch is not None and type(obj).__name__ in NEED_GROUP and type(obj).__module__.startswith("torch."):
            raise Refusal(
                "it needs a process group: bring its plain model back with `model = model.module`, or its state_dict()"
            )
        if torch is not None and isinstance(obj, torch.Tensor):
            if type(obj).__name__ == "DTensor":
                raise Refusal(
                    "a DTensor is spread over the ranks: call .full_tensor() on every rank and use its result"
                )
            computed = obj.requires_grad and not obj.is_leaf
            if computed or obj.device.type not in ("cpu", "meta"):
                plain = obj.detach() if computed else obj
                return plain.cpu().__reduce_ex__(self.proto)
        return super().reducer_override(obj)

    def __init__(self, file: io.BytesIO) -> None:
        self.proto = pickle.HIGHEST_PROTOCOL
        super().__init__(file, protocol=self.proto)


def dump_variables(flag: str, values: Mapping[str, object]) -> bytes:
    """Pack variables together, so that what they share stays shared (a model and its optimizer, for example).

    Args:
        flag: `--in` or `--out`, for the error message.
        values: variables by name.
    Raises:
        CannotTravelError: if one cannot be pickled; the message names it, its type and the reason.
    """
    try:
        return pickle.dumps({name: name_type(value) for name, value in values.items()}) + _dump(values)
    except _PICKLE_ERRORS as error:
        for name, value in values.items():
            try:
                _dump(value)
            except _PICKLE_ERRORS as own_error:
                raise CannotTravelError(_explain(flag, name, value, own_error)) from own_error
        raise CannotTravelError(f"{flag} {', '.join(values)}: cannot travel together: {error}") from error


def load_variables(data: bytes) -> dict[str, Any]:
    """Unpack what `dump_variables` packed on this machine.

    Raises:
        CannotTravelError: if something in it cannot be built here.
    """
    kinds: dict[str, str] = {}
    try:
        file = io.BytesIO(data)
        kinds = pickle.load(file)
        return pickle.load(file)
    except (*_PICKLE_ERRORS, ImportError, EOFError, IndexError) as error:
        what = " or ".join(f"{name} ({kind})" for name, kind in kinds.items()) if isinstance(kinds, dict) else ""
        raise CannotTravelError(
            f"{what or 'a variable'} cannot be built on this side: {type(error).__name__}: {error}; use plain data, "
            "arrays, tensors or a state_dict, or put its class into a module that both sides import"
        ) from error


_PICKLE_ERRORS = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError)
"""What objects raise that refuse to be pickled; there is no common type."""


def _dump(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def name_type(value: object) -> str:
    """Return the name of a value's type, with its module where it has one of its own."""
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _explain(flag: str, name: str, value: object, error: Exception) -> str:
    if isinstance(error, Refusal):
        return f"{flag} {name}: a {name_type(value)} cannot travel between the notebook and the ranks: {error}"
    reason = str(error).strip().splitlines()
    return (
        f"{flag} {name}: a {name_type(value)} cannot travel between the notebook and the ranks "
        f"({reason[0] if reason else type(error).__name__}): use plain data, arrays, tensors or a state_dict, "
        "or make it inside the cell"
    )
