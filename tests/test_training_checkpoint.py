"""Checkpoints: exact resume, torn files, atomicity."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from training_cases import policy, random_groups, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from agenttrain.training import checkpoint as module
from agenttrain.training.checkpoint import CheckpointError, Checkpoints, latest, verify

ALGORITHM = {"beta": 0.05, "num_epochs": 2}


def checkpoints(folder: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder, tokenizer=tiny.tokenizer(), keep=keep)


def steps(trained, first: int, last: int) -> list[dict]:
    return [trained.update(random_groups(seed)) for seed in range(first, last)]


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_last_bit(tmp_path: Path) -> None:
    settings = {"algorithm": ALGORITHM, "warmup_steps": 3}
    whole = policy(**settings)
    expected = steps(whole, 0, 4)

    interrupted = policy(**settings)
    steps(interrupted, 0, 2)
    checkpoints(tmp_path).save(interrupted, step=2, state={"cursor": 24})

    resumed = policy(**settings)  # from the initial weights, which the reference keeps
    state = checkpoints(tmp_path).load_latest(resumed)
    assert state == {"cursor": 24, "step": 2}
    assert resumed.step == 2
    # As text: NaN, a mean over nothing, is to be NaN again.
    assert repr(steps(resumed, 2, 4)) == repr(expected[2:])
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_random_states_come_back(tmp_path: Path) -> None:
    trained = policy()

    def draw() -> tuple:
        return random.random(), np.random.rand(), random.gauss(0, 1), torch.rand(3).tolist()

    np.random.standard_normal()  # leaves a second number behind
    random.gauss(0, 1)
    checkpoints(tmp_path).save(trained, step=1)
    expected = draw(), np.random.standard_normal()
    draw()
    checkpoints(tmp_path).load_latest(trained)
    assert (draw(), np.random.standard_normal()) == expected


def test_a_checkpoint_is_a_model_folder(tmp_path: Path) -> None:
    trained = policy()
    steps(trained, 0, 1)
    path = checkpoints(tmp_path).save(trained, step=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.chat_template == tiny.TEMPLATE
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained.model.state_dict()[name]), name
    assert (path / "model.safetensors").exists()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        saver.save(trained, step=step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000010",
        "step-000015",
    ]
    assert (tmp_path / "latest").resolve().name == "step-000015"
    assert latest(tmp_path).name == "step-000015"


def files_of_a_checkpoint() -> list[str]:
    return [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "policy.pt",
        "rng-0.pt",
        "state.json",
        "tokenizer.json",
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    trained, saver = policy(), checkpoints(folder)
    saver.save(trained, step=1)
    steps(trained, 0, 1)
    saver.save(trained, step=2)
    return folder


@pytest.mark.parametrize("name", files_of_a_checkpoint())
@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
def test_a_torn_checkpoint_is_skipped_by_name(
    two: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two / "step-000002" / name
    content = path.read_bytes()
    middle = len(content) // 2
    try:
        if damage == "removed":
            path.unlink()
        elif damage == "truncated":
            path.write_bytes(content[:middle])
        else:
            flipped = bytes([content[middle] ^ 1])
            path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        assert latest(two).name == "step-000001"
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("warning: checkpoint skipped: ") and "step-000002" in line
        with pytest.raises(CheckpointError, match=r"step-000002"):
            checkpoints(two).load(policy(), two / "step-000002")
    finally:
        path.write_bytes(content)
    verify(two / "step-000002")


def test_a_save_that_dies_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    saver.save(trained, step=1)

    def die(part: Path) -> None:
        raise OSError(28, "No space left on device", str(part))

    with monkeypatch.context() as patch:
        patch.setattr(module, "_seal", die)
        with pytest.raises(OSError, match="No space left"):
            saver.save(trained, step=2)
    assert latest(tmp_path).name == "step-000001"
    saver.save(trained, step=2)  # what was left over does not disturb
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000001",
        "step-000002",
    ]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    saver.save(trained, step=3, state={"try": 1})
    saver.save(trained, step=3, state={"try": 2})
    assert saver.load_latest(trained)["try"] == 2


def test_a_corrupt_newer_one_goes_aside_and_never_costs_a_new_one(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path, keep=1)
    saver.save(trained, step=1)
    whole = tmp_path / "whole"
    (tmp_path / "step-000001").rename(whole)
    saver.save(trained, step=2)
    (tmp_path / "step-000002" / "policy.pt").write_bytes(b"torn")
    whole.rename(tmp_path / "step-000001")

    assert checkpoints(tmp_path, keep=1).load_latest(trained)["step"] == 1
    assert (tmp_path / "latest").resolve().name == "step-000001"
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == [
        ".corrupt-step-000002",
        "step-000001",
    ]
    assert saver.save(trained, step=2).is_dir()
    assert latest(tmp_path).name == "step-000002"


def test_what_was_just_written_is_not_pruned_for_a_higher_number(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path, keep=1)
    saver.save(trained, step=9)
    assert saver.save(trained, step=3).is_dir()
    assert not (tmp_path / "step-000009").exists()


def test_the_newest_is_the_highest_number(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    for step in (999_999, 1_000_000):
        saver.save(trained, step=step)
    assert latest(tmp_path).name == "step-1000000"


def test_a_replacement_that_dies_between_its_renames_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    saver.save(trained, step=3, state={"try": 1})
    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if path.name.endswith(".part"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", die)
        saver.save(trained, step=3, state={"try": 2})
    assert checkpoints(tmp_path).load_latest(trained) == {"try": 1, "step": 3}


def test_no_checkpoint_is_an_error_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoints(tmp_path).load_latest(policy())
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        checkpoints(tmp_path, keep=0)
