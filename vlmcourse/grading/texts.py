"""One text for equal values, whatever their types: what the expected and the learner's value are compared by.

Enters: any value. Leaves: text without quotes, backslashes and line breaks; numbers are rounded to `DIGITS`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any
from urllib.parse import quote

DIGITS = 5
"""Significant digits in which two numbers must agree; whole numbers must agree in all."""
NUDGE = 1.3e-6
"""Relative shift before rounding, so that a round number (the usual case in an exercise) is not on the edge between
two roundings where the last bit of a float decides."""


def describe(value: Any) -> str:
    """Return the canonical text of a value; see `canonical`."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return f"complex({describe(value.real)},{describe(value.imag)})"
    if isinstance(value, numbers.Real):
        return describe_number(value)
    if isinstance(value, (str, bytes)):
        return ("b" if isinstance(value, bytes) else "") + f"text:{quote(value, safe=' =,.:;()[]/+-*<>%')}"
    if hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype"):
        return _describe_array(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({','.join(f'{name}={describe(item)}' for name, item in pairs)})"
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{describe(key)}:{describe(item)}" for key, item in value.items())) + "}"
    if isinstance(value, Set):
        return "set(" + ",".join(sorted(describe(item) for item in value)) + ")"
    if isinstance(value, (Sequence, Iterator, range)):
        return "[" + ",".join(describe(item) for item in value) + "]"
    return f"{type(value).__name__}:{quote(str(value), safe=' ')}"


def describe_number(value: Any) -> str:
    """Return a number's canonical text: whole numbers exactly, others in `DIGITS` significant digits."""
    if isinstance(value, numbers.Integral):
        return str(int(value))
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    nearest = round(number)
    if abs(number - nearest) <= 1e-9 * abs(number) and abs(number) < 1e15:
        return str(nearest)
    text = f"{number * (1 + NUDGE):.{DIGITS}g}"
    return str(int(float(text))) if float(text).is_integer() and abs(float(text)) < 10**DIGITS else text


def _describe_array(value: Any) -> str:
    """Describe a numpy array or a tensor: exactly where it holds integers, else by what rounding cannot upset."""
    import numpy

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    array = numpy.asarray(value)
    if array.ndim == 0:
        return describe(array.item())
    shape = "x".join(map(str, array.shape))
    if array.dtype.kind not in "fc":
        digest = hashlib.sha256(numpy.ascontiguousarray(array).astype(numpy.int64).tobytes()).hexdigest()[:16]
        return f"array[{shape}]({digest})"
    flat = array.astype(numpy.complex128 if array.dtype.kind == "c" else numpy.float64).ravel()
    if flat.dtype.kind == "c":
        flat = numpy.concatenate([flat.real, flat.imag])
    finite = numpy.isfinite(flat)
    if not finite.all():
        places = numpy.where(numpy.isnan(flat), 2, numpy.sign(flat)) * ~finite
        shape += f",{hashlib.sha256(places.astype(numpy.int8).tobytes()).hexdigest()[:16]}"
        flat = numpy.where(finite, flat, 0.0)
    norm = float(numpy.linalg.norm(flat))
    if not math.isfinite(norm) or norm == 0:
        return f"array[{shape}](norm={norm})"
    index = numpy.arange(1, flat.size + 1)
    probes = [float(numpy.sin(index * step) @ flat) / norm for step in (0.7548776662, 1.3247179572, 2.0)]
    return f"array[{shape}](norm={describe_number(norm)},probes={','.join(f'{p + NUDGE:.3f}' for p in probes)})"
