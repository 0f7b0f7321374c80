"""Everything a run tells the world, behind one object.

metrics.jsonl is the run's record whatever else is tracked: one object per step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from agenttrain.tracking import rollouts as rollouts_file
from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.console import ConsoleProgress
from agenttrain.tracking.dashboard import TrackioSink
from agenttrain.tracking.run_folder import Presence, read_summary, update_summary, write_atomically
from agenttrain.types import Rollout
from agenttrain.utils.json_lines import dumps, read_rows

TRACE_EVERY = 10
"""Steps between the rollouts that the dashboard shows; the first step's are among them."""
ENDS = ("_low", "_high")
"""Suffixes of metrics that are the ends of another's confidence interval."""
TRACES = 4
"""Rollouts the dashboard shows of such a step."""


ONCE = {
    "data/overlong": "left out {:.0f} tasks, whose prompts fill the context (engine.max_context)",
    "tools/unavailable": "{:.0f} tool calls failed because what the tool needs is broken",
    "rollout/dropped": "dropped {:.0f} rollouts, which failed or whose ledger is broken",
}
"""Metrics that the console tells the first time that they are not 0."""
UNREWARDED = "not one rollout has a reward, so that nothing was trained"


class Tracker:
    """Writes metrics.jsonl and rollout files, feeds the dashboard, shows progress.

    In a run of several processes only the main one has a tracker. ::

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
        trackio_folder: Path | None = None,
        group: str | None = None,
        run_config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        """`project` is the experiment's name, `name` the run's; `resume_step` cuts metrics.jsonl to
        that step and continues; `trackio_folder` is one that a sweep's runs share (default: in the
        run's folder), `group` the sweep's name there; `run_config` is shown in the dashboard.
        Raises ValueError for a bad setting.
        """
        if config.name not in ("trackio", "none"):
            raise ValueError(f"tracker.name={config.name!r}: give `trackio` or `none`")
        self._most = rollouts_file.rollout_limit(config.rollouts)
        self._folder = run_folder
        run_folder.mkdir(parents=True, exist_ok=True)
        self._presence = Presence(run_folder)
        self._told: set[str] = set()
        metrics_path = run_folder / "metrics.jsonl"
        if resume_step is not None:
            cut(metrics_path, resume_step)
        self._metrics = MetricsFile(metrics_path)
        self.progress = ConsoleProgress(
            total_steps, live=config.console, first_step=resume_step or 0, console=console
        )
        self._trackio: TrackioSink | None = None
        if config.name == "trackio":
            self._trackio = TrackioSink(
                trackio_folder or run_folder / "trackio",
                project=project,
                name=name,
                group=group,
                resume=resume_step is not None,
                config=run_config,
                warn=self.progress.log,
            )

    def __enter__(self) -> Tracker:
        self.progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def has_dashboard(self) -> bool:
        """True if trackio was asked for and has not failed."""
        return self._trackio is not None and not self._trackio.failed

    def begin(self) -> None:
        """The first step starts now; the estimate of the time that is left counts from here."""
        self.progress.begin()

    def step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """Record a finished step (from 1): `metrics` is its row of metrics.jsonl, as it is.

        The rollouts come with their rewards and advantages set.
        """
        self.check_folder()
        # The row last: a step that has one is complete on disk.
        rollouts_file.write_step(self._folder, step, rollouts, self._most)
        self._metrics.write(step, metrics)
        if self._trackio is not None:
            self._trackio.log(step, metrics, _traced(step, rollouts))
        self.progress.update(step, metrics)
        self._tell(step, metrics)

    def check_folder(self) -> None:
        """Raise FolderGone where the run folder is not the one that the run began in."""
        self._presence.check()

    def checkpoint(self, path: Path) -> None:
        """Record in summary.json that there is a checkpoint, so that its loss can be told."""
        update_summary(self._folder, latest_checkpoint=str(path.relative_to(self._folder)))

    def evaluation(self, label: str, step: int, metrics: Mapping[str, float]) -> None:
        """Say the figures of an evaluation made after `step` steps and put them on the dashboard.

        The last part of the label names their section, so that before, during and after are one
        curve: ``before/sampled`` goes to ``eval/sampled/<name>``. metrics.jsonl has one object per
        step and none for evaluations.
        """
        if self._trackio is not None:
            section = f"eval/{label.rpartition('/')[2]}"
            self._trackio.log(step, {f"{section}/{name}": v for name, v in metrics.items()})
        values = "  ".join(
            f"{name} {value:.3g}{_interval(name, metrics)}"
            for name, value in metrics.items()
            if (value != 0 or name == "reward" or name.startswith("pass@"))
            and not name.endswith(ENDS)
        )
        self.progress.log(f"{label}: {values}")

    def best(self, found: Mapping[str, Any] | None) -> None:
        """Record in summary.json, as `eval.best`, which evaluation is the best so far."""
        summary = read_summary(self._folder)
        update_summary(self._folder, eval={**summary.get("eval", {}), "best": found})

    def warn(self, text: str) -> None:
        """Print a warning, and keep it in summary.json among its `warnings`."""
        self.progress.log(text)
        warnings = read_summary(self._folder).get("warnings", [])
        update_summary(self._folder, warnings=[*warnings, text])

    def phase(self, name: str) -> None:
        """Show the name of the run's phase: `rollout`, `train`, `eval`."""
        self.progress.phase(name)

    def _tell(self, step: int, metrics: Mapping[str, float]) -> None:
        said = {name: text.format(metrics.get(name, 0.0)) for name, text in ONCE.items()}
        found = [name for name in ONCE if metrics.get(name, 0.0) > 0]
        if math.isnan(metrics.get("reward", 0.0)):
            said["reward"] = UNREWARDED
            found.append("reward")
        for name in found:
            if name not in self._told:
                self._told.add(name)
                self.progress.log(
                    f"step {step}: {said[name]} (`{name}` in metrics.jsonl; told once)"
                )

    def close(self) -> None:
        """Give the terminal back and finish what is on disk; closing twice is fine."""
        self.progress.__exit__(None, None, None)
        self._metrics.close()
        if self._trackio is not None:
            self._trackio.close()


def _interval(name: str, metrics: Mapping[str, float]) -> str:
    """`` [0.2, 0.3]`` for a figure that has one."""
    ends = [metrics.get(f"{name}{end}") for end in ENDS]
    return f" [{ends[0]:.3g}, {ends[1]:.3g}]" if None not in ends else ""


def _traced(step: int, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    if (step - 1) % TRACE_EVERY != 0:
        return []
    return [rollouts_file.rollout_record(r) for r in rollouts_file.in_order(rollouts)[:TRACES]]


class SilentTracker(Tracker):
    """Tracker of a process that is not the run's main one: writes nothing and shows nothing."""

    def __init__(self) -> None:
        # Not Tracker's, which makes files.
        self.progress = ConsoleProgress(0, live=False, console=Console(quiet=True))

    @property
    def has_dashboard(self) -> bool:
        """There is none."""
        return False

    def step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """Nothing."""

    def check_folder(self) -> None:
        """The main process does."""

    def checkpoint(self, path: Path) -> None:
        """Nothing."""

    def evaluation(self, label: str, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def best(self, found: Mapping[str, Any] | None) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class MetricsFile:
    """Appends one line per step; each line is on its way to disk when `write` returns.

    Non-finite values are written as null, because JSON has no NaN: null means that a step had
    nothing to measure (the latency of a tool that nobody called) or that a figure diverged.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):  # a last line torn by a crash
                with path.open("rb+") as file:
                    file.truncate(content.rfind(b"\n") + 1)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, **metrics}``."""
        self._file.write(dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl; a last line torn by a crash is left out."""
    return list(read_rows(path))


def cut(path: Path, step: int) -> None:
    """Keep the rows of steps up to and including `step`, atomically; for resuming from there.

    Kept lines keep their bytes; what follows them may be anything. A file that does not exist is
    left so. Raises ValueError, with file and line, for a line before them that is no row.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    length = last = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if last >= step or not line.endswith(b"\n"):
            break
        try:
            last = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: not the row of a step ({error}), and the run goes on from step "
                f"{step}. Mend or remove that line."
            ) from error
        length += len(line) if last <= step else 0
    write_atomically(path, content[:length].decode())
