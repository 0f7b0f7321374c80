"""Sends a run to a tracker by following its files: metrics.jsonl, evaluations.jsonl, rollouts/.

A cursor in `<run>/trackers/<name>.json` has what the tracker has acknowledged. A process that is
started again and a resumed run continue there. A resumed run repeats steps that were sent; they
have the same numbers and are not sent again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

from agenttrain.tracking.backends.base import ExperimentTracker, RunEnd, TrackedRun
from agenttrain.tracking.machine import MachineLoad
from agenttrain.tracking.rollouts import read_step, step_path
from agenttrain.tracking.run_folder import read_summary
from agenttrain.utils.files import write_atomically

POLL_S = 0.5
"""Seconds between two looks at the files."""
SAMPLE_S = 5.0
"""Seconds between two samples of the machine's load."""
TABLE_EVERY = 10
"""Trackers get rollouts of the first step and of every 10th after it."""
TABLE_ROWS = 4
"""Number of rollouts that they get of such a step."""
MOST_ROWS = 200
"""Steps that are sent before they are acknowledged together."""
HTTP_CLIENTS = {"httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "requests"}
"""Packages whose errors without an answer are network errors."""


@dataclass(slots=True, kw_only=True)
class Cursor:
    """The place in a run's files up to which one tracker has them."""

    id: str
    """Id of the run at the tracker (`TrackedRun.id`)."""
    started: bool = False
    """True once a process has begun to send the run: the next one continues it."""
    step: int = 0
    """Last step whose metrics it has."""
    table: int = 0
    """Last step whose table of rollouts it has. Tables are sent of some steps only
    (TABLE_EVERY). One that the tracker refuses counts too: it is not sent again."""
    evaluated: int = -1
    """Step of the last evaluation that it has."""
    sections: list[str] = field(default_factory=list)
    """Sections of that evaluation that it has, e.g. ``["sampled", "greedy"]``."""

    @classmethod
    def read(cls, path: Path) -> Cursor | None:
        """Return the cursor in a file; None without one that can be read."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        return None

    def write(self, path: Path) -> None:
        """Replace the file; a reader sees the old cursor or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self)))


def cursor_path(folder: Path, name: str) -> Path:
    """Return the path of a tracker's cursor in a run folder."""
    return folder / "trackers" / f"{name}.json"


class Lines:
    """The rows of a JSON-lines file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def added(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that were added since the last call."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError):  # a user's edit: the run's own reader reports it
                    row = json.loads(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        yield row


def follow(
    run: TrackedRun,
    name: str,
    tracker: ExperimentTracker,
    config: Mapping[str, Any],
    ended: Event,
    load: MachineLoad | None = None,
    how_ended: Callable[[], RunEnd] = lambda: RunEnd.finished,
) -> None:
    """Send the run to the tracker until `ended` is set and the files have nothing new.

    The order of each round: machine load, metrics, rollout tables, evaluations. `name` is that of
    the tracker's cursor file, and `config` holds the run's settings. Without `load` the machine's
    load is not sent. `how_ended` is called once `ended` is set.
    """
    path = cursor_path(run.folder, name)
    cursor = Cursor.read(path) or Cursor(id=run.id)
    run = replace(run, started=cursor.started)
    cursor.started = True
    cursor.write(path)
    tracker_step = tracker.start(run, config)  # the last step that the tracker has; None: unknown
    if tracker_step is not None:
        _move_cursor(cursor, tracker_step)
    metrics, evaluations = Lines(run.folder / "metrics.jsonl"), Lines(evaluations_path(run.folder))
    waiting: list[dict[str, Any]] = []  # evaluations that are not sent yet
    sampled_at = -math.inf  # time of the last sample of the machine's load
    while True:
        if load is not None and time.monotonic() - sampled_at >= SAMPLE_S:
            load.sample()
            sampled_at = time.monotonic()
        is_last = ended.is_set()  # asked before the files are read, so that nothing is missed
        # A resumed run repeats steps that were sent: they are left out.
        rows = [row for row in metrics.added() if row["step"] > cursor.step]
        waiting += evaluations.added()
        _send_metrics(rows, tracker, cursor, path, load)
        # Includes tables that a killed process had not sent yet.
        for step in range(cursor.table + 1, cursor.step + 1):
            _send_table(run.folder, step, tracker, cursor, path)
        # A step's metrics go before its evaluation. An evaluation whose step is missing was read
        # between the run's writes of the two files: it waits for the next round.
        ready = [row for row in waiting if row["step"] <= cursor.step or is_last]
        waiting = [row for row in waiting if row not in ready]
        for row in ready:
            _send_evaluation(row, tracker, cursor, path)
        if is_last:
            break
        ended.wait(POLL_S)
    if hasattr(tracker, "ended"):  # a class that is not derived from ours may lack it
        tracker.ended(how_ended())
    tracker.finish()


def _move_cursor(cursor: Cursor, tracker_step: int) -> None:
    """Move the cursor to the last step that the tracker says it has, if that is another one.

    The tracker is ahead of the cursor if the process was killed before it acknowledged a step. It
    is behind if it has lost data: then tables and evaluations of the lost steps are sent again too.
    """
    if tracker_step < cursor.step:
        cursor.table = min(cursor.table, tracker_step)
        # The evaluation after `tracker_step` comes later than the step: it may be lost, or some of
        # its sections.
        cursor.evaluated, cursor.sections = min(cursor.evaluated, tracker_step - 1), []
    cursor.step = tracker_step


def run_end(folder: Path, message: str) -> RunEnd:
    """Return how a run ended, from its last line to the tracker process: ``end preempted``.

    Without that line the run was killed, or ended by the watchdog, which only leaves a note in
    summary.json.
    """
    word = message.strip().partition(" ")[2]
    if word in list(RunEnd):
        return RunEnd(word)
    return RunEnd.stalled if read_summary(folder).get("stalled_phase") else RunEnd.killed


def _send_metrics(
    rows: Sequence[Mapping[str, Any]],
    tracker: ExperimentTracker,
    cursor: Cursor,
    path: Path,
    load: MachineLoad | None,
) -> None:
    """Send rows of metrics.jsonl; MOST_ROWS of them are acknowledged together."""
    for start in range(0, len(rows), MOST_ROWS):
        part = rows[start : start + MOST_ROWS]
        for row in part:
            # The mean load since the last rows is sent once, with the last row.
            system = {} if load is None or row is not part[-1] else load.take()
            tracker.log(row["step"], {**points(row), **system})
        tracker.flush()
        cursor.step = part[-1]["step"]
        cursor.write(path)


def _send_evaluation(
    row: Mapping[str, Any], tracker: ExperimentTracker, cursor: Cursor, path: Path
) -> None:
    """Send an evaluation, ``{"label": "step-20/sampled", …}``, unless the tracker has it.

    One step may have several evaluations, its sections, such as ``sampled`` and ``greedy``. The
    cursor has the last step of which one was sent (`evaluated`), and its sections that were sent.
    """
    section = str(row["label"]).rpartition("/")[2]
    is_sent = row["step"] == cursor.evaluated and section in cursor.sections
    if row["step"] < cursor.evaluated or is_sent:
        return
    values = {f"eval/{section}/{metric}": value for metric, value in points(row).items()}
    tracker.log(row["step"], values)
    tracker.flush()
    if row["step"] > cursor.evaluated:
        cursor.evaluated, cursor.sections = row["step"], []
    cursor.sections.append(section)
    cursor.write(path)


def _send_table(
    folder: Path, step: int, tracker: ExperimentTracker, cursor: Cursor, path: Path
) -> None:
    """Send the first rollouts of a step if it is the first or a later TABLE_EVERY-th one."""
    if (step - 1) % TABLE_EVERY:
        return
    try:
        if step_path(folder, step).exists():
            tracker.rollouts(step, list(islice(read_step(folder, step), TABLE_ROWS)))
            tracker.flush()
    except Exception as error:
        if not is_transient(error):
            # The tracker refuses this table: skip it, so that it does not block what follows.
            cursor.table = step
            cursor.write(path)
        raise
    cursor.table = step
    cursor.write(path)


def is_transient(error: BaseException) -> bool:
    """Return True for an error of the network or the disk, after which it is worth trying again.

    The error itself, or one that led to it, must be such an error. Example: a tracker's own
    UploadFailed was raised while httpx.ConnectTimeout was handled. An answer with a status below
    500 is a refusal, except 429 (too many requests).
    """
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status >= HTTPStatus.INTERNAL_SERVER_ERROR or (
                status == HTTPStatus.TOO_MANY_REQUESTS
            )
        # Packages of the error's class and of its base classes, which a client may have extended.
        packages = {kind.__module__.partition(".")[0] for kind in type(cause).__mro__}
        if isinstance(cause, OSError) or packages & HTTP_CLIENTS:
            return True
        # Go on to the error that led to this one: named by `raise … from`, else the one that was
        # being handled. But a KeyError in a handler, say, is a mistake of its own, whatever was
        # being handled: so the context of a builtin error does not count.
        ignores_context = cause.__suppress_context__ or type(cause).__module__ == "builtins"
        cause = cause.__cause__ or (None if ignores_context else cause.__context__)
    return False


def points(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, without its step."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def evaluations_path(folder: Path) -> Path:
    """Return the path of a run's evaluations: one object per evaluation, in their order."""
    return folder / "evaluations.jsonl"
