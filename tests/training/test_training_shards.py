"""A policy that is spread over processes: its start, its checkpoints, its mesh; real processes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from process_shards import STARTS
from safetensors.torch import load_file, save_file
from torchrun import torchrun
from training_cases import policy, random_groups
from transformers import AutoModelForCausalLM

from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.checkpoint_files import CheckpointError, seal
from agenttrain.training.sharding import RowRange, TensorParts, rows_of_part
from agenttrain.training.sliced_weights import (
    SlicedWeights,
    WrongWeights,
    empty_model,
    why_not_sliced,
)
from agenttrain.training.tensor_files import (
    HASHED_BESIDE,
    BadTensorFile,
    HashedFile,
    open_hashed,
    read_header,
    read_rows,
    write_tensors,
)


@pytest.mark.long
def test_four_processes_start_with_their_rows_of_the_weights(tmp_path: Path) -> None:
    told = torchrun("process_shards.py", str(tmp_path), processes=4)
    assert [one["differences"] for one in told.values()] == [{name: [] for name in STARTS}] * 4
    error = (
        f"rank 3: {tmp_path}/copied/model.safetensors: its copy of model.norm.weight differs from "
        "that of rank 0. Copy the model to every machine again, or give all of them one shared "
        "folder"
    )
    assert [told[rank]["copies"].removeprefix("rank 0: WrongWeights: ") for rank in range(4)] == [
        error
    ] * 4


@pytest.mark.long
def test_four_three_and_two_processes_read_what_four_wrote_to_the_bit(tmp_path: Path) -> None:
    saved = torchrun("process_saves.py", "save", str(tmp_path), processes=4)
    assert all(one == saved[0] for one in saved.values())
    path = tmp_path / "adamw" / "latest"
    assert sorted(file.name for file in path.glob("policy-*.pt")) == [
        f"policy-{rank}.pt" for rank in range(4)
    ]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    # Two nodes of two: the first one's processes wrote all.
    nodes = tmp_path / "nodes" / "latest"
    assert len(list(nodes.glob("policy-*.pt"))) == 2
    for processes in (4, 3, 2):
        loaded = torchrun("process_saves.py", "load", str(tmp_path), processes=processes)
        assert all(one == saved[0] for one in loaded.values()), processes


@pytest.mark.long
def test_two_nodes_of_two_give_the_numbers_of_four_processes() -> None:
    told = torchrun("process_saves.py", "hsdp", processes=4)
    one, two = told[0]["None"], told[0]["2"]
    assert two["metrics"] == [pytest.approx(m, rel=1e-4, nan_ok=True) for m in one["metrics"]]
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-5)
    # A node's two processes hold what four held.
    held = [[told[rank][name]["held"] for rank in range(4)] for name in ("None", "2")]
    assert sum(held[1]) == 2 * sum(held[0])


def files(tmp_path: Path) -> Path:
    """A folder with a tiny model."""
    tiny.model().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Other tensors under these names, __ for a dot; None: without it."""
    state = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        state.pop(name.replace("__", "."))
        if tensor is not None:
            state[name.replace("__", ".")] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def sliced(folder: Path, rank: int = 2) -> SlicedWeights:
    return SlicedWeights(empty_model(folder, torch.float32), folder, rank)


def test_files_that_miss_a_weight(tmp_path: Path) -> None:
    folder = files(tmp_path)
    changed(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(WrongWeights) as raised:
        sliced(folder)
    assert str(raised.value) == (
        f"rank 2: {folder}: none of its 1 safetensors files holds "
        "model.layers.1.mlp.up_proj.weight, a weight of Qwen3ForCausalLM with shape [64, 32]. Is "
        "config.json that of these files? Copy the whole model again"
    )


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    folder = files(tmp_path)
    changed(folder, model__norm__weight=torch.ones(31))
    with pytest.raises(WrongWeights) as raised:
        sliced(folder)
    assert str(raised.value) == (
        f"rank 2: {folder}/model.safetensors: model.norm.weight has shape [31], and by config.json "
        "model.norm.weight has [32]. Copy config.json and weights of the same model"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_weight_of_another_number_format(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = files(tmp_path)
    changed(folder, model__norm__weight=torch.ones(32).to(dtype))
    name = {torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}[dtype]
    with pytest.raises(WrongWeights) as raised:
        sliced(folder)
    assert str(raised.value) == (
        f"rank 2: {folder}/model.safetensors: model.norm.weight has the format {name}, and "
        "config.json names no quantization that would explain it. Give model.path a folder of "
        "float32, float16 or bfloat16 weights"
    )


def test_a_file_that_the_index_names_and_the_folder_lacks(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / gone).unlink()
    with pytest.raises(WrongWeights) as raised:
        sliced(tmp_path)
    assert str(raised.value) == (
        f"rank 2: {tmp_path}/model.safetensors.index.json: names {gone}, which the folder lacks; "
        "copy it too"
    )


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    folder = files(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        WrongWeights, match=r"rank 2: .*model\.safetensors: is cut before the end of"
    ):
        sliced(folder)


def test_quantized_weights_and_pickles_are_loaded_whole(tmp_path: Path) -> None:
    folder = files(tmp_path)
    assert why_not_sliced(folder) is None
    config = json.loads((folder / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(quantized))
    assert why_not_sliced(folder) == (
        "its weights are quantized, and only whole ones can be dequantized"
    )
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert why_not_sliced(folder) == "its weights are not in safetensors files"


def test_rows_of_parts() -> None:
    # 5 rows in 3 parts: 2, 2, 1; 2 rows in 4 parts: 1, 1, 0, 0
    assert [tuple(rows_of_part(5, i, 3)) for i in range(3)] == [(0, 2), (2, 4), (4, 5)]
    assert [tuple(rows_of_part(2, i, 4)) for i in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_rows_that_lie_in_several_parts() -> None:
    rows = torch.arange(10.0).reshape(5, 2)
    parts = TensorParts([(0, rows[:2]), (2, rows[2:4]), (4, rows[4:])], rows.shape, "policy-0.pt")
    assert parts.rows(RowRange(1, 5)).tolist() == [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert parts.rows(RowRange(5, 5)).shape == (0, 2)
    own = TensorParts([(2, rows[2:4])], rows.shape, "policy-1.pt: state.moment")
    assert own.rows(RowRange(2, 4)).tolist() == [[4, 5], [6, 7]]
    with pytest.raises(CheckpointError) as raised:
        own.rows(RowRange(3, 5))
    assert str(raised.value) == (
        "policy-1.pt: state.moment, of shape [5, 2]: no file holds its rows 4 to 5. The files are "
        "not of one checkpoint; resume from another"
    )


TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "a": torch.arange(12.0).reshape(4, 3),
    "number": torch.tensor(7.0),
    "none": torch.zeros(0, 4),
    "i": torch.arange(3),
}


def test_a_file_is_the_librarys_to_the_byte_and_hashed(tmp_path: Path) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    digest = write_tensors(own, TENSORS, {"format": "pt"})
    save_file(TENSORS, theirs, metadata={"format": "pt"})
    assert own.read_bytes() == theirs.read_bytes()
    with open_hashed(tmp_path / "again") as file:
        file.write(own.read_bytes())
    assert file.digest == digest


def test_a_write_that_fails_waits_for_the_hash_of_its_buffer() -> None:
    """torch frees the buffer as soon as the error is out."""

    class FullDisk(BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = bytes(HASHED_BESIDE)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(time.sleep, 0.2)  # the hash has to wait for its turn
        file = HashedFile(FullDisk(), beside)
        with pytest.raises(OSError, match="No space left"):
            file.write(data)
        assert file.digest == hashlib.sha256(data).hexdigest()


def test_rows_are_read_in_the_format_that_is_wanted(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "t")
    stored = read_header(tmp_path / "t")
    into = torch.empty(2, 3)
    read_rows(stored["a"], 1, into)
    assert into.tolist() == [[3, 4, 5], [6, 7, 8]]
    wider = torch.empty(1, 2)
    read_rows(stored["b"], 2, wider)
    assert wider.tolist() == [[4, 5]]
    number = torch.empty(())
    read_rows(stored["number"], 0, number)
    assert number == 7


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadTensorFile, match="is no safetensors file"):
        read_header(tmp_path / "t")


def test_a_checkpoint_whose_parts_do_not_hold_all_rows(tmp_path: Path) -> None:
    """Two of the three parts that three processes wrote, under a manifest that is right."""
    trained = policy()
    train_policy(trained, random_groups(0))
    saver = Checkpoints(tmp_path, tokenizer=tiny.tokenizer(), keep=1)
    path = saver.save(trained, step=1)
    state = torch.load(path / "policy.pt")
    (path / "policy.pt").unlink()
    moments = state["optimizer"]["state"][0]
    for index in range(2):
        for name in ("exp_avg", "exp_avg_sq"):
            full = moments[name]
            rows = rows_of_part(len(full), index, 3)
            part = {"part": full[rows.start : rows.stop].clone(), "shape": list(full.shape)}
            state["optimizer"]["state"][0] = {**state["optimizer"]["state"][0], name: part}
        torch.save(state, path / f"policy-{index}.pt")
    (path / "manifest.json").unlink()
    seal(path)
    with pytest.raises(CheckpointError) as raised:
        saver.load_latest(policy())
    rows = rows_of_part(len(moments["exp_avg"]), 2, 3)
    assert str(raised.value) == (
        f"{path}/policy-0.pt to policy-1.pt: state.optimizer.state.0.exp_avg, of shape "
        f"{list(moments['exp_avg'].shape)}: no file holds its rows {rows.start} to {rows.stop}. "
        "The files are not of one checkpoint; resume from another"
    )
