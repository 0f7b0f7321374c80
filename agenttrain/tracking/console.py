"""Progress on the console: a live line in a terminal, plain lines in logs.

`printable` makes text that a model or a tool wrote safe for a terminal.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_EVERY = 10
"""Plain mode prints the first step, the last one, and every 10th; more in short runs."""
COUNTED_AFTER_S = 5.0
"""In a phase longer than this, the live line shows finished rollouts instead of metrics."""
COUNTED_EVERY_S = 15.0
"""Seconds between two lines about finished rollouts in plain mode."""
_SHOWN = (
    ("reward", "reward", "{:.2f}"),
    ("success", "success", "{:.2f}"),
    ("tools/call_frequency", "calls", "{:.1f}"),
    ("tokens_per_s", "tok/s", "{:.0f}"),
)
"""Metric, its label and its format in the line of a step."""
_SHOWN_SUPERVISED = (("loss", "loss", "{:.4f}"), ("tokens_per_s", "tok/s", "{:.0f}"))
"""Metrics shown for `agenttrain sft`, which has no reward."""
_SHOWN_LAST = (("perf/mfu", "mfu", "{:.2f}"), ("cost/total", "cost", "{:.2f}"))
"""Metrics of some runs, shown after the others where there is room."""
MOST_SOURCES = 4
"""Sources of a mixture whose rewards are shown."""
ROOMY = 110
"""Columns of a terminal whose live line has room for them."""


def _source_rewards(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Return (metric, label, format) of the reward of each source of a mixture, for a step's line.

    Example: ``[("source/shop/reward", "shop", "{:.2f}")]``. A source without a rollout in the step
    has none. With more than MOST_SOURCES sources the list is empty: they would not fit into a line.
    """
    matches = (re.fullmatch(r"source/([^/]+)/reward", name) for name in metrics)
    # NaN, which is not equal to itself, is the reward of a source without a rollout.
    rewards = [(m[0], m[1], "{:.2f}") for m in matches if m and metrics[m[0]] == metrics[m[0]]]
    return rewards if len(rewards) <= MOST_SOURCES else []


class ConsoleProgress:
    """Progress of a run: step, reward, success, tool calls per rollout, tokens per second, ETA.

    A context manager, which always restores the terminal. ::

        with ConsoleProgress(total_steps=60) as progress:
            progress.phase("rollout")
            progress.update(1, {"reward": 0.25, "tokens_per_s": 5210.0})
    """

    def __init__(
        self,
        total_steps: int,
        *,
        live: bool = True,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        """Print plain lines with `live=False`, or on a console that is no terminal.

        `first_step`: steps that the resumed run had done.
        """
        # Bind the current stream: a later sys.stdout must not get half of a live line.
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._total = total_steps
        self._first = first_step
        self._started = time.monotonic()
        self._phase = "start"
        self._reported = time.monotonic()
        """Time when the phase began or plain mode last reported its rollouts."""
        self._progress: Progress | None = None
        if live and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description:<7}", style="cyan", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
                TextColumn("{task.fields[values]}", style="bold", markup=False),
                TimeRemainingColumn(compact=True),
                console=self.console,
                expand=True,
                refresh_per_second=4,
                speed_estimate_period=600,
            )
            # Set as a start, not as an update: earlier steps say nothing about this run's speed.
            self._task = self._progress.add_task(
                "start", total=total_steps, completed=first_step, values=""
            )

    def __enter__(self) -> ConsoleProgress:
        self._started = time.monotonic()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self) -> None:
        """Start the clock at the first step, so that the ETA does not count loading."""
        self._started = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that step `step` (from 1) is done; missing metrics are left out."""
        # Example: ``reward 0.25  success 0.24  calls 1.9  tok/s 5210``
        shown = _SHOWN if "reward" in metrics else _SHOWN_SUPERVISED
        has_room = self._progress is None or self.console.width >= ROOMY
        values = "  ".join(
            f"{label} {shape.format(metrics[name])}"
            for name, label, shape in (
                *(*shown, *_source_rewards(metrics)),
                *(_SHOWN_LAST if has_room else ()),
            )
            if name in metrics
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, values=values)
            return
        # Plain mode: a line for the first step, the last one and every `line_every`-th.
        line_every = max(1, min(PLAIN_EVERY, self._total // 10))
        if step in (self._first + 1, self._total) or step % line_every == 0:
            elapsed_s = time.monotonic() - self._started
            left_s = round((self._total - step) * elapsed_s / max(step - self._first, 1))
            minutes, seconds = divmod(left_s, 60)
            hours, minutes = divmod(minutes, 60)
            eta = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
            self.log(f"step {step}/{self._total}  {values}  eta {eta}")

    def phase(self, name: str) -> None:
        """Enter a phase of the run: `rollout`, `train`, `eval`; a live line shows it."""
        self._phase, self._reported = name, time.monotonic()
        if self._progress is not None:
            self._progress.update(self._task, description=name)

    def rollouts(self, finished: int, total: int) -> None:
        """Show that `finished` of `total` rollouts of this phase are done.

        In a run of several processes, these are the ones of this process. The live line shows them
        from COUNTED_AFTER_S into the phase on; plain mode prints a line every COUNTED_EVERY_S.
        """
        # Since the phase began, or in plain mode since the last such line.
        waited = time.monotonic() - self._reported
        if self._progress is not None:
            if waited >= COUNTED_AFTER_S:
                self._progress.update(self._task, values=f"{finished}/{total} rollouts")
        elif finished < total and waited >= COUNTED_EVERY_S:
            self._reported = time.monotonic()
            self.log(f"{self._phase}: {finished} of {total} rollouts")

    def log(self, text: str) -> None:
        """Print a line above the live one; markup in it has no effect."""
        self.console.print(Text(text), soft_wrap=True)


# C0 without tab and newline, DEL and C1 (escape sequences start here), line and paragraph
# separators, and the marks that reorder or hide what follows.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Remove the characters that could move the cursor, change colours or hide text.

    Rich's markup stays: put the result into a `rich.text.Text`, which does not interpret it.
    """
    return _UNSAFE.sub("", text)


def one_line(text: str, max_length: int) -> str:
    """Return printable text on one line, cut with an ellipsis after `max_length` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"
