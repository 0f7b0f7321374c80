"""A page that shows who sampled, called tools, waited, trained, synced, evaluated and saved when.

One HTML file that needs no other, made of the run's `timeline/*.jsonl` (`timeline.py`). Its
template is `timeline.html`. Time in which no process of the run existed, between a stop and a
resume, is left out.
"""

from __future__ import annotations

import html
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from agenttrain.tracking.timeline import timeline_paths
from agenttrain.tracking.viewer import fill_page
from agenttrain.utils.json_lines import read_rows

ROLLOUTS = "rollouts"
"""Process that makes the rollouts, if it is not the trainer."""
WAIT = "wait"
"""Phase of a trainer that waits for the rollouts of another process."""
TRAINING = ("rollout", "data", "train")
"""Phases of a step that is done again if its result was lost."""
LOAD = "load"
"""From the start of a process to its first phase."""
COLUMNS = ("rollout", WAIT, "data", "train", "sync", "evaluation", "checkpoint")
MOST_PARTS = 60_000
"""Rollouts, turns and calls on a page; more would make it slow."""
MOST_STEPS = 500
"""Rows of the table."""

Interval = tuple[float, float]
"""Start and end, in seconds since 1970."""


class NoTimes(ValueError):
    """A run has recorded no times, or none of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPhase:
    """A phase of a process, from the process's timeline file."""

    start: float
    end: float
    name: str
    step: int | None
    label: str
    """Name of one of several such phases, e.g. of an evaluation; empty: it has none."""


@dataclass(slots=True, kw_only=True)
class Process:
    """Recorded times of one process of a run, in seconds since 1970, from its timeline file.

    A resumed run goes on with the same file: the process then has several starts.
    """

    name: str
    """`trainer-0`, `trainer-1`, …, or `rollouts` for the process that makes the rollouts."""
    starts: list[float] = field(default_factory=list)
    """Start of the process in each session of the run, first start and resumes."""
    phases: list[RecordedPhase] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the file about rollouts, unchanged."""

    def intervals(self) -> Iterator[Interval]:
        """Yield the times of its phases and rollouts."""
        yield from ((phase.start, phase.end) for phase in self.phases)
        for rollout in self.rollouts:
            yield rollout["time"], rollout["time"] + rollout["seconds"]


def read_processes(run_folder: Path) -> list[Process]:
    """Read the times of a run; raises NoTimes, and ValueError for a line that is not an object."""
    processes = []
    for name, path in timeline_paths(run_folder).items():
        process = Process(name=name)
        for row in read_rows(path):
            if "process" in row:
                process.starts.append(row["time"])
            elif "rollout" in row:
                process.rollouts.append(row)
            else:
                process.phases.append(
                    RecordedPhase(
                        start=row["time"],
                        end=row["time"] + row["seconds"],
                        name=row["phase"],
                        step=row["step"],
                        label=row.get("label", ""),
                    )
                )
        processes.append(process)
    # If another process makes the rollouts, a trainer only waits for them in its rollout phase.
    has_rollout_process = any(process.name == ROLLOUTS for process in processes)
    for process in processes:
        if process.name != ROLLOUTS:
            process.phases = [
                *_loading_phases(process),
                *(
                    replace(p, name=WAIT) if has_rollout_process and p.name == "rollout" else p
                    for p in process.phases
                ),
            ]
    if not any(process.phases for process in processes):
        raise NoTimes(
            f"{run_folder}: it has recorded no times (timeline/*.jsonl). Runs do so as each "
            "phase ends, unless tracker.timeline=false; metrics.jsonl has the seconds of their "
            "steps (time/*)"
        )
    return processes


def _loading_phases(process: Process) -> Iterator[RecordedPhase]:
    """Yield a phase from each start of a process to the first thing that it recorded."""
    for start in process.starts:
        later = (begin for begin, _ in process.intervals() if begin >= start)
        if (end := min(later, default=None)) is not None:
            yield RecordedPhase(start=start, end=end, name=LOAD, step=None, label="")


def sessions(processes: Sequence[Process]) -> list[Interval]:
    """Return the times in which the run existed.

    A session begins with a start of the main process, and ends with the last record before the next
    start.

    Example: starts at 100 and 900, with phases until 250 and 1000: [(100, 250), (900, 1000)]
    """
    starts = sorted(processes[0].starts)
    intervals = [interval for process in processes for interval in process.intervals()]
    sessions = []
    for start, next_start in zip(starts, [*starts[1:], float("inf")], strict=True):
        ends = (end for begin, end in intervals if start <= begin < next_start)
        sessions.append((start, max(ends, default=start)))
    return sessions


def windows_of(processes: Sequence[Process], first: int, last: int) -> list[Interval]:
    """Return the time that steps `first` to `last` took in each session; raises NoTimes."""
    windows = []
    # The first process trains: its phases say when a step began and ended.
    phases = [(phase.step, phase) for phase in processes[0].phases if phase.step is not None]
    for start, end in sessions(processes):
        chosen = [p for step, p in phases if start <= p.start <= end and first <= step <= last]
        if chosen:
            windows.append((min(p.start for p in chosen), max(p.end for p in chosen)))
    if not windows:
        steps = [step for step, _ in phases]
        raise NoTimes(
            f"steps={first}-{last}: the times of the run are those of the steps {min(steps)} to "
            f"{max(steps)}"
        )
    return windows


def busy(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap: [(0, 2), (1, 3), (5, 6)] -> [(0, 3), (5, 6)]."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def overlap_s(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Return the seconds that two lists of merged intervals share."""
    shared, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        shared += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def rows_of(intervals: Sequence[Interval]) -> list[int]:
    """Return a row for each interval, so that the intervals of a row do not overlap.

    The intervals are sorted by start. Example: [(0, 4), (1, 2), (3, 5)] -> [0, 1, 1]
    """
    rows, free_rows = [], list[int]()
    occupied = list[tuple[float, int]]()  # heap of (end of the row's last interval, row)
    for start, end in intervals:
        while occupied and occupied[0][0] <= start:
            heappush(free_rows, heappop(occupied)[1])
        row = heappop(free_rows) if free_rows else len(occupied)
        heappush(occupied, (end, row))
        rows.append(row)
    return rows


class Page:
    """The page of a run's processes, in the given windows.

    A window is an interval of time that the page shows, at most one of each session of the run (a
    start or a resume). Windows follow each other on the page without the time between them.

    Example: windows (100, 250) and (900, 1000) are the seconds 0 to 150 and 150 to 250 of the page,
    with a break at 150 that leaves out 650 seconds.
    """

    def __init__(self, processes: Sequence[Process], windows: Sequence[Interval]) -> None:
        """`processes[0]` is the main training process, whose phases say when a step began."""
        self._windows = windows
        self._begins: list[float] = []
        """Second on the page at which each window begins."""
        shown_s = 0.0
        for start, end in windows:
            self._begins.append(shown_s)
            shown_s += end - start
        self.total = max(shown_s, 1e-9)
        """Seconds of all windows; not 0, because shares are divided by it."""
        self._phases = {
            process.name: [p for p in process.phases if self._window(p.start) is not None]
            for process in processes
        }
        self._main_phases = self._phases[processes[0].name]
        self._last_start: dict[int | None, float] = {}
        """Step -> last start of a phase that worked on it, which shows whether `lost` work on it
        was done again."""
        for phase in self._main_phases:
            if phase.name in TRAINING:
                last_start = self._last_start.get(phase.step, 0.0)
                self._last_start[phase.step] = max(phase.start, last_start)
        self.left_out = 0
        """Number of the oldest rollouts, which the page has no space for."""
        self._rollouts = self._choose_rollouts(processes)

    def _choose_rollouts(self, processes: Sequence[Process]) -> dict[str, list[dict[str, Any]]]:
        """Return the rollouts of each process that the page shows; count others in `left_out`."""
        chosen = {}
        remaining_parts = MOST_PARTS  # a rollout has one bar, and one for each turn and call
        for process in processes:
            # The newest first, because the oldest are left out.
            rollouts = sorted(process.rollouts, key=lambda rollout: -float(rollout["time"]))
            shown = []
            for rollout in rollouts:
                if self._window(rollout["time"]) is None:
                    continue
                remaining_parts -= 1 + len(rollout["turns"]) + len(rollout["calls"])
                if remaining_parts < 0:
                    self.left_out += 1
                else:
                    shown.append(rollout)
            chosen[process.name] = shown[::-1]
        return chosen

    def _window(self, at: float) -> int | None:
        """Return the index of the window that has a time; None if no window has it."""
        for index, (start, end) in enumerate(self._windows):
            if start <= at <= end:
                return index
        return None

    def _place(self, at: float) -> float:
        """Return the second on the page of a time: windows follow each other without gaps."""
        index = self._window(at)
        assert index is not None
        return round(self._begins[index] + at - self._windows[index][0], 4)

    def lost(self, phase: RecordedPhase) -> bool:
        """Return True if a later session worked on the phase's step again.

        Its result was then lost: the run stopped before a checkpoint had it.
        """
        last_start = self._last_start.get(phase.step, 0.0)
        if phase.step is None or last_start <= phase.start:
            return False
        return self._window(last_start) != self._window(phase.start)

    def data(self) -> dict[str, Any]:
        """Return the data that the page's script draws."""
        return {
            "total": round(self.total, 4),
            "breaks": self._breaks(),
            "steps": [[step, self._place(start)] for step, start, _ in self.steps()],
            "phases": {
                process: [self._phase_bar(phase) for phase in phases]
                for process, phases in self._phases.items()
                if phases
            },
            "rollouts": {
                process: self._bars(rollouts)
                for process, rollouts in self._rollouts.items()
                if rollouts
            },
        }

    def _breaks(self) -> list[list[float]]:
        """Return where one window follows another: the second on the page, the seconds left out."""
        breaks = []
        for number in range(1, len(self._windows)):
            _, earlier_end = self._windows[number - 1]
            start, _ = self._windows[number]
            breaks.append([round(self._begins[number], 4), round(start - earlier_end, 1)])
        return breaks

    def _phase_bar(self, phase: RecordedPhase) -> list[Any]:
        """Return the bar of a phase: start on the page, seconds, name, step, label, lost."""
        seconds = round(phase.end - phase.start, 4)
        place, lost = self._place(phase.start), self.lost(phase)
        return [place, seconds, phase.name, phase.step, phase.label, lost]

    def _bars(self, rollouts: Sequence[dict[str, Any]]) -> list[list[Any]]:
        """Return the bar of each rollout: start, seconds, row, id, turns and calls."""
        rows = rows_of([(r["time"], r["time"] + r["seconds"]) for r in rollouts])
        return [
            [self._place(r["time"]), r["seconds"], row, r["rollout"], r["turns"], r["calls"]]
            for row, r in zip(rows, rollouts, strict=True)
        ]

    def steps(self) -> list[tuple[int, float, float]]:
        """Return number, start and end of each step of the main process, in order of time.

        A step begins with its first phase of rollouts or training. Other phases may name an earlier
        step: a resumed run begins with a sync of the last one. It ends where the next step begins,
        or with its window.
        """
        begins = list[tuple[int, int, float]]()  # (step, its window, start)
        for phase in sorted(self._main_phases, key=lambda phase: phase.start):
            if phase.name in (*TRAINING, WAIT) and phase.step is not None:
                window = self._window(phase.start)
                assert window is not None
                # The window counts too: a resumed run may begin with the step that the session
                # before it did not finish.
                if not begins or begins[-1][:2] != (phase.step, window):
                    begins.append((phase.step, window, phase.start))
        steps = []
        for number, (step, window, start) in enumerate(begins):
            end = self._windows[window][1]
            if number + 1 < len(begins):
                _, next_window, next_start = begins[number + 1]
                if next_window == window:
                    end = next_start
            steps.append((step, start, end))
        return steps

    def table(self) -> str:
        """Return the seconds of each step as an HTML table, the last steps of a long run.

        They are those of the main training process. A step is marked whose result was lost when the
        run stopped, so that the resumed run did it again.
        """
        phases = sorted(self._main_phases, key=lambda phase: phase.start)
        starts = [phase.start for phase in phases]
        shown = [name for name in COLUMNS if any(phase.name == name for phase in phases)]
        head = "".join(f"<th>{name}" for name in ("step", "seconds", *shown, "other"))
        rows = []
        for step, start, end in self.steps()[-MOST_STEPS:]:
            # The phases that begin in the step.
            of_step = phases[bisect_left(starts, start) : bisect_left(starts, end)]
            seconds = [sum(p.end - p.start for p in of_step if p.name == name) for name in shown]
            again = " (lost, done again)" if any(map(self.lost, of_step)) else ""
            other = max(end - start - sum(seconds), 0.0)
            cells = "".join(f"<td>{value:.2f}" for value in (end - start, *seconds, other))
            rows.append(f"<tr><td>{step}{again}{cells}")
        return f"<table><thead><tr>{head}<tbody>{''.join(rows)}</table>"

    def summary(self) -> str:
        """Return how every process, server and the tools spent the time, as HTML list items."""
        items = [*self._process_items(), *self._rollout_items()]
        return "".join(f"<li>{html.escape(item)}" for item in items)

    def _process_items(self) -> Iterator[str]:
        """Yield a line for each process: the share of time in each kind of phase, and in none."""
        for name, phases in self._phases.items():
            if name == ROLLOUTS or not phases:  # the turns and calls of rollouts have items below
                continue
            # Each kind once: loading first, then in the order of the table's columns, then others.
            kinds = dict.fromkeys([LOAD, *COLUMNS, *(phase.name for phase in phases)])
            # Phases of type "reward" are parts of others, and would count twice.
            seconds = {
                kind: sum(phase.end - phase.start for phase in phases if phase.name == kind)
                for kind in kinds
                if kind != "reward"
            }
            seconds["other"] = max(self.total - sum(seconds.values()), 0.0)
            parts = [(kind, value) for kind, value in seconds.items() if value]
            shares = (f"{kind} {self._share(value)}" for kind, value in parts)
            yield f"{name}: {', '.join(shares)}"

    def _rollout_items(self) -> Iterator[str]:
        """Yield lines on servers and tools, and the share of time with sampling and training."""
        turns: dict[str, list[Interval]] = {}
        calls: list[Interval] = []
        for rollouts in self._rollouts.values():
            for rollout in rollouts:
                # Of a turn: seconds since the rollout's start, duration, and in a fleet the server.
                for offset, duration, *server in rollout["turns"]:
                    start = rollout["time"] + offset
                    name = f"server {server[0]}" if server else "engine"
                    turns.setdefault(name, []).append((start, start + duration))
                # Of a call: the tool's name, seconds since the rollout's start, duration.
                for _, offset, duration in rollout["calls"]:
                    start = rollout["time"] + offset
                    calls.append((start, start + duration))
        for name in sorted(turns):
            yield self._use(name, turns[name], "requests")
        if calls:
            yield self._use("tools", calls, "calls")
        training = [p for p in self._main_phases if p.name == "train"]
        sampled = busy(interval for intervals in turns.values() for interval in intervals)
        overlap = overlap_s(sampled, busy((phase.start, phase.end) for phase in training))
        if overlap:
            yield f"sampling while training: {self._share(overlap)}"

    def _use(self, name: str, intervals: Sequence[Interval], what: str) -> str:
        """Return the share of time in which `name` was used, and its mean concurrency then."""
        used = sum(end - start for start, end in busy(intervals))
        mean = sum(end - start for start, end in intervals) / max(used, 1e-9)
        return f"{name}: busy {self._share(used)}, then {mean:.1f} {what} at a time"

    def _share(self, seconds: float) -> str:
        share = seconds / self.total
        return "<1%" if share < 0.01 else f"{share:.0%}"


def render_timeline(
    run_folder: Path, *, title: str, steps: tuple[int, int] | None = None, state: str = ""
) -> str:
    """Return the page of a run, or of its steps from the first to the second of `steps`.

    `state` is shown beside the title. Raises NoTimes, and ValueError for a file that is not what a
    run writes.
    """
    processes = read_processes(run_folder)
    chosen = sessions(processes) if steps is None else windows_of(processes, *steps)
    page = Page(processes, chosen)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(chosen[0][0]))
    notes = [f"from {began}, {page.total:.1f} s", *([state] if state else [])]
    if page.left_out:
        notes.append(
            f"the times of {page.left_out} earlier rollouts are left out: name fewer steps "
            "(steps=A-B)"
        )
    texts = {
        "__TITLE__": html.escape(title),
        "__NOTES__": html.escape("; ".join(notes)),
        "__SUMMARY__": page.summary(),
        "__TABLE__": page.table(),
    }
    return fill_page("timeline.html", page.data(), texts)
