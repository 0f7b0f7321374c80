"""SIGTERM and SIGUSR1 at every kind of moment: what is saved, told, and gone on with."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
from children import Ended, Moment, agenttrain, arm
from same_run import assert_same, metrics

from agenttrain.tracking.run_folder import read_summary
from agenttrain.utils.exit_codes import DONE, INTERRUPTED, PREEMPTED, TERMINATED
from agenttrain.utils.signals import GRACE_S

pytestmark = pytest.mark.timeout(1200)  # whole runs, one after the other
RUN = (
    *("debug=tiny", "steps=6", "checkpoint.every=5", "eval.every=4", "eval.questions=2"),
    *("eval.greedy=false", "tracker=none", "reward=[]", "+reward.drawn._target_=drawing.drawn"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    ended = agenttrain(*RUN, f"hydra.run.dir={folder}", log=folder.with_name("whole.txt"))
    assert ended.code == DONE, ended.said
    return folder


def at(folder: Path, moment: Moment | None, *overrides: str) -> Ended:
    """Begin or go on with the run, up to a moment."""
    words = [f"resume={folder}"] if (folder / "config.yaml").exists() else [*RUN, *overrides]
    where = [] if (folder / "config.yaml").exists() else [f"hydra.run.dir={folder}"]
    prepare = None if moment is None else partial(arm, moment)
    return agenttrain(*words, *where, log=folder.with_name("log.txt"), prepare=prepare)


def newest(folder: Path) -> str:
    return (folder / "checkpoints" / "latest").resolve().name


@pytest.mark.slow
def test_a_run_that_is_preempted_twice_equals_one_that_was_not(whole, tmp_path):
    """In rollouts, which are discarded, and in an update, which is finished."""
    folder = tmp_path / "run"
    # The forwards of the first evaluation are fewer than those of it and one step's rollouts.
    ended = at(folder, Moment(kind="decode", steps=1, nth=40, number=signal.SIGUSR1))
    assert ended.code == PREEMPTED, ended.said
    assert "SIGUSR1: the run stops at the next safe point" in ended.said
    assert (len(metrics(folder)), newest(folder)) == (1, "step-000001")
    assert read_summary(folder)["status"] == "preempted"

    # In step 3, and twice, as GNU timeout sends it.
    ended = at(folder, Moment(kind="update", steps=1, number=signal.SIGTERM, times=2))
    assert ended.code == PREEMPTED, ended.said
    assert f"with checkpoints/step-000003; to go on: agenttrain resume={folder}" in ended.said
    assert (len(metrics(folder)), newest(folder)) == (3, "step-000003")

    ended = at(folder, None)
    assert ended.code == DONE, ended.said
    assert_same(folder, whole)


@pytest.mark.long
def test_a_run_that_is_preempted_again_and_again_equals_one_that_was_not(whole, tmp_path):
    """In the first evaluation, an evaluation between steps, and while a checkpoint is written."""
    folder = tmp_path / "run"
    term, user = signal.SIGTERM, signal.SIGUSR1

    ended = at(folder, Moment(kind="decode", steps=0, nth=40, number=term))
    assert ended.code == PREEMPTED, ended.said
    assert f"stopped by SIGTERM before the first step; to go on: agenttrain resume={folder}" in (
        ended.said
    )
    assert metrics(folder) == []
    assert read_summary(folder)["status"] == "preempted"

    ended = at(folder, Moment(kind="decode", steps=4, nth=40, number=term))  # after step 4
    assert ended.code == PREEMPTED, ended.said
    assert (len(metrics(folder)), newest(folder)) == (4, "step-000004")
    assert "step-4/sampled" not in ended.said

    ended = at(folder, Moment(kind="checkpoint", steps=1, nth=5, number=user))  # of step 5
    assert ended.code == PREEMPTED, ended.said
    assert "step-4/sampled" in ended.said
    assert (len(metrics(folder)), newest(folder)) == (5, "step-000005")

    ended = at(folder, None)
    assert ended.code == DONE, ended.said
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_second_sigterm_ends_the_run_at_once(tmp_path):
    """While a checkpoint is written: it never comes to be, and the one before it stands."""
    folder = tmp_path / "run"
    twice = {"number": signal.SIGTERM, "times": 2, "apart_s": GRACE_S}
    moment = Moment(kind="checkpoint", steps=2, nth=5, **twice)
    ended = at(folder, moment, "checkpoint.every=1", "eval.questions=0", "eval.every=null")
    assert ended.code == TERMINATED, ended.said
    assert f"interrupted; to go on: agenttrain resume={folder}" in ended.said
    assert read_summary(folder)["status"] == "interrupted"
    assert (len(metrics(folder)), newest(folder)) == (2, "step-000001")


@pytest.mark.slow
def test_ctrl_c_after_a_signal_ends_the_run_at_once(tmp_path):
    """The user does not want to wait for the safe point that the signal asked for."""
    folder = tmp_path / "run"
    run = (*RUN, "eval.questions=0", "eval.every=null", f"hydra.run.dir={folder}")
    ended = agenttrain(*run, log=tmp_path / "log.txt", prepare=term_then_interrupt)
    assert ended.code == INTERRUPTED, ended.said
    assert not (folder / "checkpoints").exists()


def term_then_interrupt() -> None:
    arm(Moment(kind="update", number=signal.SIGTERM))
    arm(Moment(kind="update", number=signal.SIGINT))


@pytest.mark.slow
def test_a_warm_start_is_preempted_and_goes_on(tmp_path):
    run = ("sft", "debug=tiny", "steps=3", "checkpoint.every=null", "tracker=none")
    run += ("eval.questions=0", "data=shop_demonstrations")
    reference, folder = tmp_path / "reference", tmp_path / "run"
    ended = agenttrain(*run, f"hydra.run.dir={reference}", log=tmp_path / "reference.txt")
    assert ended.code == DONE, ended.said
    moment = Moment(kind="update", steps=1, number=signal.SIGTERM)
    stopped = agenttrain(
        *run, f"hydra.run.dir={folder}", log=tmp_path / "log.txt", prepare=partial(arm, moment)
    )
    assert stopped.code == PREEMPTED, stopped.said
    told = "stopped by SIGTERM with checkpoints/step-000002; to go on: agenttrain sft resume="
    assert told in stopped.said
    assert agenttrain("sft", f"resume={folder}", log=tmp_path / "log.txt").code == DONE
    assert_same(folder, reference)
