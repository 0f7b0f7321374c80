"""`agenttrain plan`: what fits, from a folder that holds a config.json and nothing else."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path

import psutil
import pytest
from transformers import AutoConfig

from agenttrain import cli
from agenttrain.commands.plan.command import announced_if_slow, plan_options
from agenttrain.commands.plan.remedies import Planner
from agenttrain.commands.verbs import DECLARED
from agenttrain.engines.config import EngineDtype
from agenttrain.engines.memory import When
from agenttrain.runs.memory_plan import GIB, PlannedHardware, Sizes, estimate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import LEVELS, ActivationCheckpointing
from agenttrain.training.footprint import Activations

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
KEEP_ALL = "training.activation_checkpointing=none"
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


@pytest.mark.slow
def test_the_parts_of_a_bfloat16_run(capsys, folder):
    settings = ("model.dtype=bfloat16", "engine.max_rows=4", "engine.max_context=3072")
    code, found = plan(capsys, folder, *settings, "algorithm.kl.beta=0.1")
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


@pytest.mark.slow
def test_an_evaluation_of_one_source_is_counted(capsys, short):
    """Its rollouts are longer than those of the training."""
    mix = ("data=mix", "+data@data.sources.a=shop", "+data@data.sources.b=shop")
    lengths = ("rollout.max_completion_tokens=1000", "eval.max_completion_tokens=9000")
    own = "data.sources.b.eval.questions=3"
    caches = [
        parts(plan(capsys, short, *mix, *lengths, *questions)[1])["keys and values"]
        for questions in (["eval.questions=0"], ["eval.questions=0", own], ["eval.questions=3"])
    ]
    assert caches[0] < caches[1] == caches[2]


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "phimoe", "qwen2_moe", "qwen3_moe"])
def test_experts_in_float32(capsys, tmp_path: Path, family: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    AutoConfig.for_model(family, **sizes, **heads).save_pretrained(tmp_path)
    code, found = plan(capsys, tmp_path, "--gpu-memory-gb", "80", "model.dtype=float32")
    assert code == 0
    assert parts(found)["activations"] > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_fsdp2_divides_a_base_in_4_bits_and_not_its_scales(capsys, short):
    nf4 = ("model.quantization=nf4", "model.lora.rank=8", "model.dtype=bfloat16")
    _, one = plan(capsys, short, *nf4)
    _, four = plan(capsys, short, *nf4, "distributed=fsdp2", "distributed.processes=4")
    # In each of 2 layers q and o have 1024 x 2048 numbers, k and v 1024 x 1024, and three others
    # 1024 x 3072. 64 numbers share a scale of 1 byte, and 256 scales one of 4 bytes. Each of the 14
    # weights has tables of 16 and of 256 numbers, and a mean.
    numbers = 2 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    scales = numbers // 64 + 4 * numbers // 64 // 256 + 14 * 4 * (16 + 256 + 1)
    divided = parts(one)["weights"] - scales
    assert parts(four)["weights"] == divided // 4 + scales
    assert parts(four)["engine's weights"] == parts(one)["weights"]
    assert parts(four)["gathered"] == divided  # two layers, which are all, and embeddings


def test_a_teacher_is_counted_where_it_is_larger_than_the_policy(capsys, short, tmp_path):
    larger = tmp_path / "teacher"
    larger.mkdir()
    sizes = {"num_hidden_layers": 4, "intermediate_size": 6144}
    (larger / "config.json").write_text(json.dumps({**QWEN3_06B, **sizes}))
    fsdp2 = ("--devices", "2", "distributed=fsdp2", "model.dtype=bfloat16")
    taught = (f"algorithm.teacher.path={larger}", "algorithm.teacher.dtype=bfloat16")
    _, alone = plan(capsys, short, *fsdp2)
    _, both = plan(capsys, short, *fsdp2, *taught)
    # a layer: q and o, k and v, gate, up and down, norms; beside them embeddings and the last norm
    layer = 2 * 1024 * (2048 + 1024) + 3 * 1024 * 6144 + 2304
    outside = 151936 * 1024 + 1024
    got = parts(both)
    assert got["teacher"] == 2 * (4 * layer + outside) // 2
    assert got["loading"] == 2 * 151936 * 1024  # its largest weight, of which rows are read
    assert got["gathered"] == 2 * (2 * layer + outside)
    assert got["gathered"] > parts(alone)["gathered"] > 0


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ((), "model.dtype=float32 with training.mixed_precision=no"),
        (("engine=vllm", "engine.dtype=float32", "model.dtype=bfloat16"), "engine.dtype=float32"),
        (("training.mixed_precision=bf16",), None),
        (("--cpu",), None),
    ],
)
def test_float32_on_a_gpu_is_named(capsys, short, settings, named):
    model = ("experiment=none", "model=folder", f"model.path={short}")
    cli.main(["plan", *model, *settings])
    notes = [line for line in capsys.readouterr().out.splitlines() if "on a GPU" in line]
    assert len(notes) == bool(named)
    assert named is None or named in notes[0]


def test_a_run_that_does_not_fit_names_overrides_with_which_it_does(capsys, short):
    gpu = ("--gpu-memory-gb", "12", "model.dtype=bfloat16", KEEP_ALL)
    code, found = plan(capsys, short, *gpu)
    assert code == 1 and found["fits"] is False and found["peak_bytes"] > 12 * GIB
    assert [r["overrides"].split("=")[0] for r in found["remedies"]] == [
        "training.activation_checkpointing",
        "training.token_budget",
        "engine.max_rows",
        "distributed",
    ]
    for remedy in found["remedies"]:
        assert remedy["peak_bytes"] <= 12 * GIB
        code, again = plan(capsys, short, *gpu, *remedy["overrides"].split())
        assert (code, again["peak_bytes"]) == (0, remedy["peak_bytes"]), remedy


def test_auto_is_the_first_level_with_which_an_update_fits(short):
    run = ("experiment=none", "model=folder", f"model.path={short}", "model.dtype=bfloat16")
    with hydra_session(Source()):
        settings = (*run, "engine.max_rows=1", "training.logits_budget_mb=64")
        config = compose_run(open_keys(settings), Source()).config
    sizes = Sizes(config.model)

    def update(setting: ActivationCheckpointing, memory: int | None) -> tuple[str, int]:
        """Level and bytes of an update, with a setting and a GPU's memory."""
        config.training.activation_checkpointing = setting
        found = estimate(config, sizes, PlannedHardware(memory=memory), 1024)
        return found.level, found.at(When.update)

    auto = ActivationCheckpointing.auto
    needed = {level: update(level, None)[1] for level in LEVELS}
    none, blocks, last = LEVELS
    assert needed[none] > needed[blocks] > needed[last]
    assert update(auto, None) == (none, needed[none])  # nothing is known to be too large
    for level, next_level in ((none, blocks), (blocks, last), (last, last)):
        assert update(auto, needed[level]) == (level, needed[level])
        assert update(auto, needed[level] - 1) == (next_level, needed[next_level])
    # A value that was given is not changed.
    assert update(none, needed[last]) == (none, needed[none])


@pytest.mark.slow
def test_a_given_level_is_shown_and_the_remedy_names_the_mildest(capsys, short):
    key = "training.activation_checkpointing"
    run = ("model.dtype=bfloat16", "engine.max_rows=1", "training.logits_budget_mb=64")
    _, blocks = plan(capsys, short, "--gpu-memory-gb", "80", *run, f"{key}=blocks")
    gib = repr((blocks["peak_bytes"] + 1) / GIB)
    code, found = plan(capsys, short, "--gpu-memory-gb", gib, *run, f"{key}=none")
    assert (code, found["activation_checkpointing"]) == (1, "none")
    assert f"{key}=blocks" in [remedy["overrides"] for remedy in found["remedies"]]


@pytest.mark.slow
def test_weights_that_autocast_holds_are_counted(capsys, short):
    """Of 2 layers: q and o, k and v, and the MLP with gate, up and down; 2 bytes of a number."""
    attention, mlp = 2 * 1024 * (2048 + 1024), 3 * 1024 * 3072
    run = ("engine.max_rows=1", "training.mixed_precision=bf16")
    casts = {}
    for level in ("none", "blocks", "all"):
        words = (*run, f"training.activation_checkpointing={level}")
        casts[level] = parts(plan(capsys, short, *words)[1]).get("casts")
    assert casts == {"none": None, "blocks": 2 * 2 * mlp, "all": 2 * 2 * (attention + mlp)}
    words = (*run, "training.activation_checkpointing=all", "distributed=fsdp2", "--devices", "2")
    assert "casts" not in parts(plan(capsys, short, *words)[1])


@pytest.mark.slow
def test_more_nodes_are_named_as_they_can_be_typed(capsys, short):
    run = (
        *("--gpu-memory-gb", "7.5", "distributed=fsdp2", "distributed.processes=8"),
        *("training.activation_checkpointing=all", "training.logits_budget_mb=64"),
    )
    code, found = plan(capsys, short, *run)
    assert code == 1
    (nodes,) = [
        r["overrides"] for r in found["remedies"] if "distributed.nodes=2" in r["overrides"]
    ]
    code, again = plan(capsys, short, *run, *nodes.split())
    assert (code, again["devices"]) == (0, 16)


@pytest.mark.slow
def test_a_rollout_too_long_for_a_gpu_is_computed_by_several(capsys, short):
    """40,024 tokens of a rollout, of which a layer and its gradients keep 3.3 GiB."""
    run = (
        *("--gpu-memory-gb", "5.5", "--devices", "4", "distributed=fsdp2", "eval.questions=0"),
        *("model.dtype=bfloat16", "training.activation_checkpointing=all", "engine.max_rows=1"),
        *("rollout.max_completion_tokens=39000", "training.token_budget=8192"),
        "training.logits_budget_mb=64",
    )
    code, found = plan(capsys, short, *run)
    assert code == 1
    overrides = [remedy["overrides"] for remedy in found["remedies"]]
    assert overrides == [
        "distributed.context_parallel=2",
        "distributed=fsdp2 distributed.processes=8 distributed.context_parallel=8",
    ]
    code, again = plan(capsys, short, *run, overrides[0])
    assert code == 0
    layer, half = parts(found)["a layer"], parts(again)["a layer"]
    assert half == pytest.approx(layer / 2, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "proposed"),
    [
        ("training.compile=false", {"distributed", "distributed.context_parallel"}),
        ("training.compile=true", set()),
        ("model.vision=trained", set()),
    ],
)
def test_a_run_that_several_processes_cannot_compute_gets_no_such_remedy(
    capsys, short, setting: str, proposed: set[str]
):
    run = (
        *("--gpu-memory-gb", "5.5", "distributed=ddp", "distributed.processes=2"),
        *("eval.questions=0", "model.dtype=bfloat16", "training.activation_checkpointing=all"),
        *("rollout.max_completion_tokens=39000", "training.token_budget=8192"),
        *("training.logits_budget_mb=64", "engine.max_rows=1"),
    )
    code, found = plan(capsys, short, *run, setting)
    assert code == 1
    words = {word for remedy in found["remedies"] for word in remedy["overrides"].split()}
    divided = {"distributed", "distributed.context_parallel"}
    assert divided & {word.split("=")[0] for word in words} == proposed


@pytest.mark.slow
def test_several_settings_together_where_no_one_is_enough(capsys, short):
    gpu = ("--gpu-memory-gb", "7.5", KEEP_ALL)
    code, found = plan(capsys, short, *gpu)
    assert code == 1
    first = found["remedies"][0]["overrides"]
    keys = [word.split("=")[0] for word in first.split()]
    assert keys[0] == "training.activation_checkpointing" and "engine.max_rows" in keys
    code, again = plan(capsys, short, *gpu, *first.split())
    assert code == 0 and again["fits"] is True


@pytest.mark.slow
def test_vllm_takes_its_share_and_says_whom_it_holds(capsys, short):
    settings = ("--gpu-memory-gb", "8", "engine=vllm", "model.dtype=bfloat16")
    _, found = plan(capsys, short, *settings)
    got = parts(found)
    # 2048 tokens x (4 x 1024 + 3 x 3072) x 2 bytes, and 256 rows of 151936 logits x 3 x 4 bytes
    assert got["engine's passes"] == 2048 * (4 * 1024 + 3 * 3072) * 2 + 256 * 151936 * 12
    assert got["engine's graphs"] == 1.5 * GIB
    names = ("engine's weights", "engine's passes", "engine's graphs", "keys and values")
    assert sum(got[name] for name in names) == 4 * GIB
    # (4 GiB - 374090752 - 521273344 - 1.5 GiB) / (3072 tokens x 8192 bytes) = 71.1
    (why,) = [p["why"] for p in found["parts"] if p["name"] == "keys and values"]
    assert "holds 71 of 200 rollouts of 3,072 tokens" in why
    # asleep, its memory is the update's, but for CUDA graphs and workspaces
    _, asleep = plan(capsys, short, *settings, "engine.sleep=true")
    assert found["update_bytes"] - asleep["update_bytes"] == 2.5 * GIB
    # with a cache of its own size, what vLLM takes besides comes on top
    _, sized = plan(capsys, short, *settings, "engine.kv_cache_mb=512")
    assert sized["rollouts_bytes"] - found["rollouts_bytes"] == GIB // 2 - got["keys and values"]


@pytest.mark.slow
def test_the_bundled_model_in_words(capsys):
    assert cli.main(["plan", "--gpu-memory-gb", "8"]) == 0
    told = capsys.readouterr().out
    assert "model       bundled:shop: Qwen3ForCausalLM, 650,176 weights" in told
    assert "rollouts    128 per step, 3,328 in all" in told
    assert "fits: 6." in told
    assert "the host's memory is not known; give its size: --host-memory-gb 512" in told
    assert cli.main(["plan"]) == 0
    line = "whether it fits depends on the GPUs; give their size: --gpu-memory-gb 80"
    assert line in capsys.readouterr().out


def test_without_a_gpu_the_machines_memory_is_what_counts(capsys, short):
    here = psutil.virtual_memory().total
    assert 0 < plan_options(DECLARED["plan"].parse(["--cpu"])[0]).machine.memory <= here
    small = (
        *("--cpu", "--host-memory-gb", "4", "engine.max_rows=1", "model.dtype=bfloat16"),
        KEEP_ALL,
    )
    code, one = plan(capsys, short, *small)
    moments = one["moments"]
    assert (code, one["gpu_bytes"], one["peak_bytes"]) == (1, 4 * GIB, moments["update"]["gpu"])
    assert moments["update"]["gpu"] == moments["update"]["host_node"] > 4 * GIB
    # two processes of one machine
    _, two = plan(capsys, short, *small, "distributed=ddp", "distributed.processes=2")
    for when, bytes_ in two["moments"].items():
        assert bytes_["host_node"] == 2 * bytes_["gpu"], when
    assert cli.main(["plan", "--cpu", "--host-memory-gb", "0.1", KEEP_ALL]) == 1
    assert "DOES NOT FIT: 0.7" in capsys.readouterr().out


class Untraced(Sizes):
    """Without what a forward pass keeps, which is of no account to an engine."""

    def activations(
        self, tokens: int, mixed_precision: str, level: ActivationCheckpointing
    ) -> Activations:
        """Nothing."""
        return Activations(kept=0, recomputed=0)


# Sizes: Qwen3's config.json. GiB of weights in bfloat16, of vLLM's passes (2048 tokens x (4 hidden
# + 3 inner) x 2 bytes, and 0.43 of logits) and 1.5 of graphs and workspaces, taken from share x 80:
# 0.6B   1.110 + 0.486 + 1.5     8B   15.256 + 0.638 + 1.5     32B   61.024 + 0.806 + 1.5
# A sequence takes tokens x layers x 2 x 8 heads x 128 x 2 bytes.
# To be compared with "Available KV cache memory" of vLLM's own log on a GPU: scripts/gpu_check.
ENGINES = [
    ("0.6B", 0.5, None, 36.904, 4.375),
    ("8B", 0.5, None, 22.606, 5.625),
    ("8B", 0.3, None, 6.606, 5.625),
    ("8B", 0.25, None, 2.606, 5.625),
    ("8B", 0.25, 3072, 2.606, 0.422),
    ("32B", 0.5, None, -23.330, 10.0),
    ("32B", 0.8, 3072, 0.670, 0.75),
    ("32B", 0.85, 3072, 4.670, 0.75),
]
MODELS = {
    "0.6B": QWEN3_06B,
    "8B": {
        **QWEN3_06B,
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "tie_word_embeddings": False},
    },
    "32B": {
        **QWEN3_06B,
        **{"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64},
        **{"num_attention_heads": 64, "tie_word_embeddings": False},
    },
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[str, tuple[RunConfig, Sizes]]:
    """A run on vLLM for each of the models, asleep during updates, sharded over 64 GPUs."""
    made = {}
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(model))
        run = (
            *("experiment=none", "model=folder", f"model.path={folder}", "model.dtype=bfloat16"),
            *("engine=vllm", "engine.sleep=true", "distributed=fsdp2"),
            *("distributed.processes=8", "distributed.nodes=8", "tasks_per_step=64"),
            *("distributed.rendezvous=first:29500", "training.activation_checkpointing=all"),
        )
        with hydra_session(Source()):
            config = compose_run(open_keys(run), Source()).config
        made[name] = config, Untraced(config.model)
    return made


@pytest.mark.parametrize("name, share, context, has, needs", ENGINES)
def test_an_engine_that_does_not_hold_one_sequence_does_not_start(
    engines, name, share, context, has, needs
):
    config, sizes = engines[name]
    config = deepcopy(config)
    config.engine.memory_share, config.engine.max_context = share, context
    found = estimate(config, sizes, PlannedHardware(devices=64, memory=80 * GIB), 1024)
    room = found.engine.room
    assert room is not None
    assert (room.has / GIB, room.needs / GIB) == pytest.approx((has, needs), abs=1e-3)
    assert (room.missing == 0) is (has >= needs)
    assert found.excess == found.over + room.missing


def test_the_engines_own_format_is_what_it_takes(engines):
    config, sizes = engines["0.6B"]
    config = deepcopy(config)
    config.engine.dtype = EngineDtype.float32
    found = estimate(config, sizes, PlannedHardware(memory=80 * GIB), 1024)
    got = {part.name: part.bytes for part in found.parts}
    assert got["engine's weights"] == 4 * WEIGHTS
    assert found.engine.room.needs == 40960 * TOKEN_CACHE * 4
    config.engine.dtype = EngineDtype.auto
    assert estimate(config, sizes, PlannedHardware(memory=80 * GIB), 1024).engine.room.needs == (
        40960 * TOKEN_CACHE * 2
    )


@pytest.mark.slow
def test_32b_on_gpus_of_80_gib_is_refused_with_what_helps(engines, capsys):
    config, sizes = engines["32B"]
    machine = PlannedHardware(devices=64, memory=80 * GIB)
    planner = Planner(config, machine, 1024)
    planner.sizes = lambda model: sizes
    found = planner.estimate()
    assert found.peak < 80 * GIB  # which was taken for "fits"
    assert found.excess > 30 * GIB
    (together, *_) = planner.remedies()
    assert together.fits and together.peak <= 80 * GIB
    assert "engine.memory_share=0.85" in together.overrides
    assert "engine.max_context=3072" in together.overrides
    # Eight processes of a node read their rows of one weight after the other.
    told = estimate(
        config, sizes, PlannedHardware(devices=64, memory=80 * GIB, host=256 * GIB), 1024
    )
    assert told.host(When.start) == 8 * (sizes.largest_weight + 3 * GIB)
    assert told.over_on_host == 0
    # Each writes a 64th of the weights, the moments and the float32 copies: 2 + 8 + 4 bytes.
    written = told.host(When.checkpoint) - 8 * 3 * GIB
    assert written == pytest.approx(8 * 14 * sizes.parameters / 64, rel=1e-3)


def test_the_words_of_a_run_that_does_not_start(capsys, short):
    run = ("--gpu-memory-gb", "8", "--host-memory-gb", "1", "engine=vllm", "model.dtype=bfloat16")
    share = ("engine.memory_share=0.3", "training.activation_checkpointing=all")
    few = ("training.token_budget=4096", "training.logits_budget_mb=64", "eval.questions=0")
    sized = ("model=folder", "experiment=none", f"model.path={short}", *few)
    assert cli.main(["plan", *run, *share, *sized]) == 1
    told = capsys.readouterr().out
    # 0.3 x 8 - 0.348 - 0.485 - 1.5 and 40960 x 8192 bytes
    assert (
        "DOES NOT START: the engine needs room for one sequence of 40,960 tokens "
        "(engine.max_context), 0.31 GiB of keys and values, and has 0.07 GiB"
    ) in told
    assert "of a node's own 1.00, the most at the start" in told
    larger = ("--gpu-memory-gb", "24", *run[4:], *few, "engine.kv_cache_mb=100")
    code, found = plan(capsys, short, *larger)
    assert (code, found["engine"]["missing"]) == (1, 40960 * 8192 - 100 * 2**20)
    assert found["remedies"][-1]["overrides"] == "engine.kv_cache_mb=320"


def test_adapters_that_training_continues_are_planned_on_their_base(capsys, short, tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]}
    described["base_model_name_or_path"] = str(short)
    (folder / "adapter_config.json").write_text(json.dumps(described))
    lora = ("model.lora.rank=8", "model.dtype=bfloat16", "algorithm.kl.beta=0.1")
    _, found = plan(capsys, folder, "--gpu-memory-gb", "24", *lora)
    (reference,) = [part for part in found["parts"] if part["name"] == "reference"]
    # two layers of (1024 + 2048) x rank 8, 2 bytes each
    assert (reference["bytes"], reference["on_host"]) == (2 * 3072 * 8 * 2, True)
    _, new = plan(capsys, short, "--gpu-memory-gb", "24", *lora)
    assert not [part for part in new["parts"] if part["name"] == "reference"]


@pytest.mark.slow
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
    assert "no known setting makes it fit; the smallest plan is" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--cpu", "--gpu-memory-gb", "80"], "--gpu-memory-gb: has no effect with --cpu"),
        (["--devices", "2"], "--devices 2: distributed=single is one process; add distributed=ddp"),
        (
            ["--devices", "2", "distributed=ddp", "distributed.processes=4"],
            "--devices 2: distributed.processes=4 and distributed.nodes=1 are 4 of them",
        ),
        (["model.path=nowhere"], "model.path=nowhere: there is no such folder"),
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
    assert cli.main(["experiment=none", "model=folder", f"model.path={folder}"]) == 2
    assert "there is no file of weights" in capsys.readouterr().err


def test_options_may_stand_anywhere():
    args, rest = DECLARED["plan"].parse(["seed=1", "--devices", "2", "--cpu", "engine=vllm"])
    options = plan_options(args)
    assert (options.devices, options.machine.kind, rest) == (2, "cpu", ["seed=1", "engine=vllm"])


@pytest.mark.slow
def test_servers_on_gpus_of_their_own(capsys, folder: Path) -> None:
    fleet = ("--devices", "4", "engine=vllm_server", "servers.count=3", "--gpu-memory-gb", "80")
    speeds = ("--server-tokens-per-s", "4000", "--trainer-tokens-per-s", "9000")
    _, record = plan(capsys, folder, *fleet, *speeds, "--host-memory-gb", "500")
    servers, parts = record["servers"], {part["name"]: part for part in record["parts"]}
    assert (servers["gpus"], servers["trainers"], record["devices"]) == (3, 1, 1)
    assert servers["feeding"] == 3  # 9000 / 4000
    assert servers["computed_only"] and servers["fits"] and servers["remedy"] is None
    # 0.9 of 80 GiB, 1.5 GiB assumed, and at a sync the largest weight, the embedding in bfloat16,
    # three times.
    one = servers["by_gpus"][0]
    assert one["gpu_bytes"] == int(80 * GIB * 0.9) + 3 * GIB // 2 + 3 * 151936 * 1024 * 2
    assert one["rollouts"] < servers["by_gpus"][1]["rollouts"]
    # The trainer has no engine on its GPU; three versions of the weights are in its memory.
    assert "keys and values" not in parts
    assert parts["weight files"]["bytes"] == 3 * WEIGHTS * 4 and parts["weight files"]["on_host"]
    # A broadcast holds the embedding in packed weights instead: two, and their parts.
    _, record = plan(capsys, folder, *fleet, "weight_sync.transport=nccl")
    parts = {part["name"]: part for part in record["parts"]}
    assert parts["broadcast buffers"]["bytes"] == 3 * 151936 * 1024 * 4
    assert "weight files" not in parts
    more = record["servers"]["by_gpus"][0]["gpu_bytes"] - one["gpu_bytes"]
    assert more == 2 * 151936 * 1024 * 4


def test_a_model_that_needs_several_gpus_per_server(capsys, folder: Path) -> None:
    # 400,000 tokens of keys and values are 42.7 GiB; a GPU has 36 less weights, passes, graphs.
    long = ("--devices", "3", "engine=vllm_server", "--gpu-memory-gb", "40")
    code, record = plan(capsys, folder, *long, "engine.max_context=400000")
    assert (code, record["servers"]["fits"]) == (1, False)
    assert record["servers"]["remedy"] == "servers.tensor_parallel_size=2"
    assert [one["fits"] for one in record["servers"]["by_gpus"]] == [False, True, True, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "2", "servers.count=2"), "take 2 GPUs and leave none to the trainer; lower"),
        (("--server-tokens-per-s", "5"), "needs both; measure both, or leave both out"),
        (("--server-tokens-per-s", "0"), "--server-tokens-per-s 0: expected a number above 0"),
    ],
)
def test_servers_that_cannot_be_planned(capsys, short: Path, words: tuple, message: str) -> None:
    model = ("experiment=none", "model=folder", f"model.path={short}", "engine=vllm_server")
    assert cli.main(["plan", *model, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_slow_plan_says_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with announced_if_slow("my_model", after_s=0.01):
        time.sleep(0.1)
    assert "my_model" in capsys.readouterr().err
    with announced_if_slow("my_model", after_s=5.0):
        pass
    assert capsys.readouterr().err == ""
