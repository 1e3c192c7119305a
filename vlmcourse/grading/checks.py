"""What graded cells are built from: one text for equal values, and calls that a learner's code cannot upset.

Enters: a learner's function or expression. Leaves: its value as canonical text (which `autotests.yml` compares), or an
`Outcome` (value or error, never an exception). Points are always a plain number between 0 and the cell's maximum,
because nbgrader takes anything that is not a number for full marks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import io
import math
import numbers
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

DIGITS = 5
"""Significant digits in which two numbers must agree; whole numbers must agree in all."""
NUDGE = 1.3e-6
"""Relative shift before rounding, so that a round number (the usual case in an exercise) is not on the edge between
two roundings where the last bit of a float decides."""
SEED = 20240
CALL_LIMIT_S = 5.0
MAX_SHOWN = 3
"""Wrong cases that the feedback shows."""


def canonical(evaluate: Callable[[], object], seed: int = SEED) -> str:
    """Evaluate an expression from a fixed seed and return its value as text that equal values share.

    Numbers agree across int, float, numpy and 0-dimensional tensors; list and tuple are one; a dict's order does not
    count; tensors are compared by shape, norm and three projections. What the expression prints is dropped, so that a
    warning does not count as a failure.

    Args:
        evaluate: called without arguments; the random generators of Python, numpy and torch (those in use) are seeded
            before.
        seed: of the generators.

    Returns:
        Text without quotes, backslashes and line breaks.
    """
    reseed(seed)
    with quiet():
        return describe(evaluate())


def reseed(seed: int) -> None:
    """Seed the random generators of Python, and of numpy and torch where they have been imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


_problems: list[str] = []
"""What the AUTOTEST cell that runs now has found wrong so far."""


def begin() -> None:
    """Start an AUTOTEST cell: forget what an earlier one found."""
    _problems.clear()


def require(evaluate: Callable[[], str], expected: str, message: str) -> None:
    """Run one AUTOTEST line: print and remember what is wrong, so that `finish` gives no points.

    A part that is not solved yet is named in one line. Any other error of the learner's code is raised, as its
    traceback shows where.

    Args:
        evaluate: gives the canonical text of the learner's value, or a hash of it.
        expected: what it must be.
        message: what to print where it differs; both values follow unless they are hashes.
    """
    try:
        got = evaluate()
    except NotImplementedError as error:
        if str(error):
            raise
        problem = f"{_raising_function(error) or message.removesuffix(' is not right')} is not solved yet"
    else:
        if got == expected:
            return
        hashed = len(expected) == 64 and all(character in "0123456789abcdef" for character in expected)
        problem = message if hashed else f"{message}: expected {expected}, got {got}"
    if problem not in _problems:
        _problems.append(problem)
        print(problem)


def finish() -> float | None:
    """End an AUTOTEST cell: print "Success!", or return 0 where a line found something wrong.

    The number is the cell's result, which nbgrader takes for its points. It does not stop "Run All", as an error would.
    """
    failed = bool(_problems)
    _problems.clear()
    if failed:
        return 0.0
    print("Success!")
    return None


def _raising_function(error: BaseException) -> str:
    """Return the name of the function that raised an error, or "" if it has none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = frames[-1].f_code.co_name if frames else ""
    return name if name.isidentifier() else ""


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one call of a learner's function."""

    value: Any = None
    error: str = ""
    """One line; empty if the call returned."""
    unsolved: bool = False
    """The function is still the blank one of the release."""
    timed_out: bool = False


def call(function: Any, *args: Any, limit_s: float = CALL_LIMIT_S) -> Outcome:
    """Call a learner's function; whatever it does becomes an `Outcome`.

    Args:
        function: what the learner defined under the name asked for.
        args: its arguments.
        limit_s: seconds after which the call is stopped (in the main thread of a POSIX system).
    """
    if not callable(function):
        return Outcome(error=f"this is not a function but {type(function).__name__}")
    try:
        with quiet(), time_limit(limit_s):
            return Outcome(value=function(*args))
    except NotImplementedError as error:
        blank = not str(error)  # what the release's stub raises; a message would be the learner's own
        return Outcome(error="not solved yet" if blank else f"NotImplementedError: {error}", unsolved=blank)
    except (Exception, SystemExit) as error:  # the boundary to code that is not ours: any error is a wrong answer
        first_line = (str(error).strip() or "no message").splitlines()
        text = f"{type(error).__name__}: {' '.join(line.strip() for line in first_line[:4])}"
        return Outcome(error=text, timed_out=isinstance(error, TimeoutError))


@dataclass
class Asked:
    """What came of asking a learner's function about one case after the other."""

    earned: float = 0.0
    """Cases' worth, each at most 1; a case that was not asked is worth nothing."""
    num_wrong: int = 0
    """Cases asked that were worth less than 1."""
    answers: list[tuple[Any, Any]] = field(default_factory=list)
    """Each case with its answer as `judge` read it, those left out whose answer could not be read."""
    stopped: bool = False
    """The last call took too long, and no other case was asked: it would take as long."""


def ask_each(
    name: str,
    cases: Iterable[Any],
    ask: Callable[[Any], Outcome],
    judge: Callable[[Any, Outcome], tuple[Any, float, str]],
) -> Asked | None:
    """Ask a learner's function about each case, and print the first wrong ones.

    Args:
        name: of the function, for the feedback.
        cases: what `ask` and `judge` understand.
        ask: calls the function, as `call` does.
        judge: returns the answer as the caller keeps it (None leaves it out), its worth from 0 to 1, and a line about
            the case and what is wrong with the answer, which counts where the worth is below 1.

    Returns:
        None, with a line printed, where the function is not solved yet.
    """
    asked, lines = Asked(), []
    for case in cases:
        outcome = ask(case)
        if outcome.unsolved:
            print(f"{name} is not solved yet")
            return None
        answer, worth, line = judge(case, outcome)
        if answer is not None:
            asked.answers.append((case, answer))
        if worth < 1:
            lines.append(line)
        asked.earned += worth
        asked.stopped = outcome.timed_out
        if asked.stopped:
            break
    asked.num_wrong = len(lines)
    show_first(lines)
    return asked


def show_first(lines: Sequence[str]) -> None:
    """Print some of the lines about wrong cases, and how many more there are."""
    for line in lines[:MAX_SHOWN]:
        print(line)
    if len(lines) > MAX_SHOWN:
        print(f"... and {len(lines) - MAX_SHOWN} more")


def explain_signature(function: Any, *names: str) -> str:
    """Return what to change where a learner's function cannot be called with these arguments by position, or "".

    Args:
        function: what the learner defined; what is no function, or has no signature to be read, is left to `call`.
        names: of the arguments, as the task gives them.
    """
    try:
        signature = inspect.signature(function)
        takes = str(signature)
    except Exception:  # the boundary to code that is not ours
        return ""
    try:
        signature.bind(*names)
    except TypeError:
        return f"your function must take ({', '.join(names)}), and takes {takes}"
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what is printed inside: text on stderr would make nbgrader give a cell zero points."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop what runs inside after a time, by raising `TimeoutError` in it.

    It raises again every further second, as the code inside may catch the first. Without effect outside the main
    thread and where there is no SIGALRM; the cell's own time limit still holds there.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s: the task needs arithmetic only")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def is_close(got: Any, expected: float, relative: float = 1e-4) -> bool:
    """Tell whether an answer is a real, finite number near the expected one (no bool, no text, no NaN)."""
    return as_number(got) is not None and math.isclose(float(got), expected, rel_tol=relative)


def as_number(value: Any) -> float | None:
    """Return an answer as a finite float; None if it is not a real number."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a tensor or an array of one number
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def award(points: float, num_right: float, num_cases: int) -> float:
    """Return the share of a cell's points, rounded to two decimals.

    Args:
        points: the cell's maximum.
        num_right: right cases.
        num_cases: all cases.
    """
    return round(points * min(max(num_right / num_cases, 0.0), 1.0), 2)
