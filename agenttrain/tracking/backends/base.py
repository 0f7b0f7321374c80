"""The interface of a tracker, and what it gets of a run: its identity and tables of rollouts.

All trackers of a run live in one process (`agenttrain/tracking/follower.py`), each in a thread that
reads the run's files. A tracker is also constructed in the run's process, where only `describe` is
called: import its library in `start`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from agenttrain.tracking.pictures import shown_text
from agenttrain.utils.json_lines import dumps


class RunEnd(StrEnum):
    """How a run ended."""

    finished = "finished"
    failed = "failed"
    stalled = "stalled"
    """The watchdog ended it."""
    preempted = "preempted"
    """It saved and stopped at a signal, and can be resumed."""
    interrupted = "interrupted"
    killed = "killed"
    """Its process is gone without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Identity of a run at its trackers."""

    id: str
    """The same for every start of the run; no other run has it."""
    project: str
    """Name of the experiment."""
    name: str
    group: str | None = None
    """Name of the sweep."""
    folder: Path
    """The run folder."""
    shared: Path
    """Folder of the experiment, for data that its runs share."""
    pid: int = 0
    """Process of the run."""
    started: bool = False
    """True if this tracker has started the run before: it is continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A tracker's answer to where a run can be seen, and its remarks."""

    view: str = ""
    """A shell command, or an address, which is printed at the end of the run."""
    notes: tuple[str, ...] = ()
    """Remarks that are printed at the start of the run."""


class ExperimentTracker(Protocol):
    """A tracker. Its settings are the arguments of its constructor.

    A step is acknowledged once `flush` has returned after it: the process of the trackers then
    writes its number to a file. After an exception the tracker is made anew, somewhat later, and
    continues after the last acknowledged step. ::

        class Printed(ExperimentTracker):
            def __init__(self, path: str = "points.txt") -> None:
                self.path = path

            def start(self, run, config):
                self.file = open(run.folder / self.path, "a")

            def log(self, step, metrics):
                self.file.write(f"{step} {metrics}\\n")

            def finish(self):
                self.file.close()
    """

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> int | None:
        """Open the run, or continue it; `config` has its settings.

        Return the last step that the tracker holds, 0 for none, None if that is unknown. The run is
        then sent from the step after it. It is more reliable than the last acknowledged step: a
        process may be killed when a step has arrived, but is not acknowledged yet.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one point per metric; all are finite. A step may come again with other metrics."""

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Send some rollouts of a step, as its file has them; `rollout_table` makes a table."""

    def flush(self) -> None:
        """Return once everything that was sent has arrived, or will arrive if this process ends."""

    def ended(self, how: RunEnd) -> None:
        """Record how the run ended, for pages that show a state. Called before `finish`."""

    def finish(self) -> None:
        """Close the run; it may be continued."""

    def describe(self, run: TrackedRun) -> Description:
        """Say where the run can be seen. Called in the run's process, without `start`."""
        return Description()


COLUMNS = ("rollout_id", "task_id", "reward", "stop_reason", "turns", "tokens", "conversation")
"""Columns of `rollout_table`; after them comes one for each reward."""


def rollout_table(
    records: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str | float | None]]]:
    """Return the columns and rows of a table of rollouts.

    Example of a row: ``["g0-1", "sum-1", 0.5, "completed", 2, 11, "user: What is 3 + 4?…", 0.5]``.
    """
    rewards = list(dict.fromkeys(name for record in records for name in record["rewards"]))
    rows: list[list[str | float | None]] = []
    for record in records:
        sampled = [
            {**span, "trajectory": index}
            for index, trajectory in enumerate(record["trajectories"])
            for span in trajectory["spans"]
            if span["origin"] == "sampled"
        ]
        messages = [
            message for trajectory in record["trajectories"] for message in trajectory["messages"]
        ]
        rows.append(
            [
                record["rollout_id"],
                record["task_id"],
                record["reward"],
                record["stop_reason"],
                len({(span["trajectory"], span["turn"]) for span in sampled}),
                sum(span["end"] - span["start"] for span in sampled),
                "\n".join(f"{message['role']}: {spoken(message)}" for message in messages),
                *(record["rewards"].get(name) for name in rewards),
            ]
        )
    return [*COLUMNS, *(f"rewards/{name}" for name in rewards)], rows


def spoken(message: Mapping[str, Any]) -> str:
    """Return a message's text, followed by its calls, one a line: ``add({"a":3})``."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f"{function['name']}({dumps(function['arguments'])})" for function in functions]
    text = shown_text(message.get("content"))
    return "\n".join([*([text] if text else []), *calls])
