"""`agenttrain plan`: what fits, from a folder that holds a config.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agenttrain import cli
from agenttrain.plan.command import parse
from agenttrain.plan.estimate import GIB

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
# vocabulary 151936 x 1024; per layer q and o 2 x 1024 x 2048, k and v 2 x 1024 x 1024,
# gate, up, down 3 x 1024 x 3072, norms 2 x 1024 + 2 x 128; the last norm 1024
WEIGHTS = 151936 * 1024 + 28 * (2 * 1024 * (2048 + 1024) + 3 * 1024 * 3072 + 2304) + 1024
TOKEN_CACHE = 28 * 2 * 8 * 128
"""Numbers: layers, keys and values, heads, their size."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights and without a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    return tmp_path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The same with two of its layers."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "num_hidden_layers": 2}))
    return tmp_path


def plan(capsys, folder: Path, *arguments: str) -> tuple[int, dict]:
    model = ("experiment=none", "model=folder", f"model.path={folder}")
    code = cli.main(["plan", "--json", *model, *arguments])
    return code, json.loads(capsys.readouterr().out)


def parts(found: dict) -> dict[str, int]:
    return {part["name"]: part["bytes"] for part in found["parts"]}


def test_the_parts_of_a_bfloat16_run(capsys, folder):
    settings = ("model.dtype=bfloat16", "engine.max_rows=4", "engine.max_context=3072")
    code, found = plan(capsys, folder, *settings, "algorithm.beta=0.1")
    assert (code, found["fits"], found["gpu_bytes"]) == (0, None, None)
    assert WEIGHTS == 596_049_920
    got = parts(found)
    assert got["weights"] == got["reference"] == 2 * WEIGHTS
    # float32 copies, two moments of 4 bytes, and a count of steps for each of 310 tensors
    assert got["optimizer"] == 12 * WEIGHTS + 4 * (28 * 11 + 2)
    # summed in float32, beside those of a microbatch
    assert got["gradients"] == (4 + 2) * WEIGHTS
    # 4 rows of 3072 tokens and one place for padding
    assert got["keys and values"] == (4 * 3072 + 1) * 2 * TOKEN_CACHE
    # logits of 16384 tokens would be 9.3 GiB: the budget of 1 GiB is used up
    assert got["head"] > GIB + 4 * 151936 * 1024
    assert found["tokens"]["microbatch"] == 16384


def test_what_fsdp2_divides_and_ddp_does_not(capsys, short):
    _, one = plan(capsys, short)
    _, four = plan(capsys, short, "distributed=fsdp2", "distributed.processes=4")
    _, ddp = plan(capsys, short, "--devices", "4", "distributed=ddp")
    for name in ("weights", "optimizer", "gradients"):
        assert parts(four)[name] == parts(one)[name] // 4
        assert parts(ddp)[name] == parts(one)[name]
    assert parts(ddp)["buckets"] == parts(one)["gradients"]
    assert parts(four)["engine's weights"] == parts(one)["weights"]
    # 200 sampled rollouts of an evaluation, before 200 greedy ones, are 50 for each of 4
    assert [p["tokens"]["rollouts_in_flight"] for p in (one, four, ddp)] == [128, 50, 50]


def test_the_cache_holds_what_is_in_flight_and_an_evaluation_that_is_longer(capsys, short):
    rows = ("model.dtype=bfloat16", "engine.max_rows=4", "engine.max_context=4096")
    _, as_trained = plan(capsys, short, *rows)
    longer = ("eval.max_completion_tokens=8192", "rollout.max_completion_tokens=1024")
    _, evaluated = plan(capsys, short, *rows, *longer)
    _, fewer = plan(capsys, short, *rows, "rollout.deterministic=false", "rollout.concurrency=3")
    _, unused = plan(capsys, short, *rows, *longer, "eval.questions=0")
    cache = TOKEN_CACHE // 28 * 2 * 2  # bytes of a token in two layers
    # prompts have 1,024 tokens and rows the engine's context of 4,096, which rows double up to
    assert parts(as_trained)["keys and values"] == (4 * 4096 + 1) * cache
    assert parts(evaluated)["keys and values"] == (4 * 4096 + 1) * cache
    assert parts(unused)["keys and values"] == (4 * 2048 + 1) * cache
    assert parts(fewer)["keys and values"] == (3 * 4096 + 1) * cache
    assert evaluated["tokens"]["rollout"] == unused["tokens"]["rollout"] == 2048


def test_weights_in_the_hosts_memory_are_not_counted(capsys, short):
    fsdp2 = ("--devices", "2", "distributed=fsdp2")
    _, there = plan(capsys, short, *fsdp2)
    _, away = plan(capsys, short, *fsdp2, "distributed.cpu_offload=true")
    moved = sum(parts(there)[name] for name in ("weights", "optimizer", "gradients"))
    assert there["update_bytes"] - away["update_bytes"] == moved


def test_a_run_that_does_not_fit_names_overrides_with_which_it_does(capsys, short):
    gpu = ("--gpu-memory-gb", "12", "model.dtype=bfloat16")
    code, found = plan(capsys, short, *gpu)
    assert code == 1 and found["fits"] is False and found["peak_bytes"] > 12 * GIB
    assert [r["overrides"].split("=")[0] for r in found["remedies"]] == [
        "training.gradient_checkpointing",
        "training.token_budget",
        "engine.max_rows",
        "distributed",
    ]
    for remedy in found["remedies"]:
        assert remedy["peak_bytes"] <= 12 * GIB
        code, again = plan(capsys, short, *gpu, *remedy["overrides"].split())
        assert (code, again["peak_bytes"]) == (0, remedy["peak_bytes"]), remedy


def test_more_nodes_are_named_as_they_can_be_typed(capsys, short):
    run = (
        *("--gpu-memory-gb", "7.5", "distributed=fsdp2", "distributed.processes=8"),
        *("training.gradient_checkpointing=true", "training.logits_budget_mb=64"),
    )
    code, found = plan(capsys, short, *run)
    assert code == 1
    (nodes,) = [
        r["overrides"] for r in found["remedies"] if "distributed.nodes=2" in r["overrides"]
    ]
    code, again = plan(capsys, short, *run, *nodes.split())
    assert (code, again["devices"]) == (0, 16)


def test_several_settings_together_where_no_one_is_enough(capsys, short):
    code, found = plan(capsys, short, "--gpu-memory-gb", "7.5")
    assert code == 1
    first = found["remedies"][0]["overrides"]
    keys = [word.split("=")[0] for word in first.split()]
    assert keys[0] == "training.gradient_checkpointing" and "engine.max_rows" in keys
    code, again = plan(capsys, short, "--gpu-memory-gb", "7.5", *first.split())
    assert code == 0 and again["fits"] is True


def test_vllm_takes_its_share_and_says_whom_it_holds(capsys, short):
    settings = ("--gpu-memory-gb", "8", "engine=vllm", "model.dtype=bfloat16")
    _, found = plan(capsys, short, *settings)
    got = parts(found)
    assert got["engine's weights"] + got["keys and values"] == 4 * GIB
    # (4 GiB - 374090752) / (3072 tokens x 8192 bytes) = 155.8
    (why,) = [p["why"] for p in found["parts"] if p["name"] == "keys and values"]
    assert "holds 155 of 200 rollouts of 3,072 tokens" in why
    # asleep, its memory is the update's
    _, asleep = plan(capsys, short, *settings, "engine.vllm.sleep=true")
    assert found["update_bytes"] - asleep["update_bytes"] == 4 * GIB


def test_the_bundled_model_in_words(capsys):
    assert cli.main(["plan", "--gpu-memory-gb", "8"]) == 0
    told = capsys.readouterr().out
    assert "model       bundled:shop: Qwen3ForCausalLM, 650,176 weights" in told
    assert "rollouts    128 per step, 10,240 in all" in told
    assert "fits: 6." in told
    assert cli.main(["plan", "--cpu"]) == 0
    assert "whether it fits: say how large a GPU is" in capsys.readouterr().out


def test_nothing_is_known_that_helps(capsys, short):
    lora = ("model.lora.rank=8", "model.dtype=bfloat16")
    code = cli.main(
        [
            "plan",
            "--gpu-memory-gb",
            "1",
            "engine=vllm",
            "model=folder",
            f"model.path={short}",
            *lora,
        ]
    )
    assert code == 1
    assert "nothing known here makes it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--devices", "0"], "--devices 0: must be more than 0"),
        (["--gpu-memory-gb", "nan"], "--gpu-memory-gb nan: must be more than 0"),
        (["--devices", "two"], "plan: argument --devices: invalid int value: 'two'"),
        (["--devices", "2"], "--devices 2: distributed=single is one process; add distributed=ddp"),
        (
            ["--devices", "2", "distributed=ddp", "distributed.processes=4"],
            "--devices 2: distributed.processes=4 and distributed.nodes=1 are 4 of them",
        ),
        (["-m", "seed=1,2"], "plan -m: plans one run"),
        (["model.path=nowhere"], "model.path=nowhere: there is no config.json in that folder"),
    ],
)
def test_what_cannot_be_planned(capsys, arguments, told):
    assert cli.main(["plan", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_model_that_is_not_known(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of"}')
    assert cli.main(["plan", "model=folder", f"model.path={tmp_path}"]) == 2
    assert "cannot be planned from its config.json" in capsys.readouterr().err


def test_a_run_still_needs_weights(capsys, folder):
    assert cli.main(["model=folder", f"model.path={folder}"]) == 2
    assert "there is no file of weights" in capsys.readouterr().err


def test_options_may_stand_anywhere():
    options, rest = parse(["seed=1", "--devices", "2", "--cpu", "engine=vllm"])
    assert (options.devices, options.machine.kind, rest) == (2, "cpu", ["seed=1", "engine=vllm"])
