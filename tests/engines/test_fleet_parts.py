"""Parts of a fleet that need no process: routing, weight files, answers, places on GPUs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import ServersConfig
from agenttrain.engines.placement import gpu_numbers, place, placement_problems
from agenttrain.engines.vllm_server.client import ServerFailed, completion_of
from agenttrain.engines.vllm_server.config import RoleConfig
from agenttrain.engines.vllm_server.local import weights_folder
from agenttrain.engines.vllm_server.routing import choose, preferred
from agenttrain.engines.weight_files import BadWeights, WeightWriter, read_verified
from agenttrain.engines.weights_place import remove_weights_folder
from agenttrain.types import Finish

SESSIONS = [f"step-1/task-{number}/0" for number in range(400)]


def test_a_session_keeps_its_server_and_moves_only_if_that_leaves() -> None:
    before = {session: preferred(session, [0, 1, 2, 3])[0] for session in SESSIONS}
    after = {session: preferred(session, [0, 1, 3])[0] for session in SESSIONS}
    assert {after[s] for s in SESSIONS if before[s] == 2} == {0, 1, 3}
    assert all(after[s] == before[s] for s in SESSIONS if before[s] != 2)
    # 400 sessions, 100 a server; far more or fewer would be a bad hash.
    assert all(70 < count < 130 for count in Counter(before.values()).values())


def test_a_busy_server_gets_no_more() -> None:
    # The new request makes 11, 5.5 a server; max(8, ceil(1.25 x 5.5)) = 8.
    assert {choose(session, {0: 9, 1: 1}) for session in SESSIONS} == {1}
    assert {choose(session, {0: 7, 1: 1}) for session in SESSIONS} == {0, 1}


@given(st.text(), st.dictionaries(st.integers(0, 20), st.integers(0, 500), min_size=1))
def test_some_server_is_always_below_the_bound(session: str, loads: dict[int, int]) -> None:
    chosen = choose(session, loads)
    assert loads[chosen] <= max(7, 1.25 * (sum(loads.values()) + 1) / len(loads))


def weights(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    embeddings = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tensors = {
        "embed.weight": embeddings,
        "lm_head.weight": embeddings,  # tied: the same memory
        "norm.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scale": torch.tensor(3.0),
    }
    return {**tensors, **changes}


def test_weights_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 24 bytes are too few for a file: embed and lm_head go to the first, the others to the second.
    monkeypatch.setattr("agenttrain.engines.weight_files.FILE_BYTES", 25)
    writer = WeightWriter(tmp_path)
    files = writer.write(iter(weights().items()), 3)
    assert len(list(files.folder.glob("*.safetensors"))) == 2
    read = dict(read_verified(files.folder, files.digest))
    assert read.keys() == weights().keys()
    for name, tensor in weights().items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    for version in (4, 5, 6):
        writer.write(iter(weights().items()), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]


@pytest.mark.parametrize(
    ("changes", "lost", "message"),
    [
        ({}, "scale", "scale: scale is missing now, and was float32 []"),
        ({"more": torch.ones(1)}, "", "more is float32 [1] now, and was missing"),
        ({"scale": torch.tensor([3.0])}, "", "scale is float32 [1] now, and was float32 []"),
        ({"scale": torch.tensor(3)}, "", "scale is int64 [] now, and was float32 []"),
    ],
)
def test_other_weights_than_before_are_refused(
    changes: dict[str, torch.Tensor], lost: str, message: str, tmp_path: Path
) -> None:
    writer = WeightWriter(tmp_path)
    writer.write(iter(weights().items()), 0)
    other = {name: tensor for name, tensor in weights(**changes).items() if name != lost}
    with pytest.raises(BadWeights) as caught:
        writer.write(iter(other.items()), 1)
    assert message in str(caught.value)
    assert not (tmp_path / "1").exists()


def flip(folder: Path) -> None:
    path = folder / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: one.clone() for name, one in tensors.items()}, folder / FILE)


def drop(folder: Path) -> None:
    save(folder, {name: one for name, one in weights().items() if name != "lm_head.weight"})


def add(folder: Path) -> None:
    save(folder, weights(more=torch.ones(1)))


def reshape(folder: Path) -> None:
    save(folder, weights(scale=torch.tensor([3.0])))


def rename(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["scales"] = manifest["tensors"].pop("scale")
    (folder / "manifest.json").write_text(json.dumps(manifest))


FILE = "weights-00000.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "the bytes of .* are not those that were written"),
        (drop, "lm_head.weight: in the manifest, and in no file"),
        (add, "more is not in the manifest"),
        (reshape, "scale is .*, and the manifest has"),
        (rename, "is not the manifest that was announced"),
    ],
)
def test_damaged_files_are_refused_before_anything_is_read(
    damage: Any, message: str, tmp_path: Path
) -> None:
    files = WeightWriter(tmp_path).write(iter(weights().items()), 0)
    damage(files.folder)
    with pytest.raises(BadWeights, match=message):
        read_verified(files.folder, files.digest)


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [41, 2],
        "finish_reason": "stop",
        "logprobs": {
            "content": [{"token_id": 41, "logprob": -0.25}, {"token_id": 2, "logprob": -1.5}]
        },
        "weight_versions": [
            {"version": "6", "start": 0, "end": 1},
            {"version": "7", "start": 1, "end": 2},
        ],
    }
    return {"choices": [{**choice, **changes}]}


def test_an_answer_as_a_completion() -> None:
    completion = completion_of(answer())
    assert (completion.token_ids, completion.logprobs) == ((41, 2), (-0.25, -1.5))
    assert (completion.finish, completion.versions) == (Finish.stop, ((6, 1), (7, 1)))


def test_answers_that_are_none() -> None:
    # From a server that is dying: another one may answer.
    with pytest.raises(ServerFailed, match="aborted"):
        completion_of(answer(finish_reason="abort"))
    with pytest.raises(EngineError, match="'repetition'"):
        completion_of(answer(finish_reason="repetition"))
    # vLLM's form of NaN.
    content = [{"token_id": 41, "logprob": -0.25}, {"token_id": 2, "logprob": -9999.0}]
    with pytest.raises(EngineError, match="NaN or minus infinity"):
        completion_of(answer(logprobs={"content": content}))
    with pytest.raises(EngineError, match="other tokens"):
        completion_of(answer(token_ids=[41, 3]))


def test_servers_take_the_gpus_after_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = ServersConfig(count=2, tensor_parallel_size=2)
    assert place(two) == ((1, 2), (3, 4))
    chosen = ServersConfig(count=2, gpus=[5, 3])
    assert place(chosen) == ((5,), (3,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,GPU-3f")
    assert place(two) == (("6", "5"), ("4", "GPU-3f"))


@pytest.mark.parametrize(
    ("servers", "gpus", "message"),
    [
        (ServersConfig(count=2), 3, None),
        (ServersConfig(count=2), 0, None),
        (
            ServersConfig(count=2),
            2,
            "servers.count=2: with servers.tensor_parallel_size=1",
        ),
        (ServersConfig(count=1), 1, "the servers need 1 GPUs beside the trainer's"),
        (ServersConfig(gpus=[1]), 0, "servers.gpus=[1]: this machine has no GPU; leave it out"),
        (ServersConfig(gpus=[8]), 8, "servers.gpus=[8]: this machine's GPUs are 0 to 7"),
        (ServersConfig(count=2, gpus=[1, 0]), 8, "servers.gpus=[1,0]: GPU 0 is the trainer's"),
    ],
)
def test_servers_that_do_not_fit_the_machine(
    servers: ServersConfig, gpus: int, message: str | None
) -> None:
    problems = list(placement_problems({"servers": servers}, gpus))
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def test_servers_of_roles_take_gpus_that_nothing_else_has() -> None:
    two, judge = ServersConfig(count=2), RoleConfig(model="m", tensor_parallel_size=2)
    user = RoleConfig(model="m", gpus=[2])
    fleets = {"servers": two, "roles.judge": judge, "roles.user": user}
    assert list(placement_problems(fleets, 6)) == []
    # GPU 0 is the trainer's, 2 the user's: the policy's servers have 1 and 3, the judge 4 and 5.
    assert gpu_numbers(two, 1, {2}) == (1, 3)
    assert gpu_numbers(judge, 1, {1, 2, 3}) == (4, 5)
    assert gpu_numbers(user, 1, {1, 2, 3, 4, 5}) == (2,)
    (problem,) = placement_problems(fleets, 5)
    assert problem == (
        "servers.count=2 roles.judge.count=1: with servers.tensor_parallel_size=1 and "
        "roles.judge.tensor_parallel_size=2 the servers need 4 GPUs beside the trainer's and the 1 "
        "that are named, and this machine has 5; lower one of them"
    )
    named = {"servers": ServersConfig(count=2, gpus=[1, 2]), "roles.user": user}
    (problem,) = placement_problems(named, 8)
    assert problem == "roles.user.gpus=[2]: servers.gpus has GPU 2 too; name each GPU once"


def test_weight_files_of_a_killed_run_go_at_its_next_start(tmp_path: Path) -> None:
    run, chosen = tmp_path / "run", tmp_path / "chosen"
    with pytest.raises(EngineError, match=r"weight_sync.folder: /proc/x: No such file .*; name a"):
        weights_folder(run, "/proc/x", 10, ServersConfig())
    first = weights_folder(run, str(chosen), 10, ServersConfig())
    assert first.parent == chosen
    outside = ServersConfig(admin_urls=["http://a:1"])
    second = weights_folder(run, None, 10, outside)
    assert second.parent == run / "servers" and second.is_dir() and not first.exists()
    # Whatever else a copied folder names stays.
    (run / "weights.txt").write_text(str(chosen))
    third = weights_folder(run, None, 10, outside)
    assert chosen.is_dir()
    # The copy of a run that goes on removes none of its files.
    copied = shutil.copytree(run, tmp_path / "copied")
    fourth = weights_folder(copied, str(chosen), 10, outside)
    remove_weights_folder(copied)
    assert third.is_dir() and not fourth.exists()
    remove_weights_folder(run)
    assert not (run / "weights.txt").exists()
    assert list((run / "servers").iterdir()) == []
