"""The list of checks between sections: each reads the sections that it declares, and no other."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from agenttrain.settings.checks import CHECKS, Check
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig

RUNS = {
    "default": [],
    "fleet": ["engine=vllm_server", "async_training.max_staleness=1", "weight_sync.transport=nccl"],
    "roles": [
        *(
            "engine=vllm_server",
            "distributed=ddp",
            "distributed.nodes=2",
            "distributed.rendezvous=a:1",
        ),
        *("reward=[judge]", "reward.judge.url=role:judge", "roles.judge.model=m"),
        *("algorithm.teacher.path=role:teacher", "roles.teacher.model=m"),
    ],
    "agent": [
        "agent=endpoint",
        "agent.command=[python,a.py]",
        "rollout.compaction=summary",
        "rollout.compact_at=100",
    ],
    "adapters": ["model.lora.rank=4", "algorithm.kl.beta=0.1", "guards.kl.limit=1"],
    "grammar": ["rollout.structured_calls=true", "stop_when.metric=los", "stop_when.above=1"],
    "own": [
        *("+environment.maze._target_=worlds.Maze", "algorithm/credit=gigpo"),
        *("training.compile=true", "distributed=fsdp2", "rollout.deterministic=true"),
    ],
}
"""Runs in which every check goes beyond its first line, right or wrong."""


class Recorded:
    """Settings that record which sections are read."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        derived = getattr(RunConfig, name, None)
        if isinstance(derived, property):  # reads sections itself
            return derived.fget(self)  # type: ignore[misc]
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("run", RUNS)
def test_a_check_reads_what_it_declares(run: str) -> None:
    with hydra_session(Source()):
        config = compose_run(open_keys(RUNS[run]), Source()).config
    for check in CHECKS:
        settings = Recorded(config)
        if isinstance(check, Check):
            list(check.problems(settings))  # type: ignore[arg-type]
        else:
            list(check.problems(settings, "train", RUNS[run]))  # type: ignore[arg-type]
        assert settings.read <= set(check.reads), check.problems.__name__


def test_the_declared_sections_are_those_of_a_run() -> None:
    assert is_dataclass(RunConfig)
    sections = {field.name for field in fields(RunConfig)}
    assert {name for check in CHECKS for name in check.reads} <= sections
