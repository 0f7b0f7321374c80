"""`agenttrain plan` of GPUs beside the trainer's, and of parts that are not always there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_plan import MODELS, TOKEN_CACHE, parts, plan

from agenttrain import cli
from agenttrain.runs.memory_plan import GIB

SHORT = {**MODELS["0.6B"], "num_hidden_layers": 2}
LAYER = 2 * 1024 * (2048 + 1024) + 3 * 1024 * 3072 + 2304
"""Numbers of a layer: q and o, k and v, gate, up and down, norms."""
WEIGHTS = 151936 * 1024 + 2 * LAYER + 1024
CACHE = (4 * 3072 + 1) * 2 * TOKEN_CACHE * 2 // 28
"""Bytes of 4 rows of 3072 tokens, and one for padding, in two layers and bfloat16."""
RESERVE = 3 * GIB // 2
AHEAD = (
    *("model.dtype=bfloat16", "engine.max_rows=4", "engine.max_context=3072"),
    *("async_training.max_staleness=1", "weight_sync.mode=abort_resume"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Qwen3-0.6B with two of its layers."""
    (tmp_path / "config.json").write_text(json.dumps(SHORT))
    return tmp_path


def judged(tmp_path: Path, model: str) -> tuple[str, ...]:
    """A run whose judge has a model of its own, on servers."""
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps(MODELS[model]))
    return ("reward=[judge]", "reward.judge.url=role:judge", f"roles.judge.model={judge}")


@pytest.mark.slow
def test_rollouts_ahead_have_a_copy_of_the_policy_on_the_next_gpu(capsys, folder: Path) -> None:
    code, record = plan(capsys, folder, "--devices", "2", "--gpu-memory-gb", "80", *AHEAD)
    (copy,) = record["beside"]
    assert (code, record["devices"]) == (0, 1)
    assert {"keys and values", "engine's weights"}.isdisjoint(parts(record))
    assert (copy["key"], copy["count"], copy["gpus"]) == ("rollout process", 1, 1)
    assert copy["bytes"] == 2 * WEIGHTS + CACHE + RESERVE
    assert copy["fits"] and copy["computed_only"]
    # of 64 rollouts of this step and 64 of the next one, as many as engine.max_rows
    assert record["tokens"]["rollouts_in_flight"] == 4


@pytest.mark.slow
def test_a_copy_that_does_not_fit_names_fewer_rows(capsys, folder: Path) -> None:
    few = ("training.activation_checkpointing=all", "training.token_budget=4096")
    gpu = ("--devices", "2", "--gpu-memory-gb", "8", "training.logits_budget_mb=64", *few)
    many = [text for text in AHEAD if not text.startswith(("engine.max_rows", "async_training"))]
    many.append("async_training.max_staleness=7")  # 64 rollouts of each of eight steps
    # 2 GiB of weights and reserve leave room for 260 of 512 rows of 24 MiB
    code, record = plan(capsys, folder, *gpu, *many, "engine.max_rows=512")
    assert (code, record["fits"], record["beside"][0]["fits"]) == (1, False, False)
    assert record["beside"][0]["remedy"] == "engine.max_rows=256"
    code, record = plan(capsys, folder, *gpu, *many, "engine.max_rows=256")
    assert record["beside"][0]["fits"]


@pytest.mark.slow
def test_on_one_gpu_the_copy_is_beside_the_trainer(capsys, folder: Path) -> None:
    _, apart = plan(capsys, folder, "--devices", "2", *AHEAD)
    _, shared = plan(capsys, folder, "--devices", "1", *AHEAD)
    assert shared["beside"] == []
    added = 2 * WEIGHTS + CACHE + RESERVE
    assert shared["update_bytes"] - apart["update_bytes"] == added
    # in the host's memory: new weights, read whole, and a second Python
    moments = [one["moments"]["sync"]["host_node"] for one in (shared, apart)]
    assert moments[0] - moments[1] == 2 * WEIGHTS + 3 * GIB


SERVER = ("engine=vllm_server", "model.dtype=bfloat16", "--gpu-memory-gb", "80")


def test_on_one_gpu_a_server_takes_a_share_of_the_trainers(capsys, folder: Path) -> None:
    _, apart = plan(capsys, folder, "--devices", "2", *SERVER)
    code, shared = plan(capsys, folder, "--devices", "1", *SERVER)
    assert (code, shared["fits"], shared["servers"], shared["beside"]) == (0, True, None, [])
    # 0.35 of 80 GiB, all of which its weights, passes, graphs and cache fill; its own context
    added = 28 * GIB + RESERVE
    assert shared["update_bytes"] - apart["update_bytes"] == added
    got = parts(shared)
    # The embedding in bfloat16 three times, while it gets new weights.
    sync = [one["moments"]["sync"]["gpu"] for one in (shared, apart)]
    assert sync[0] - sync[1] == added + 3 * 151936 * 1024 * 2
    assert got["engine's weights"] == 2 * WEIGHTS
    names = ("engine's weights", "engine's passes", "keys and values", "engine's graphs")
    assert sum(got[name] for name in names) == 28 * GIB
    _, typed = plan(capsys, folder, "--devices", "1", *SERVER, "engine.memory_share=0.5")
    assert typed["update_bytes"] - apart["update_bytes"] == 40 * GIB + RESERVE
    # A cache of its own size leaves a part of the share, which has to be free at a start.
    small = (*SERVER, "engine.kv_cache_mb=1024", "engine.max_context=4096")
    _, cached = plan(capsys, folder, "--devices", "1", *small)
    assert parts(cached)["keys and values"] == GIB
    assert cached["update_bytes"] - apart["update_bytes"] == added


def test_a_server_that_takes_too_much_of_the_trainers_gpu(capsys, folder: Path) -> None:
    few = ("training.token_budget=4096", "training.logits_budget_mb=64", "eval.questions=0")
    card = ("engine=vllm_server", "model.dtype=bfloat16", *few, "--gpu-memory-gb", "24")
    code, record = plan(capsys, folder, "--devices", "1", *card, "engine.memory_share=0.8")
    assert (code, record["fits"]) == (1, False)
    assert "engine.memory_share=0.4" in [one["overrides"] for one in record["remedies"]]
    # 24 x 0.1 less 0.348 of weights, passes, and 1.5 of graphs and workspaces
    code, record = plan(capsys, folder, "--devices", "1", *card, "engine.memory_share=0.1")
    assert (code, record["engine"]["missing"] > 0) == (1, True)
    # 24 x 0.2 is enough, and of the values that are tried it leaves the trainer the most.
    assert "engine.memory_share=0.2" in [one["overrides"] for one in record["remedies"]]
    model = ("experiment=none", "model=folder", f"model.path={folder}")
    assert cli.main(["plan", *model, "--devices", "1", *card]) == 0
    assert "engine.memory_share=0.35 of the trainer's GPU, 8.4 GiB" in capsys.readouterr().out


@pytest.mark.slow
def test_on_cpus_one_copy_serves_all_processes(capsys, folder: Path) -> None:
    cpu = ("--cpu", "--host-memory-gb", "64", "--devices", "2", "distributed=ddp")
    _, same = plan(capsys, folder, *cpu, *AHEAD[:3])
    _, ahead = plan(capsys, folder, *cpu, *AHEAD)
    moments = [one["moments"]["update"]["host_node"] for one in (ahead, same)]
    # Two engines with a cache each, against a copy with one cache and a Python of its own.
    assert moments[0] - moments[1] == 2 * WEIGHTS + CACHE + GIB // 2 - 2 * CACHE


# GiB of bfloat16 weights, passes with 256 rows, graphs and workspaces, and what 0.9 x 80 leaves:
# 8B 15.256 + 0.638 + 1.5 leave 54.6 and a sequence of 40,960 tokens takes 5.6;
# 32B 61.024 + 0.806 + 1.5 leave 8.7 of the 10.0 that one takes. On two GPUs 72 - 32.4 and 5.0.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "fits", "remedy"),
    [
        ("8B", (), True, None),
        ("32B", (), False, "roles.judge.tensor_parallel_size=2"),
        ("32B", ("roles.judge.max_context=8192",), True, None),
        ("32B", ("roles.judge.tensor_parallel_size=2",), True, None),
        ("32B", ("roles.judge.memory_share=0.2",), False, "roles.judge.tensor_parallel_size=8"),
    ],
)
def test_servers_of_a_role(
    capsys, folder: Path, tmp_path: Path, model: str, settings: tuple, fits: bool, remedy: str
) -> None:
    gpus = ("--devices", "5", "--gpu-memory-gb", "80", "model.dtype=bfloat16")
    run = (*judged(tmp_path, model), "roles.judge.count=2", *settings)
    code, record = plan(capsys, folder, *gpus, "engine.max_rows=8", *run)
    (judge,) = record["beside"]
    assert (judge["key"], judge["count"], judge["fits"]) == ("roles.judge", 2, fits)
    assert (judge["remedy"], code, record["devices"]) == (remedy, 0 if fits else 1, 1)
    if fits:
        assert judge["bytes"] == int(80 * GIB * 0.9) + RESERVE


def test_the_words(capsys, folder: Path, tmp_path: Path) -> None:
    model = ("experiment=none", "model=folder", f"model.path={folder}", *AHEAD)
    gpus = ("--devices", "3", "--gpu-memory-gb", "80")
    assert cli.main(["plan", *gpus, *model, *judged(tmp_path, "32B")]) == 1
    told = capsys.readouterr().out
    assert "beside the trainer's GPUs (computed, never run on GPUs)" in told
    assert "rollout process       1.94  1 x 1 GPU: a copy of the policy and keys" in told
    assert "DOES NOT FIT: roles.judge; roles.judge.tensor_parallel_size=2" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "1"), "leave none to the trainer"),
        (("--devices", "2", "roles.judge.count=2"), "roles.judge.count=2 x"),
    ],
)
def test_too_few_gpus(capsys, folder: Path, tmp_path: Path, words: tuple, message: str) -> None:
    model = ("experiment=none", "model=folder", f"model.path={folder}")
    assert cli.main(["plan", *model, *judged(tmp_path, "8B"), *words]) == 2
    assert message in capsys.readouterr().err


# MiB of a process with bfloat16 weights W = 356.76: moments and float32 copies 6 W (and 88 bytes of
# step counts), gradients and those of a microbatch 3 W, of 8 processes on two nodes of four.
W = 2 * WEIGHTS
OF_EIGHT = ("--devices", "8", "distributed=fsdp2", "distributed.processes=4", "distributed.nodes=2")
NODES = (*OF_EIGHT, "distributed.rendezvous=first:29500", "model.dtype=bfloat16")


@pytest.mark.parametrize(
    ("settings", "shared_by"), [((), 8), (("distributed.shard_within=node",), 4)]
)
def test_the_processes_of_a_node_share_a_whole_copy(
    capsys, folder: Path, settings: tuple, shared_by: int
) -> None:
    _, record = plan(capsys, folder, *NODES, "engine.max_rows=1", *settings)
    got = parts(record)
    assert got["weights"] == W // shared_by
    assert got["gradients"] == 3 * W // shared_by
    assert got["optimizer"] // 100 == 6 * W // shared_by // 100
    # A checkpoint: one copy of everything, which the four processes of a node write.
    written = {name: got[name] for name in ("written weights", "written state")}
    assert written["written weights"] == W // shared_by
    assert written["written state"] // 100 == 6 * W // shared_by // 100
    # The start: rows of one weight after the other, the largest of them the embeddings.
    assert got["loading"] == 151936 * 1024 * 2


def test_an_optimizer_that_is_in_host_memory_while_rollouts_are_made(capsys, folder: Path) -> None:
    _, stays = plan(capsys, folder, *NODES, "engine.max_rows=1")
    moved = "training.offload_during_rollouts=true"
    _, goes = plan(capsys, folder, *NODES, "engine.max_rows=1", moved)
    optimizer = parts(stays)["optimizer"]
    assert stays["rollouts_bytes"] - goes["rollouts_bytes"] == optimizer
    assert stays["update_bytes"] == goes["update_bytes"]
    hosts = [one["moments"]["rollouts"]["host_node"] for one in (goes, stays)]
    assert hosts[0] - hosts[1] == 4 * optimizer


@pytest.mark.slow
def test_a_checkpoint_in_background_keeps_its_copy_while_training_goes_on(
    capsys, folder: Path
) -> None:
    _, at_once = plan(capsys, folder, *NODES, "engine.max_rows=1")
    beside = "checkpoint.in_background=true"
    _, later = plan(capsys, folder, *NODES, "engine.max_rows=1", beside)
    copies = sum(parts(later)[name] for name in ("written weights", "written state"))
    for when in ("rollouts", "update", "sync"):
        hosts = [one["moments"][when]["host_node"] for one in (later, at_once)]
        assert hosts[0] - hosts[1] == 4 * copies, when
    hosts = [one["moments"]["checkpoint"]["host_node"] for one in (later, at_once)]
    assert hosts[0] == hosts[1]
