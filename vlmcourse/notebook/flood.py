"""What a notebook can take of a flood of lines: its beginning, its end, and in between how many lines there were.

Enters: tagged lines with the time. Leaves: the lines to show now. Slow output, however long, is shown as it comes. All
lines of a flood are kept in a file (see `kept_output.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vlmcourse.notebook.kept_output import KeptOutput

BURST_LINES = 1000
"""What is shown however fast it comes."""
LINES_PER_S = 50.0
"""What is shown however long it goes on: faster than anyone reads, and no trouble for a browser."""
RESUME_AFTER_S = 1.0
"""A flood is over after a pause of so long, or twice as long at half the rate above."""
NEWS_EVERY_S = 10.0
"""How often a flood that goes on shows where it is."""
NUM_LAST = 200
NUM_LATEST = 10
"""How many of its lines a flood shows at its end, and on its way or before a display."""
LIMITS = f"(of a flood only the first {BURST_LINES:,} and the last {NUM_LAST} are; --ranks 0 shows one rank)"
CHARS_OF_A_LINE = 500
"""A longer line counts as several."""
MAX_LINE_CHARS = 10_000


class FloodLimit:
    """Decides which lines are shown, and when."""

    def __init__(self, kept: KeptOutput, now_s: float) -> None:
        """Begin with nothing shown; `kept` receives every line."""
        self._kept = kept
        self._may_show = float(BURST_LINES)
        self._at_s = now_s
        self._is_flood = False
        self._news_at_s = 0.0
        self._last: deque[str] = deque(maxlen=NUM_LAST)
        self._num_hidden = 0
        """Lines since the last one that was shown."""

    def feed(self, lines: Sequence[tuple[str, str]], now_s: float) -> list[str]:
        """Take lines; return those to show now, in order.

        Args:
            lines: each with its tag, such as `[0-3]`, and its text without an end.
            now_s: seconds on a clock that only goes forward.
        """
        self._kept.write([f"{tag} {text}" for tag, text in lines])
        shown = self.idle(now_s)
        for index, (tag, text) in enumerate(lines):
            if not self._is_flood:
                cost = 1 + min(len(text), MAX_LINE_CHARS) // CHARS_OF_A_LINE
                if self._may_show >= cost:
                    self._may_show -= cost
                    shown.append(self._cut(tag, text))
                    continue
                self._is_flood, self._news_at_s = True, now_s + NEWS_EVERY_S
            num_hidden = len(lines) - index
            self._may_show = max(0.0, self._may_show - num_hidden)
            self._num_hidden += num_hidden
            self._last.extend(self._cut(tag, text) for tag, text in lines[index:][-NUM_LAST:])
            break
        return shown

    def idle(self, now_s: float) -> list[str]:
        """Return what the passing of time gives to show: the end of a flood, or news of it."""
        self._may_show = min(BURST_LINES, self._may_show + (now_s - self._at_s) * LINES_PER_S)
        self._at_s = now_s
        if not self._is_flood:
            return []
        if self._may_show >= RESUME_AFTER_S * LINES_PER_S:
            return self.finish()
        if now_s >= self._news_at_s:
            self._news_at_s = now_s + NEWS_EVERY_S
            return self.latest(NUM_LATEST)
        return []

    def finish(self) -> list[str]:
        """Return the end of the flood, if there is one; what follows is shown again."""
        self._is_flood = False
        return self.latest(NUM_LAST)

    def latest(self, num_lines: int = NUM_LATEST) -> list[str]:
        """Return the latest lines that have not been shown, at most so many, and before them how many are left out."""
        shown = list(self._last)[-num_lines:]
        num_left_out = self._num_hidden - len(shown)
        self._last.clear()
        self._num_hidden = 0
        if num_left_out:
            lines = f"{num_left_out:,} line{'s' * (num_left_out != 1)}"
            shown.insert(0, f"... {lines} not shown {LIMITS}{self._where()}")
        return shown

    def _cut(self, tag: str, text: str) -> str:
        if len(text) <= MAX_LINE_CHARS:
            return f"{tag} {text}"
        return f"{tag} {text[:MAX_LINE_CHARS]} ... ({len(text):,} characters{self._where()})"

    def _where(self) -> str:
        return f"; {self._kept.describe()}"
