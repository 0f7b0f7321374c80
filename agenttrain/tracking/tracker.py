"""Tracking of a run behind one object: metrics, rollouts, trackers, console.

metrics.jsonl is always written, one object per step, and evaluations.jsonl, one per evaluation. In
both null stands for a metric that was not measured (the latency of a tool that was not called) or
that diverged, because JSON has neither NaN nor infinity.
"""

from __future__ import annotations

import json
import math
import os
import re
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from rich.console import Console

from agenttrain.tracking import rollouts as rollouts_file
from agenttrain.tracking.backends.base import RunEnd, TrackedRun
from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.console import ConsoleProgress
from agenttrain.tracking.followers import Followers
from agenttrain.tracking.following import cursor_path, evaluations_path
from agenttrain.tracking.run_folder import FolderGone, read_summary, update_summary
from agenttrain.types import Rollout
from agenttrain.utils.files import write_atomically
from agenttrain.utils.json_lines import dumps, open_to_append, read_rows
from agenttrain.utils.redaction import hide_in_settings
from agenttrain.utils.signals import Preempted

ENDS = ("_low", "_high")
"""Suffixes of metrics that are the ends of a confidence interval."""
ONCE = {
    "data/overlong": "left out {:.0f} tasks, whose prompts fill the context (engine.max_context)",
    "tools/unavailable": "{:.0f} tool calls failed because what the tool needs is broken",
    "rollout/dropped": "dropped {:.0f} rollouts, which failed or whose ledger is broken",
}
"""Metrics that are logged to the console the first time they are above 0."""
GUARD_WARNING = re.compile(r"guard: step[ -](?P<step>\d+)[:/]")
"""Beginning of a guard's warning of a step, or of the evaluation after it (health/guards.py)."""
UNREWARDED = "not one rollout has a reward, so that nothing was trained"


class Tracker:
    """Writes metrics.jsonl and rollout files, starts the trackers, shows progress.

    The trackers of the user's choice (wandb, …) run in another process, which reads these files
    (`Followers`). In a run of several processes only the main one has a tracker. ::

        with Tracker(
            folder, config.tracker, project="shop", name=folder.name, total_steps=60
        ) as tracker:
            tracker.phase("rollout")
            tracker.step(1, {"reward": 0.25, "time/rollout_s": 0.8}, rollouts)
    """

    def __init__(
        self,
        run_folder: Path,
        config: TrackerConfig,
        *,
        project: str,
        name: str,
        total_steps: int,
        resume_step: int | None = None,
        shared: Path | None = None,
        group: str | None = None,
        run_config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        """Open the files in `run_folder` and start the trackers.

        `project` is the name of the experiment, `name` that of the run, `group` that of its sweep.
        `resume_step` cuts metrics, evaluations, alarms and guards' warnings after that step and
        continues them. Trackers may keep data that all runs of an experiment share in the folder
        `shared` (default: the parent of the run folder). The trackers get the settings
        `run_config`.
        """
        self._rollout_limit = rollouts_file.rollout_limit(config.rollouts)
        """Most rollouts of a step that are written; None: all."""
        self._arrays_above = config.arrays_above
        """Tokens above which a rollout's lists per token are written as arrays."""
        self._folder = run_folder
        run_folder.mkdir(parents=True, exist_ok=True)
        status = run_folder.stat()
        # `check_folder` compares it: another folder of this name has another number.
        self._inode = status.st_dev, status.st_ino
        self._logged_once: set[str] = set()
        """Metrics of `ONCE` whose note was logged."""
        metrics_path = run_folder / "metrics.jsonl"
        if resume_step is not None:
            cut(metrics_path, resume_step)
            cut_evaluations(evaluations_path(run_folder), resume_step)
            cut_alarms_and_warnings(run_folder, resume_step)
        self._metrics = open_to_append(metrics_path)
        self._evaluations: IO[str] | None = None
        self._last_step = resume_step or 0
        self.progress = ConsoleProgress(
            total_steps, live=config.console, first_step=resume_step or 0, console=console
        )
        run = TrackedRun(
            id=uuid4().hex[:12],
            project=project,
            name=name,
            group=group,
            folder=run_folder,
            shared=shared or run_folder.parent,
            pid=os.getpid(),
        )
        settings, sections = hide_in_settings(run_config or {}), config.sections()
        # A cursor says how much of a run its tracker has. An earlier run may have left some here.
        if resume_step is None:
            for section in sections:
                cursor_path(run_folder, section.name).unlink(missing_ok=True)
        self._followers = Followers(sections, run, settings, self.progress.log)

    def __enter__(self) -> Tracker:
        self.progress.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(_end_of(error))

    @property
    def views(self) -> list[str]:
        """Commands and addresses that show the run, of trackers that have all of it."""
        return self._followers.views()

    def step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """Record a finished step (from 1); `metrics` become its line of metrics.jsonl.

        The rollouts have their rewards and advantages.
        """
        self.check_folder()  # first: nothing is written into another folder
        # The line of metrics is written last: a step that has one is complete on disk.
        rollouts_file.write_step(
            self._folder, step, rollouts, self._rollout_limit, self._arrays_above
        )
        self._metrics.write(dumps({"step": step, **metrics}) + "\n")
        self._last_step = step
        self._followers.check()  # restarts the trackers' process if it has ended
        self.progress.update(step, metrics)
        # ONCE: metric -> note that is logged the first time that it is above 0.
        notes = {
            name: text.format(metrics[name])
            for name, text in ONCE.items()
            if metrics.get(name, 0.0) > 0
        }
        if math.isnan(metrics.get("reward", 0.0)):
            notes["reward"] = UNREWARDED
        for name, note in notes.items():
            if name not in self._logged_once:
                self._logged_once.add(name)
                self.progress.log(f"step {step}: {note} (`{name}` in metrics.jsonl; logged once)")

    def check_folder(self) -> None:
        """Raise FolderGone if the run folder was replaced, moved or deleted since the run began."""
        try:
            status = self._folder.stat()
            is_in_place = (status.st_dev, status.st_ino) == self._inode
        except OSError:
            is_in_place = False
        if not is_in_place:
            raise FolderGone(
                f"{self._folder}: the run's folder was moved or deleted while the run was in it. "
                f"Put it back, and the run goes on from its newest checkpoint with resume="
            )

    def checkpoint(self, path: Path) -> None:
        """Record the newest checkpoint in summary.json, so that its loss can be reported."""
        update_summary(self._folder, latest_checkpoint=str(path.relative_to(self._folder)))

    def evaluation(self, label: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log an evaluation after `step` steps to the console and to evaluations.jsonl.

        Example of a label: ``step-20/sampled``. The trackers' process reads the file. A metric with
        a confidence interval has its ends in `<name>_low` and `<name>_high`.
        """
        if self._evaluations is None:
            self._evaluations = open_to_append(evaluations_path(self._folder))
        row = {"step": step, "label": label, **metrics}
        self._evaluations.write(dumps(row) + "\n")
        self._followers.check()  # restarts the trackers' process if it has ended
        values = []
        for name, value in metrics.items():
            # To keep the line short, zeros are left out unless they are scores.
            is_zero = value == 0 and name != "reward" and not name.startswith("pass@")
            if is_zero or name.endswith(ENDS):
                continue  # the ends of an interval are shown with its metric
            ends = [metrics.get(f"{name}{end}") for end in ENDS]
            interval = f" [{ends[0]:.3g}, {ends[1]:.3g}]" if None not in ends else ""
            values.append(f"{name} {value:.3g}{interval}")
        self.progress.log(f"{label}: {'  '.join(values)}")

    def best(self, evaluation: Mapping[str, Any] | None) -> None:
        """Record the best evaluation so far in summary.json, as `eval.best`."""
        summary = read_summary(self._folder)
        update_summary(self._folder, eval={**summary.get("eval", {}), "best": evaluation})

    def warn(self, text: str) -> None:
        """Print a warning and add it to `warnings` in summary.json."""
        self.progress.log(text)
        warnings = read_summary(self._folder).get("warnings", [])
        update_summary(self._folder, warnings=[*warnings, text])

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        """Add an alarm with its `step`, `text` and `rollouts` to `alarms` in summary.json."""
        alarms = read_summary(self._folder).get("alarms", [])
        update_summary(self._folder, alarms=[*alarms, alarm])

    def phase(self, name: str) -> None:
        """Show the run's phase: `rollout`, `train`, `eval`."""
        self.progress.phase(name)

    def close(self, how: RunEnd = RunEnd.finished) -> None:
        """Restore the terminal, and close files and trackers (`how` the run ended); idempotent."""
        self.progress.__exit__()
        self._metrics.close()
        if self._evaluations is not None:
            self._evaluations.close()
        self._followers.close(self._last_step, how)


def _end_of(error: BaseException | None) -> RunEnd:
    """Return how a run ended that raised `error`; None: it raised nothing."""
    if error is None:
        return RunEnd.finished
    if isinstance(error, Preempted):
        return RunEnd.preempted
    # asyncio turns Ctrl-C into a cancellation.
    stopped = isinstance(error, KeyboardInterrupt | CancelledError | SystemExit)
    return RunEnd.interrupted if stopped else RunEnd.failed


class SilentTracker(Tracker):
    """Tracker of a process that is not the run's main one: writes nothing and shows nothing."""

    def __init__(self) -> None:
        # Without Tracker.__init__, which makes files.
        self.progress = ConsoleProgress(0, live=False, console=Console(quiet=True))

    @property
    def views(self) -> list[str]:
        """None: it has no trackers."""
        return []

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    # The main process checks the folder for all.
    step = check_folder = checkpoint = evaluation = best = warn = alarm = close = _ignore


def cut(path: Path, step: int) -> None:
    """Cut a metrics.jsonl after the line of `step`, atomically, to resume from there.

    Does nothing without a file. Raises ValueError, with file and line, for a line before the cut
    that is not the row of a step.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    kept_bytes = last = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        is_cut_off = not line.endswith(b"\n")  # the run was killed while it wrote the line
        if last == step or is_cut_off:
            break
        try:
            last = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: not the row of a step ({error}), and the run goes on from step "
                f"{step}. Mend or remove that line."
            ) from error
        if last > step:  # no row of `step` is there; this one belongs to a later step
            break
        kept_bytes += len(line)
    write_atomically(path, content[:kept_bytes].decode())


def cut_evaluations(path: Path, step: int) -> None:
    """Cut an evaluations.jsonl after the rows of `step`, atomically, if there is one."""
    if path.exists():
        rows = read_rows(path)
        lines = [dumps(row) + "\n" for row in rows if int(row.get("step", 0)) <= step]
        write_atomically(path, "".join(lines))


def cut_alarms_and_warnings(folder: Path, step: int) -> None:
    """Remove alarms, and warnings of guards, of steps after `step` from summary.json.

    A resumed run does these steps again, and its guards raise and warn again. A guard records an
    alarm with its step, and prints a warning with the alarm's text, e.g. ``guard: step 20: …``.
    """
    summary = read_summary(folder)
    alarms, warnings = summary.get("alarms", []), summary.get("warnings", [])
    alarm_texts = [alarm["text"] for alarm in alarms if alarm["step"] > step]

    def is_later(warning: str) -> bool:
        match = GUARD_WARNING.match(warning)
        if match is not None and int(match["step"]) > step:
            return True
        # The warning of the evaluation after the run's last step begins with its label ``after``,
        # without a step. It is recognised by the text of its alarm, which has one.
        return any(text in warning for text in alarm_texts)

    kept = [warning for warning in warnings if not is_later(warning)]
    if alarm_texts or kept != warnings:
        update_summary(
            folder,
            alarms=[alarm for alarm in alarms if alarm["step"] <= step] or None,
            warnings=kept or None,
        )
