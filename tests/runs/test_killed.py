"""SIGKILL: a run that goes on afterwards equals one that was left alone, to the bit."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from children import Moment, agenttrain, arm, in_child
from same_run import assert_same, metrics
from training_cases import policy, random_groups

from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.checkpoint_files import newest_first, verify
from agenttrain.utils.exit_codes import DONE

pytestmark = pytest.mark.timeout(1200)  # whole runs, one after the other
RUN = (
    *("debug=tiny", "steps=12", "checkpoint.every=2", "eval.questions=0", "tracker=none"),
    *("reward=[]", "+reward.drawn._target_=drawing.drawn"),
    *("rollout.max_turns=2", "rollout.max_turn_tokens=16"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    ended = agenttrain(*RUN, f"hydra.run.dir={folder}", log=folder.with_name("whole.txt"))
    assert ended.code == DONE, ended.said
    return folder


def words(folder: Path) -> tuple[str, ...]:
    """As anyone repeats it: the same command again and again."""
    return (*RUN, "resume=auto", f"hydra.run.dir={folder}")


def saved(folder: Path) -> int:
    """Steps of the newest checkpoint; every one that is there is whole."""
    found = newest_first(folder / "checkpoints")
    for path in found:
        verify(path)
    return int(found[0].name.removeprefix("step-")) if found else 0


def killed(folder: Path, moment: Moment) -> None:
    ended = agenttrain(
        *words(folder), log=folder.with_name("log.txt"), prepare=partial(arm, moment)
    )
    assert ended.code == -signal.SIGKILL, ended.said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_run_that_is_killed_in_each_phase_equals_one_that_was_not(whole, tmp_path, seed):
    """Rollouts, an update and the writing of a checkpoint; when exactly, the seed says."""
    folder, rng = tmp_path / "run", random.Random(seed)

    # Within the rollouts of a step there are more than 60 calls of modules that decode.
    step = rng.choice([3, 4])
    killed(folder, Moment(kind="decode", steps=step - 1, nth=rng.randint(1, 60)))
    assert (len(metrics(folder)), saved(folder)) == (step - 1, 2)

    step = rng.choice([5, 6])
    killed(folder, Moment(kind="update", steps=step - 1 - saved(folder)))
    assert (len(metrics(folder)), saved(folder)) == (step - 1, 4)

    # A checkpoint is some 40 operations on files and folders.
    killed(folder, Moment(kind="checkpoint", steps=8 - saved(folder), nth=rng.randint(2, 40)))
    assert len(metrics(folder)) == 8 and saved(folder) in (6, 8)

    ended = agenttrain(*words(folder), log=tmp_path / "log.txt")
    assert ended.code == DONE, ended.said
    assert_same(folder, whole)
    ended = agenttrain(*words(folder), log=tmp_path / "log.txt")
    assert ended.code == DONE
    assert "finished after 12 steps; for more of them" in ended.said


def drawn_moment(rng: random.Random, number: int, done: int) -> Moment:
    """Of the number-th kill of a run whose newest checkpoint has `done` steps, so that twenty of
    them go through its steps 1 to 11."""
    step = max(1 + number // 2, done + 1)
    due = step + step % 2
    delay_s = rng.choice([0.0, rng.uniform(0, 0.05)])
    kind = ("decode", "update", "checkpoint")[number % 3]
    if kind == "checkpoint" and due < 12:
        return Moment(kind=kind, steps=due - done, nth=rng.randint(2, 40), delay_s=delay_s)
    if kind == "update":
        return Moment(kind=kind, steps=step - 1 - done, delay_s=delay_s)
    return Moment(kind="decode", steps=step - 1 - done, nth=rng.randint(1, 60), delay_s=delay_s)


@pytest.mark.long
def test_a_run_that_is_killed_twenty_times_equals_one_that_was_not(whole, tmp_path):
    """A seeded delay after a moment of a phase makes it a random one."""
    folder, rng = tmp_path / "run", random.Random(20)
    kinds = []
    for number in range(20):
        moment = drawn_moment(rng, number, saved(folder))
        killed(folder, moment)
        kinds.append(moment.kind)
    assert min(kinds.count(kind) for kind in ("decode", "update", "checkpoint")) >= 4, kinds
    ended = agenttrain(*words(folder), log=tmp_path / "log.txt")
    assert ended.code == DONE, ended.said
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_run_that_saves_beside_training_equals_one_that_does_not(whole, tmp_path):
    """Also after it was killed amid one of its checkpoints."""
    folder = tmp_path / "run"
    beside = ("checkpoint.in_background=true", "training.offload_during_rollouts=true")
    ended = agenttrain(
        *(*words(folder), *beside),
        log=tmp_path / "log.txt",
        prepare=partial(arm, Moment(kind="checkpoint", steps=6, nth=4)),
    )
    assert ended.code == -signal.SIGKILL, ended.said
    assert 0 < saved(folder) < 8
    ended = agenttrain(*words(folder), *beside, log=tmp_path / "log.txt")
    assert ended.code == DONE, ended.said
    assert saved(folder) == 12
    assert_same(folder, whole)


def save_until(trained, folder: Path, nth: int, *, beside: bool) -> int:
    """Write the checkpoint of step 2 in a forked process that dies at the nth operation on files;
    its exit code, or minus the signal. `beside`: while the weights change."""
    pid = os.fork()
    if pid == 0:
        arm(Moment(kind="checkpoint", nth=nth))
        saver = checkpoints(folder)
        if beside:
            saver.begin(trained, step=2)
            with torch.no_grad():  # not an update: `arm` counts them
                for weight in trained.model.parameters():
                    weight.add_(1.0)
            saver.finish(trained.world)
        else:
            saver.save(trained, step=2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, tokenizer=tiny.tokenizer(), keep=1)


def kill_at_operations(folder: Path, stride: int, beside: bool) -> None:
    """Every moment leaves one checkpoint to load, the old one or the new one."""
    trained = policy()
    checkpoints(folder).save(trained, step=1)
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    train_policy(trained, random_groups(0))
    after = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    steps, loaded = [], policy()
    for nth in itertools.count(1, stride):
        copy = folder.with_name(f"copy-{nth}") / "checkpoints"
        shutil.copytree(folder, copy, symlinks=True)
        code = save_until(trained, copy, nth, beside=beside)
        assert code in (0, -signal.SIGKILL), code
        for path in newest_first(copy):
            verify(path)
        steps.append(checkpoints(copy).load_latest(loaded)["step"])
        weights = before if steps[-1] == 1 else after
        assert all(torch.equal(t, weights[n]) for n, t in loaded.model.state_dict().items())
        left = sorted(path.name for path in copy.iterdir())
        assert set(left) <= {"latest", "step-000001", "step-000002"}, left
        shutil.rmtree(copy)
        if code == 0:
            break
    # The new one takes its place at one moment, after it has been written and before others go.
    assert steps == sorted(steps), steps
    assert steps.count(1) > 10 // stride and steps.count(2) > 3 // stride, steps


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.slow), 9]
)
def test_a_checkpoint_that_is_killed_while_it_is_written_never_loads_half(tmp_path, stride, beside):
    """At each, each third or each ninth of the operations on files and folders that it takes."""
    work = partial(kill_at_operations, tmp_path / "checkpoints", stride, beside)
    in_child(work, tmp_path / "log.txt")
