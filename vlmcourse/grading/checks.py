"""What graded cells are built from: one text for equal values, and calls that a learner's code cannot upset.

Enters: a learner's function or expression. Leaves: its value as canonical text (which `autotests.yml` compares), or an
`Outcome` (value or error, never an exception). Points are always a plain number between 0 and the cell's maximum,
because nbgrader takes anything that is not a number for full marks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import numbers
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from vlmcourse.grading.texts import describe
from vlmcourse.grading.traces import Printed, describe_place, places_of, show_printed

SEED = 20240
CALL_LIMIT_S = 5.0
ARITHMETIC = "the task needs arithmetic only"
"""What a call that takes too long is told where a task says nothing of its own."""
MAX_SHOWN = 3
"""Wrong cases that the feedback shows."""


def canonical(evaluate: Callable[[], object], seed: int = SEED) -> str:
    """Evaluate an expression from a fixed seed and return its value as text that equal values share.

    Numbers agree across int, float, numpy and 0-dimensional tensors; list and tuple are one; a dict's order does not
    count; tensors are compared by shape, norm and three projections. What the expression prints is kept for `finish`,
    so that it is no output of its own: a warning does not count as a failure.

    Args:
        evaluate: called without arguments; the random generators of Python, numpy and torch (those in use) are seeded
            before.
        seed: of the generators.

    Returns:
        Text without quotes, backslashes and line breaks.
    """
    reseed(seed)
    with quiet() as printed:
        try:
            return describe(evaluate())
        finally:
            _printed.append(printed.getvalue())


def reseed(seed: int) -> None:
    """Seed the random generators of Python, and of numpy and torch where they have been imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


_problems: list[str] = []
"""What the AUTOTEST cell that runs now has found wrong so far."""
_printed: list[str] = []
"""What the learner's code printed in each line of that cell so far."""


def begin() -> None:
    """Start an AUTOTEST cell: forget what an earlier one found."""
    _problems.clear()
    _printed.clear()


def require(evaluate: Callable[[], str], expected: str, message: str) -> None:
    """Run one AUTOTEST line: print and remember what is wrong, so that `finish` gives no points.

    A part that is not solved yet is named in one line. Any other error of the learner's code is raised, as its
    traceback shows where. What the learner's code printed in the first wrong line follows.

    Args:
        evaluate: gives the canonical text of the learner's value, or a hash of it.
        expected: what it must be.
        message: what to print where it differs; both values follow unless they are hashes.
    """
    try:
        got = evaluate()
    except NotImplementedError as error:
        if str(error):
            show_printed((text, True) for text in _printed[-1:])
            raise
        problem = f"{_raising_function(error) or message.removesuffix(' is not right')} is not solved yet"
    except BaseException:
        show_printed((text, True) for text in _printed[-1:])
        raise
    else:
        if got == expected:
            return
        hashed = len(expected) == 64 and all(character in "0123456789abcdef" for character in expected)
        problem = message if hashed else f"{message}: expected {expected}, got {got}"
    if problem not in _problems:
        _problems.append(problem)
        print(problem)
        show_printed((text, True) for text in _printed[-1:] if len(_problems) == 1)


def finish() -> float | None:
    """End an AUTOTEST cell: print "Success!", or return 0 where a line found something wrong.

    The number is the cell's result, which nbgrader takes for its points. It does not stop "Run All", as an error would.
    """
    failed = bool(_problems)
    _problems.clear()
    if failed:
        return 0.0
    show_printed((text, False) for text in _printed)
    print("Success!")
    return None


def _raising_function(error: BaseException) -> str:
    """Return the name of the function that raised an error, or "" if it has none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = frames[-1].f_code.co_name if frames else ""
    return name if name.isidentifier() else ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one call of a learner's function."""

    value: Any = None
    error: str = ""
    """One line, with the line of the learner's code that failed; empty if the call returned."""
    raised: type[BaseException] | None = None
    """The class of the exception that ended the call."""
    unsolved: bool = False
    """The function, or one that it calls, is still the blank one of the release."""
    blank: str = ""
    """The name of the one that is."""
    timed_out: bool = False
    printed: str = ""
    """The beginning of what it printed."""

    @property
    def refused(self) -> bool:
        """Whether the input was refused, as tasks ask for it: with a ValueError, or an exception derived from it."""
        return self.raised is not None and issubclass(self.raised, ValueError)


def call(function: Any, *args: Any, limit_s: float = CALL_LIMIT_S, advice: str = ARITHMETIC) -> Outcome:
    """Call a learner's function; whatever it does becomes an `Outcome`.

    Args:
        function: what the learner defined under the name asked for.
        args: its arguments.
        limit_s: seconds after which the call is stopped (in the main thread of a POSIX system).
        advice: what is said of a call that was stopped, besides how long it took.
    """
    if not callable(function):
        return Outcome(error=f"this is not a function but {type(function).__name__}")
    with quiet() as printed:
        outcome = _call(function, args, limit_s, advice)
    return dataclasses.replace(outcome, printed=printed.getvalue())


def _call(function: Callable[..., Any], args: Sequence[Any], limit_s: float, advice: str) -> Outcome:
    """Call a function; an error becomes one line."""
    try:
        with time_limit(limit_s, advice):
            return Outcome(value=function(*args))
    except NotImplementedError as error:
        blank = not str(error)  # what the release's stub raises; a message would be the learner's own
        text = "not solved yet" if blank else f"NotImplementedError: {error}{describe_place(places_of(error))}"
        return Outcome(error=text, raised=type(error), unsolved=blank, blank=_raising_function(error) if blank else "")
    except (Exception, SystemExit) as error:  # the boundary to code that is not ours: any error is a wrong answer
        first_line = (str(error).strip() or "no message").splitlines()
        text = f"{type(error).__name__}: {' '.join(line.strip() for line in first_line[:4])}"
        text += describe_place(places_of(error))
        return Outcome(error=text, raised=type(error), timed_out=isinstance(error, TimeoutError))


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
    """Ask a learner's function about each case, and print the first wrong ones and what the function printed.

    Args:
        name: of the function, for the feedback.
        cases: what `ask` and `judge` understand.
        ask: calls the function, as `call` does.
        judge: returns the answer as the caller keeps it (None leaves it out), its worth from 0 to 1, and a line about
            the case and what is wrong with the answer, which counts where the worth is below 1; an empty one is not
            shown.

    Returns:
        None, with a line printed, where the function is not solved yet.
    """
    asked, lines, printed = Asked(), list[str](), list[tuple[str, bool]]()
    for case in cases:
        outcome = ask(case)
        if outcome.unsolved:
            print(f"{name} is not solved yet")
            show_printed([(outcome.printed, True)])
            return None
        answer, worth, line = judge(case, outcome)
        printed.append((outcome.printed, worth < 1))
        if answer is not None:
            asked.answers.append((case, answer))
        if worth < 1:
            lines.append(line)
        asked.earned += worth
        asked.stopped = outcome.timed_out
        if asked.stopped:
            break
    asked.num_wrong = len(lines)
    show_first([line for line in lines if line])
    show_printed(printed)
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
def quiet(printed: Printed | None = None) -> Iterator[Printed]:
    """Catch what is printed inside, and drop stderr: text on it would make nbgrader give a cell zero points.

    Args:
        printed: what catches it, where several calls share one.
    """
    printed = Printed() if printed is None else printed
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(Printed()):
        yield printed


@contextlib.contextmanager
def time_limit(seconds: float, advice: str = ARITHMETIC) -> Iterator[None]:
    """Stop what runs inside after a time, by raising `TimeoutError` in it, with a word of advice.

    It raises again every further second, as the code inside may catch the first. Without effect outside the main
    thread and where there is no SIGALRM; the cell's own time limit still holds there.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s: {advice}")

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
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # a signalling NaN of decimal
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
