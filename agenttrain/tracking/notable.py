"""The rollouts of a run that are worth a look: of alarms, the best, worst and most surprising.

Only the files of the latest steps and of the latest alarms are read, so that a run of a thousand
steps takes no longer than one of ten.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.tracking.rollouts import read_step, step_path, written_steps
from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import Origin

Record = Mapping[str, Any]
STEPS = 3
"""Latest steps whose rollouts are compared."""
ALARMS = 5
"""Latest alarms that are listed."""
EACH = 3
"""Rollouts of a section."""
MOST_CULPRITS = 20
"""Rollouts of a crash that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rollouts of one kind, as the front of a page lists them."""

    title: str
    text: str
    """Why these rollouts are listed."""
    rollouts: list[int]
    """Their positions in `Notable.records`."""


@dataclass(slots=True)
class Notable:
    """The rollouts worth a look, each once, with the sections that list them."""

    sections: list[Section] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    """Records with their `step`, the mean reward of their group as `group_reward`, and the mean
    log-probability of their sampled tokens as `logprob`."""

    def add(self, title: str, text: str, records: Iterable[dict[str, Any]]) -> None:
        """Add a section, which lists its records by their places in `self.records`.

        A record that another section has is not added again.
        """
        # A rollout's step and id identify it.
        places = {(r["step"], r["rollout_id"]): place for place, r in enumerate(self.records)}
        rollouts = []
        for record in records:
            key = record["step"], record["rollout_id"]
            if key not in places:
                places[key] = len(self.records)
                self.records.append(record)
            rollouts.append(places[key])
        self.sections.append(Section(title=title, text=text, rollouts=rollouts))


def notable_rollouts(run_folder: Path, command: str) -> Notable:
    """Return the rollouts of a run that are worth a look.

    Sections, in this order: the culprits, in the folder of a crash; the rollouts of the latest
    alarms; the best, worst and most surprising of the latest STEPS steps. Raises ConfigError that
    begins with `command` if the run has written no rollouts.
    """
    steps = written_steps(run_folder, command)
    notable = Notable()
    records_by_step: dict[int, list[dict[str, Any]]] = {}  # those read so far

    def records_of(step: int) -> list[dict[str, Any]]:
        if step not in records_by_step:
            exists = step_path(run_folder, step).is_file()
            records = read_step(run_folder, step) if exists else ()
            records_by_step[step] = list(_with_figures(records, step))
        return records_by_step[step]

    def records_named(names: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
        return [r for step, name in names for r in records_of(step) if r["rollout_id"] == name]

    crash_file = run_folder / "crash.json"
    if crash_file.is_file():
        crash = json.loads(crash_file.read_text(encoding="utf-8"))
        culprits = records_named((crash["step"], name) for name in crash["culprits"])
        notable.add(f"Culprits of step {crash['step']}", crash["error"], culprits[:MOST_CULPRITS])
    for alarm in reversed(read_summary(run_folder).get("alarms", [])[-ALARMS:]):
        named = records_named(alarm["rollouts"])
        notable.add(f"Alarm of step {alarm['step']}", alarm["text"], named)
    latest = steps[-STEPS:]
    records = [record for step in latest for record in records_of(step)]
    _add_extremes(notable, records, _of_steps(latest))
    return notable


def _of_steps(steps: Sequence[int]) -> str:
    """Return ``of steps 8 to 10``, ``of step 10``, or ``of the evaluation``."""
    if list(steps) == [0]:  # `agenttrain eval` writes its rollouts as step 0
        return "of the evaluation"
    return f"of steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"of step {steps[0]}"


def _add_extremes(notable: Notable, records: Iterable[dict[str, Any]], of_steps: str) -> None:
    """Add the best, the worst and the most surprising rollouts; `of_steps` says which they are of.

    A section has at most EACH rollouts, of different groups. The best and the worst have the
    highest and the lowest reward, and the longer of two equal ones comes first. The most surprising
    are those whose reward differs most from the mean of their group, such as the one success of a
    group of eight; of two equal ones, the one whose tokens were less probable.
    """
    rewarded = [record for record in records if record["reward"] is not None]
    best = _highest(rewarded, lambda r: (r["reward"], _tokens(r)))
    worst = _highest(rewarded, lambda r: (-r["reward"], _tokens(r)))
    if len({record["reward"] for record in rewarded}) == 1:
        worst = []  # as in supervised runs: all are as good as the best
    # `_with_figures` has added `group_reward` and `logprob`, the means of group and tokens.
    surprising = _highest(rewarded, lambda r: (abs(r["reward"] - r["group_reward"]), -r["logprob"]))
    surprising = [record for record in surprising if record["reward"] != record["group_reward"]]
    far_from_mean = f"furthest from the mean reward of their group, {of_steps}"
    for title, text, listed in (
        ("Best", f"highest reward {of_steps}", best),
        ("Worst", f"lowest reward {of_steps}", worst),
        ("Most surprising", far_from_mean, surprising),
    ):
        if listed:
            notable.add(title, text, listed)


def _highest(
    records: Sequence[dict[str, Any]], value: Callable[[Record], tuple[float, ...]]
) -> list[dict[str, Any]]:
    """Return the EACH records of highest value, at most one of each group."""
    by_group: dict[tuple[int, str], dict[str, Any]] = {}
    for record in sorted(records, key=value, reverse=True):
        by_group.setdefault((record["step"], record["group_id"]), record)
    return list(by_group.values())[:EACH]


def _with_figures(records: Iterable[Record], step: int) -> Iterable[dict[str, Any]]:
    """Yield the records of a step with `step`, `group_reward` and `logprob`."""
    records = list(records)
    rewards: dict[str, list[float]] = {}
    for record in records:
        if record["reward"] is not None:
            rewards.setdefault(record["group_id"], []).append(record["reward"])
    for record in records:
        group = rewards.get(record["group_id"])
        yield {
            **record,
            "step": step,
            "group_reward": statistics.fmean(group) if group else None,
            "logprob": _mean_logprob(record),
        }


def _tokens(record: Record) -> int:
    """Return the number of sampled tokens of a record."""
    spans = [span for trajectory in record["trajectories"] for span in trajectory["spans"]]
    return sum(s["end"] - s["start"] for s in spans if s["origin"] == Origin.sampled)


def _mean_logprob(record: Record) -> float:
    """Return the mean log-probability of a record's sampled tokens; 0 if it has none."""
    logprobs = [
        value
        for trajectory in record["trajectories"]
        for span in trajectory["spans"]
        if span["origin"] == Origin.sampled
        for value in trajectory["logprobs"][span["start"] : span["end"]]
        if value is not None  # null stands for NaN
    ]
    return math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
