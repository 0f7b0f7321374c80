"""NaNs that are planted: the run stops, names the culprit, and the bundle gives it back."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agenttrain.cli import main
from agenttrain.engines.config import Sampling
from agenttrain.health.crash import read_batch
from agenttrain.runs.provenance import write_config
from agenttrain.runs.run import Run, make_trainer
from agenttrain.runs.setup import prepare
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.tracking.rollouts import read_rollout, read_step
from agenttrain.trainer import Trainer
from agenttrain.training.nonfinite import NotFinite, check_logprobs
from agenttrain.types import Completion, Finish, Origin, Rollout, Task

pytestmark = pytest.mark.timeout(1200)  # whole runs

SETTINGS = ("debug=tiny", "eval.questions=0", "tracker=none")
REWARDS = """
def nan(rollout, answer: str) -> float:
    return float("nan") if answer and rollout.rollout_id == "train-2-1-0" else 1.0

def huge(rollout, **columns) -> float:
    return 1e60 if rollout.rollout_id == "train-2-1-0" else 0.0
"""


def crash_of(run: Path, step: int) -> dict[str, object]:
    return json.loads((run / "crash" / f"step-{step:06d}" / "crash.json").read_text())


@pytest.fixture
def rewards(tmp_path, monkeypatch) -> None:
    (tmp_path / "planted_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "culprits", "cause"),
    [
        ("nan", "reward", ["train-2-1-0"], "ValueError: it returned nan"),
        # The float32 advantages of its group are infinite, of both signs.
        ("huge", "update", ["train-2-1-0", "train-2-1-1"], "rollout train-2-1-0: its loss is -inf"),
    ],
)
def test_a_planted_reward(tmp_path, rewards, capsys, name, stage, culprits, cause):
    run = tmp_path / "run"
    reward = ["reward=[]", f"reward.r._target_=planted_rewards.{name}", "algorithm.scale=none"]
    assert main([*SETTINGS, *reward, f"hydra.run.dir={run}"]) == 1
    told = capsys.readouterr().err
    bundle = run / "crash" / "step-000002"
    assert cause in told and f"To see it again: agenttrain replay {bundle}" in told
    crash = crash_of(run, 2)
    assert (crash["stage"], crash["culprits"]) == (stage, culprits)
    assert cause in str(crash["error"])
    rollouts = (bundle / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    assert len(rollouts) == 4
    if stage == "update":
        kept = load_file(run / "checkpoints" / "step-000001" / "model.safetensors")
        saved = load_file(bundle / "checkpoints" / "step-000001" / "model.safetensors")
        assert saved.keys() == kept.keys()
        assert all(torch.equal(saved[name], kept[name]) for name in kept)
        assert (bundle / "checkpoints" / "step-000001" / "rng-0.pt").is_file()
    # Nothing of the step is in the run itself, which could go on from step 1.
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"

    assert main(["replay", str(bundle)]) == 0
    told = capsys.readouterr().out
    assert f"replayed  {crash['error']}\nthe same culprit: {', '.join(culprits)}\n" in told
    # The bundle is a folder of rollouts too.
    assert main(["replay", str(bundle), "rollout=train-2-1-0"]) == 0
    if stage == "reward":
        does_not_fail_again(Path(shutil.copytree(bundle, tmp_path / "sent to a friend")), capsys)


def does_not_fail_again(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (bundle / "config.yaml").read_text()
    (bundle / "config.yaml").write_text(config.replace("rewards.nan", "rewards.huge"))
    capsys.readouterr()
    assert main(["replay", str(bundle)]) == 2  # no run of this user wrote it
    assert "reward.r._target_=planted_rewards.huge" in capsys.readouterr().err
    assert main(["replay", str(bundle), "trust=true"]) == 1
    assert capsys.readouterr().out.endswith("replayed  nothing failed this time\n")


@pytest.mark.slow
def test_a_planted_reward_of_a_rollout_of_several_trajectories(tmp_path, rewards, capsys):
    run = tmp_path / "run"
    reward = ["reward=[]", "reward.r._target_=planted_rewards.huge", "algorithm.scale=none"]
    # The bundled agent answers the request for a summary with a call, which ends the rollout.
    compaction = ["rollout.compaction=summary", "rollout.compact_at=120", "rollout.max_turns=5"]
    settings = [*SETTINGS, *reward, *compaction, "rollout.summary_tokens=24"]
    settings += ["tracker.arrays_above=0"]
    assert main([*settings, f"hydra.run.dir={run}"]) == 1
    cause = (
        "rollout train-2-1-0 trajectory 0: its loss is -inf, "
        "rollout train-2-1-0 trajectory 1: its loss is -inf, "
        "rollout train-2-1-1: its loss is inf"
    )
    assert cause in capsys.readouterr().err
    crash = crash_of(run, 2)
    assert (crash["stage"], crash["culprits"]) == ("update", ["train-2-1-0", "train-2-1-1"])

    bundle = run / "crash" / "step-000002"
    for folder, step in ((run, 1), (bundle, 2)):
        assert list((folder / "rollouts").glob(f"step-{step:06d}-*.npz"))
    rollouts = [
        read_rollout(record, Task(task_id=record["task_id"], messages=()))
        for record in read_step(bundle, 2)
    ]
    assert [len(rollout.trajectories) for rollout in rollouts] == [1, 1, 2, 1]
    first, summary = rollouts[2].trajectories
    assert summary.role == "summary" and 0 < summary.context_length < first.length
    assert summary.token_ids[: summary.context_length] == summary.context([first])
    sequences = read_batch(bundle, rollouts)
    assert [sequence.key for sequence in sequences] == [
        ("train-2-0-0", 0),
        ("train-2-0-1", 0),
        ("train-2-1-0", 0),
        ("train-2-1-0", 1),
        ("train-2-1-1", 0),
    ]
    for sequence in sequences:
        sampled = [i for span in sequence.trajectory.sampled_spans() for i in span.token_ids]
        assert sequence.token_ids_T.tolist() == sequence.trajectory.token_ids.tolist()
        assert sequence.token_ids_T[sequence.targets_S + 1].tolist() == sampled
        assert set(sequence.trajectory.advantages) == {
            {"train-2-1-0": 5e59, "train-2-1-1": -5e59}.get(sequence.rollout.rollout_id, 0.0)
        }

    assert main(["replay", str(bundle)]) == 0
    again = capsys.readouterr().out
    assert f"replayed  {crash['error']}\nthe same culprit: train-2-1-0, train-2-1-1\n" in again
    assert main(["replay", str(bundle), "rollout=train-2-1-0"]) == 0
    assert main(["view", str(bundle)]) == 0


def test_a_logprob_that_is_no_number_is_named_with_its_trajectory():
    rollout = Rollout(task=Task(task_id="t", messages=()), rollout_id="a", group_id="g", sample=0)
    (first,) = rollout.trajectories
    first.append_context([7, 8, 9], Origin.prompt)
    first.append_sampled(sampled(20, 2, logprob=-1.0), first.token_ids)
    # 7 8 9 20 | 5 30 2: the sampled tokens are at 5 and 6
    second = rollout.branch(0, 4, role="helper")
    second.append_context([5], Origin.template)
    second.append_sampled(sampled(30, 2, logprob=math.nan), second.token_ids)
    with pytest.raises(NotFinite, match=r"in 1 of 1 rollouts: a trajectory 1 \(token 5\)\."):
        check_logprobs([rollout])


def sampled(*token_ids: int, logprob: float) -> Completion:
    count = len(token_ids)
    return Completion(
        token_ids=token_ids,
        logprobs=(logprob,) * count,
        finish=Finish.stop,
        versions=((0, count),),
    )


class Planting:
    """An engine that gives what another one samples, with one logprob that is not a number."""

    def __init__(self, engine, session: str) -> None:
        self.engine, self.session = engine, session
        self.max_context = engine.max_context

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str, **others: Any
    ) -> Completion:
        said = await self.engine.generate(token_ids, sampling, session=session, **others)
        if session != self.session:
            return said
        return replace(said, logprobs=(*said.logprobs[:-1], math.nan))

    async def release(self, session: str) -> None:
        await self.engine.release(session)

    async def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        await self.engine.update(weights, version)

    async def aclose(self) -> None:
        await self.engine.aclose()

    def expect(self, sessions: Sequence[str]) -> None:
        self.engine.expect(sessions)


async def plant(folder: Path, where: str) -> str:
    """The error of a run of which something is spoilt after its first step."""
    with hydra_session(Source()):
        # With a bonus there is an update also where all rewards are equal.
        settings = [*SETTINGS, "tracker.console=false", "algorithm.entropy.bonus=0.001"]
        composed = compose_run(open_keys(settings), Source())
    run = Run(verb="train", config=composed.config, plain=composed.plain, folder=folder)
    folder.mkdir()
    write_config(folder, run.plain, None)
    async with AsyncExitStack() as stack:
        trainer = await make_trainer(run, prepare(run.config), stack)
        await trainer.step(1)
        _spoil(trainer, where)
        before = [p.detach().clone() for p in trainer.policy.model.parameters()]
        with pytest.raises(NotFinite) as caught:
            await trainer.step(2)
        after = [] if where == "optimizer" else list(trainer.policy.model.parameters())
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(before, after, strict=bool(after))
        )
        return str(caught.value)


def _spoil(trainer: Trainer, where: str) -> None:
    if where == "weight":
        with torch.no_grad():
            trainer.policy.model.model.norm.weight[3] = math.nan
    elif where == "optimizer":
        weight = trainer.policy.model.model.norm.weight
        adamw = trainer.policy.optimizer.optimizer
        adamw.register_step_post_hook(lambda *_: weight.data[3:5].fill_(math.inf))
    else:
        engine = Planting(trainer.engine, "train-2-0-1")
        trainer.source.collector = replace(trainer.source.collector, engine=engine)


@pytest.mark.parametrize(
    ("where", "stage", "culprits", "cause"),
    [
        (
            "weight",
            "weights",
            ["model.norm.weight"],
            "before step 2: weights are not finite: model.norm.weight (1 of",
        ),
        ("logprob", "logprobs", ["train-2-0-1"], "in 1 of 4 rollouts: train-2-0-1 (token "),
        pytest.param(
            "optimizer",
            "weights",
            ["model.norm.weight"],
            "after the update of step 2: weights are not finite: model.norm.weight (2 of",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_planted_weight_and_logprob(tmp_path, capsys, where, stage, culprits, cause):
    run = tmp_path / "run"
    error = asyncio.run(plant(run, where))
    assert cause in error and "To see it again: agenttrain replay " in error
    crash = crash_of(run, 2)
    assert (crash["stage"], crash["culprits"]) == (stage, culprits)
    assert main(["replay", str(run / "crash" / "step-000002")]) == 0
    assert f"the same culprit: {', '.join(culprits)}" in capsys.readouterr().out
