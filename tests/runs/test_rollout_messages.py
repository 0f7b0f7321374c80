"""Messages between trainer and rollout process, and the shares of the training processes."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from agenttrain.engines.base import EngineDead
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.rewards.function import RewardError
from agenttrain.rollout.collector import Collected, NoRewards
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.runs.remote import split_batch
from agenttrain.runs.rollout_messages import CODEC, ProbeRequest, RequestFailure, RolloutsFailed
from agenttrain.training.weight_sync import Gap, ProbeCheck, SyncProbe
from agenttrain.types import Image, Origin, PlacedImage, Rollout, Task


def rollout(place: int, sample: int, tokens: int) -> Rollout:
    task = Task(task_id=f"t{place}", messages=())
    made = Rollout(task=task, rollout_id=f"train-1-{place}-{sample}", sample=sample)
    made.trajectories[0].append_context(range(tokens), Origin.prompt)
    return made


def step(*tokens: int, trained: tuple[int, ...]) -> StepBatch:
    """Groups of two rollouts, of which each has so many tokens."""
    groups = [[rollout(place, n, size) for n in (0, 1)] for place, size in enumerate(tokens)]
    return StepBatch(
        collected=Collected(groups=groups, places=[*range(len(tokens))], overlong=1, dropped=2),
        trained=trained,
        tasks=len(tokens) + 1,
        stuck=3,
        metrics={"data/tasks": 5.0},
        ahead=True,
        state={"cursor": 5},
    )


def test_images_come_back_with_their_files_and_places() -> None:
    seen = Image(data=b"\x89PNG\x00", sha256="ab", width=64, height=96)
    made = rollout(0, 0, 4)
    made.trajectories[0].append_context([9, 9], Origin.tool, (PlacedImage(seen, 0, (1, 2)),))
    again = CODEC.decode(CODEC.encode(made))
    assert again == made
    # After the four tokens of the prompt.
    assert again.trajectories[0].images == (PlacedImage(seen, 4, (1, 2)),)


def test_groups_are_shared_by_their_real_tokens() -> None:
    message = step(30, 10, 10, 99, 15, trained=(0, 1, 2, 4))
    first, second = split_batch(CODEC.decode(CODEC.encode(message)), 2, minibatches=1)
    # Costs 60, 20, 20, 30: 60 to the first; 30, 20, 20 to the second until it has more.
    assert [[len(group) for group in one.groups] for one in (first, second)] == [
        [2, 0, 0, 0],
        [0, 2, 2, 2],
    ]
    # What is not trained on is written to the rollout file by the first.
    assert (first.collected.places, second.collected.places) == ([0, 3], [1, 2, 4])
    assert [r.rollout_id for r in first.rollouts if r.sample == 1] == ["train-1-0-1", "train-1-3-1"]
    assert (first.collected.overlong, second.collected.overlong) == (1, 0)
    assert (first.collected.dropped, second.collected.dropped) == (2, 0)
    assert (first.stuck, second.stuck, first.tasks, second.tasks) == (3, 0, 6, 6)
    assert (first.state, second.state) == ({"cursor": 5}, {})


def test_each_minibatch_is_shared_by_itself() -> None:
    shares = split_batch(step(50, 40, 3, 2, trained=(0, 1, 2, 3)), 2, minibatches=2)
    owners = [[rank for rank in (0, 1) if shares[rank].groups[i]] for i in range(4)]
    # 50 to the first, 40 to the second; then loads of 100 and 80: 3 and 2 to the second.
    assert owners == [[0], [1], [1], [1]]


def test_one_process_gets_everything() -> None:
    (share,) = split_batch(step(5, 6, 7, trained=(2, 0)), 1, minibatches=1)
    assert [group[0].rollout_id for group in share.groups] == ["train-1-2-0", "train-1-0-0"]
    assert len(share.rollouts) == 6


def crossed(error: Exception) -> Exception:
    return CODEC.decode(CODEC.encode(RequestFailure.of(error))).raised()


def test_errors_of_ours_are_raised_again_as_what_they_are() -> None:
    error = RewardError("reward.mine: 1 / 0", culprits=["train-1-0-0"])
    error.rollouts = [rollout(0, 0, 3)]
    again = crossed(error)
    assert isinstance(again, RewardError) and str(again) == "reward.mine: 1 / 0"
    assert (again.culprits, again.rollouts[0].rollout_id) == (("train-1-0-0",), "train-1-0-0")
    again = crossed(NoRewards("step 3: not one rollout has a reward", Collected()))
    assert isinstance(again, NoRewards) and str(again).startswith("step 3: not one")
    again = crossed(FleetLost("no server is left"))
    assert isinstance(again, EngineDead) and type(again) is FleetLost
    again = crossed(FileNotFoundError(2, "No such file", "/x"))
    assert type(again) is FileNotFoundError and "No such file: '/x'" in str(again)


@pytest.mark.slow
def test_an_error_of_a_module_that_the_trainer_has_not_imported() -> None:
    """The trainer imports no fleet, and saves a checkpoint if its error is an EngineDead."""
    program = """
import sys
from agenttrain.engines.base import EngineDead
from agenttrain.runs.rollout_messages import CODEC
assert "agenttrain.engines.vllm_server.fleet" not in sys.modules
error = CODEC.decode(bytes.fromhex(sys.argv[1])).raised()
assert isinstance(error, EngineDead), type(error)
print(type(error).__name__, error)
"""
    sent = CODEC.encode(RequestFailure.of(FleetLost("no server is left"))).hex()
    ran = subprocess.run([sys.executable, "-c", program, sent], capture_output=True, text=True)
    assert ran.stdout == "FleetLost no server is left\n", ran.stderr


def test_errors_of_other_code_are_named() -> None:
    class Surprise(Exception):
        pass

    again = crossed(Surprise("boo"))
    assert isinstance(again, RolloutsFailed) and str(again) == "Surprise: boo"
    assert str(crossed(ZeroDivisionError("division by zero"))).startswith("ZeroDivisionError: ")
    # Its text is not in its arguments.
    again = crossed(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    assert str(again).startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")


def test_the_check_of_a_probe_judges_alike_in_the_other_process() -> None:
    before = SyncProbe(
        token_ids=(1, 2, 3),
        start=1,
        policy_T=torch.tensor([-1.0, -0.1]),
        engine_T=torch.tensor([-1.0, -0.1]),
    )
    check = ProbeCheck(
        token_ids=(1, 2, 3),
        start=1,
        policy=(-1.5, -0.3),
        first=Gap(mean=0.0, q90=0.0, max=0.0),
        warned=False,
        before=before.scores,
        version=7,
        tolerance=1e-3,
        exact=True,
        growth=5,
    )
    sent = CODEC.decode(CODEC.encode(ProbeRequest(check=check))).check
    assert sent == check
    assert sent([-1.5, -0.3]) is None and sent([-1.5004, -0.3]) is None
    assert "differ from the policy's by up to 0.5 (mean" in sent([-1.0, -0.3])
    assert "differ from the policy's by up to nan" in sent([math.nan, -0.3])
    still = ProbeCheck(**{n: getattr(check, n) for n in check.__slots__} | {"tolerance": 1.0})
    assert "moved by up to 0.5 and the engine's not by a bit" in still([-1.0, -0.1])


@pytest.mark.parametrize("value", [{"cursor": 3, "costs": {"seen": {"None/None": [7.5, 2]}}}])
def test_the_state_of_a_source_crosses_as_json_does(value) -> None:
    assert CODEC.decode(CODEC.encode(value)) == value
