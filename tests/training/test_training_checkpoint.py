"""Checkpoints: exact resume, torn files, atomicity."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from training_cases import policy, random_groups, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from agenttrain.commands.export import export
from agenttrain.trainer import train_policy
from agenttrain.training import checkpoint as module
from agenttrain.training.checkpoint import Checkpoints, random_states, set_random_states
from agenttrain.training.checkpoint_files import CheckpointError, NotRead, latest, seal, verify

ALGORITHM = {"kl": {"beta": 0.05}, "num_epochs": 2}


def checkpoints(folder: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder, tokenizer=tiny.tokenizer(), keep=keep)


def steps(trained, first: int, last: int) -> list[dict]:
    return [train_policy(trained, random_groups(seed)) for seed in range(first, last)]


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


@pytest.mark.timeout(60)
def test_an_interrupted_save_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        """Its files go to a folder where `policy.pt` is a pipe, which takes no byte."""

        def save_pretrained(self, part: Path) -> None:
            os.mkfifo(part / "policy.pt")

    def interrupted(**_) -> None:
        raise KeyboardInterrupt  # as a second SIGTERM does

    trained = policy()
    saver = Checkpoints(tmp_path, tokenizer=Stuck(), keep=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trained.model, "state_dict", interrupted)
        saver.save(trained, step=1)
    assert saver.pending is None and saver.empty
    with (tmp_path / ".step-000001.part" / "policy.pt").open("rb") as pipe:
        assert pipe.read()  # the thread that writes it can end


def test_a_checkpoint_that_is_written_beside_training_is_of_its_step(tmp_path: Path) -> None:
    settings = {"algorithm": ALGORITHM, "warmup_steps": 3}
    trained, saver = policy(**settings), checkpoints(tmp_path)
    steps(trained, 0, 2)
    saver.begin(trained, step=2, state={"cursor": 24})
    assert saver.pending == 2
    expected = steps(trained, 2, 4)
    path = saver.finish(trained.world)
    assert path == tmp_path / "step-000002" and saver.pending is None
    assert saver.finish(trained.world) is None
    verify(path)

    resumed = policy(**settings)
    assert checkpoints(tmp_path).load_latest(resumed) == {"cursor": 24, "step": 2}
    assert repr(steps(resumed, 2, 4)) == repr(expected)
    for name, tensor in weights(trained).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    saver.begin(trained, step=1)
    saver.begin(trained, step=2)
    assert (saver.pending, latest(tmp_path).name) == (2, "step-000001")
    saver.save(trained, step=3)
    assert (saver.pending, latest(tmp_path).name) == (None, "step-000003")
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000002", "step-000003"]


def test_a_failure_beside_training_is_raised_where_it_is_finished(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    before = saver.save(trained, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights_size = (before / "model.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights_size - 1, hard))
    try:
        saver.begin(trained, step=2)
        with pytest.raises(OSError, match="File too large"):
            saver.finish(trained.world)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    verify(saver.save(trained, step=2))


def test_every_file_is_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    """safetensors alone would write the weights with mode 0600."""

    def modes(folder: Path) -> set[int]:
        return {path.stat().st_mode & 0o777 for path in folder.iterdir()}

    before = os.umask(0o027)
    try:
        saved = checkpoints(tmp_path / "checkpoints").save(policy(), step=1)
        export(saved, tmp_path / "exported")
    finally:
        os.umask(before)
    assert modes(saved) == {0o640}
    # An export is for servers of other users, whatever the umask.
    assert modes(tmp_path / "exported") == {0o644}


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "ran"

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["policy.pt", "rng-0.pt", "pytorch_model.bin"])
def test_a_pickle_with_code_in_it_is_not_read(tmp_path: Path, name: str) -> None:
    """Also where the manifest fits, which anybody can write."""
    trained = policy()
    saved = checkpoints(tmp_path / "checkpoints").save(trained, step=1)
    torch.save({"a": Evil(tmp_path)}, saved / name)
    if name == "pytorch_model.bin":
        (saved / "model.safetensors").unlink()
    (saved / "manifest.json").unlink()
    seal(saved)
    with pytest.raises(NotRead, match=r"step-000001.*: holds a pickle with more than tensors and"):
        checkpoints(tmp_path / "checkpoints").load_latest(trained)
    assert not (tmp_path / "ran").exists()


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


class Gpus:
    """The part of `torch.cuda` that random states are kept with."""

    def __init__(self, *states: int, current: int = 0) -> None:
        self.states, self.current = list(states), current

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of `torch.cuda`."""

        def set_rng_state(state: torch.Tensor, device: int) -> None:
            self.states[device] = int(state)  # IndexError: there is no such device

        for name, value in {
            "is_available": lambda: bool(self.states),
            "device_count": lambda: len(self.states),
            "current_device": lambda: self.current,
            "get_rng_state_all": lambda: [torch.tensor(state) for state in self.states],
            "set_rng_state": set_rng_state,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    "count, current, expected",
    [
        (8, 6, [10, 11, 12, 13, 14, 15, 16, 17]),
        (4, 2, [10, 11, 16, 13]),  # the state of its own GPU, which was number 6
        (1, 0, [16]),
        (10, 6, [10, 11, 12, 13, 14, 15, 16, 17, 0, 0]),
        (0, 0, []),
    ],
)
def test_random_states_come_back_on_another_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, current: int, expected: list[int]
) -> None:
    Gpus(*range(10, 18), current=6).put(monkeypatch)
    states = random_states()
    now = Gpus(*[0] * count, current=current)
    now.put(monkeypatch)
    set_random_states(states)
    assert now.states == expected
    older = {name: value for name, value in states.items() if name != "cuda_device"}
    set_random_states(older)
    assert now.states[current : current + 1] == [10 + current][:count]


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


FILES = (
    *("chat_template.jinja", "config.json", "generation_config.json", "manifest.json"),
    *("model.safetensors", "policy.pt", "rng-0.pt", "state.json", "tokenizer.json"),
    "tokenizer_config.json",
)
"""Of a checkpoint; the test below finds another."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    trained, saver = policy(), checkpoints(folder)
    saver.save(trained, step=1)
    steps(trained, 0, 1)
    saver.save(trained, step=2)
    return folder


def test_every_file_of_a_checkpoint_is_damaged_below(two: Path) -> None:
    assert sorted(path.name for path in (two / "step-000002").iterdir()) == sorted(FILES)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "emptied": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "short of a byte": lambda content: content[:-1],
    "flipped at the start": lambda content: flipped(content, 0),
    "flipped in the middle": lambda content: flipped(content, len(content) // 2),
    "flipped at the end": lambda content: flipped(content, len(content) - 1),
    "removed": None,
}


def skipped(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The newer checkpoint is skipped, and the warning names the file."""
    assert latest(folder).name == "step-000001"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: checkpoint skipped: ")
    assert f"step-000002/{name}: " in line


def torn() -> Iterator[object]:
    """Every file with two damages and every damage with two files or more; the rest is long."""
    damages = list(DAMAGES)
    for place, name in enumerate(FILES):
        for number, damage in enumerate(damages):
            quick = (number - place) % len(damages) in (0, 1)
            yield pytest.param(name, damage, marks=() if quick else pytest.mark.long)


@pytest.mark.parametrize(("name", "damage"), list(torn()))
def test_a_torn_checkpoint_is_skipped_by_name(
    two: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two / "step-000002" / name
    content = path.read_bytes()
    spoil = DAMAGES[damage]
    try:
        if spoil is None:
            path.unlink()
        else:
            path.write_bytes(spoil(content))
        skipped(two, name, capsys)
    finally:
        path.write_bytes(content)
    verify(two / "step-000002")


def without_a_line(manifest: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in manifest.items() if name != "policy.pt"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: {},
        lambda manifest: [],
        without_a_line,
        lambda manifest: {**manifest, "more.json": "0" * 64},
        lambda manifest: {n: d for n, d in manifest.items() if n != "manifest.json"},
    ],
)
def test_a_manifest_that_is_json_and_not_what_was_written(two: Path, spoil, capsys) -> None:
    path = two / "step-000002" / "manifest.json"
    content = path.read_text()
    try:
        path.write_text(json.dumps(spoil(json.loads(content))))
        skipped(two, "manifest.json", capsys)
    finally:
        path.write_text(content)


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "model.safetensors.index.json", "pytorch_model.bin", "rng-1.pt"],
)
def test_a_file_that_a_loader_would_read_and_nobody_wrote(two: Path, name: str, capsys) -> None:
    extra = two / "step-000002" / name
    extra.write_text("{}")
    try:
        skipped(two, name, capsys)
    finally:
        extra.unlink()
    note = two / "step-000002" / "notes.md"
    note.write_text("This one is good.")
    verify(two / "step-000002")
    note.unlink()


@pytest.mark.parametrize("state", ["dangling", "older", "removed", "a file", "a copied folder"])
def test_a_link_that_is_not_what_it_was_changes_nothing_and_is_mended(
    two: Path, tmp_path: Path, state: str
) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "copy", symlinks=True))
    link = folder / "latest"
    link.unlink()
    if state in ("dangling", "older"):
        link.symlink_to("step-000009" if state == "dangling" else "step-000001")
    elif state == "a file":
        link.write_text("step-000001")
    elif state == "a copied folder":
        shutil.copytree(folder / "step-000001", link)
    assert checkpoints(folder).load_latest(policy())["step"] == 2
    assert link.is_symlink() and link.readlink() == Path("step-000002")


def test_the_best_one_stays(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path, keep=2)

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("step-*"))

    for step in (1, 2):
        saver.save(trained, step=step)
    saver.mark_best(trained, 2)
    for step in (3, 4, 5):
        saver.save(trained, step=step)
    assert left() == ["step-000002", "step-000004", "step-000005"]
    saver = checkpoints(tmp_path, keep=1)  # of a run that was resumed
    saver.save(trained, step=6)
    assert left() == ["step-000002", "step-000006"]
    saver.mark_best(trained, 6)
    assert left() == ["step-000006"]
    assert (tmp_path / "best").resolve() == (tmp_path / "latest").resolve()


def test_a_save_that_dies_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    saver.save(trained, step=1)

    def die(part: Path, digests: dict[str, str]) -> None:
        raise OSError(28, "No space left on device", str(part))

    with monkeypatch.context() as patch:
        patch.setattr(module, "seal", die)
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


def test_a_replacement_that_dies_after_its_renames_leaves_nothing(tmp_path: Path) -> None:
    trained, saver = policy(), checkpoints(tmp_path)
    saver.save(trained, step=3)
    former = tmp_path / ".step-000003.former"  # `replace` died while it removed the former one
    former.mkdir()
    (former / "model.safetensors").write_bytes(b"old")
    assert checkpoints(tmp_path).load_latest(trained) == {"step": 3}
    assert not former.exists()


def test_no_checkpoint_is_an_error_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        checkpoints(tmp_path).load_latest(policy())
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        checkpoints(tmp_path, keep=0)
