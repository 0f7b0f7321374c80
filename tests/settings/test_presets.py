"""Presets of models and of hardware: each with each, and what `agenttrain plan` says of them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma4Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from agenttrain.commands.plan.command import plan_options
from agenttrain.commands.plan.remedies import Planner
from agenttrain.commands.verbs import DECLARED
from agenttrain.runs.memory_plan import Sizes
from agenttrain.settings.compose import Composed, Source, compose_run, hydra_session
from agenttrain.training.config import ModelConfig
from agenttrain.utils.files import conf_folder, list_groups
from agenttrain.utils.hub import is_hub_id

GROUPS = list_groups(conf_folder())
MODELS = [name for name in GROUPS["model"] if name != "folder"]
REAL = (
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b"),
    *("qwen3-32b", "qwen3-30b-a3b"),
    *("llama3.1-8b", "llama3.2-1b", "llama3.2-3b", "gemma3-1b", "smollm3", "lfm2-1.2b"),
    *("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.6-35b-a3b", "qwen3.8-27b"),
    *("lfm2.5-1.2b", "nemotron3-nano-4b", "nemotron3-nano-30b-a3b", "gpt-oss-20b"),
    *("gemma4-e2b", "gemma4-e4b", "gemma4-31b", "gemma4-26b-a4b"),
    *("granite4-h-micro", "granite4-h-tiny"),
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "qwen3-30b-a3b": ATTENTION,
    "gpt-oss-20b": ATTENTION,
    "qwen3.6-35b-a3b": [*ATTENTION, "in_proj_qkv", "in_proj_z", "out_proj"],
    "nemotron3-nano-4b": ["in_proj", *ATTENTION, "up_proj", "down_proj"],
    "nemotron3-nano-30b-a3b": ["in_proj", *ATTENTION],
    "gemma4-26b-a4b": ATTENTION,
    "granite4-h-tiny": [*ATTENTION, "in_proj", "out_proj"],
}
"""Targets of presets whose adapters are not on all linear layers."""
MACHINES = {
    "laptop": ["--cpu", "--host-memory-gb", "16"],
    "gpu24": ["--gpu-memory-gb", "24"],
    "gpu24_nf4": ["--gpu-memory-gb", "24"],
    "gpu80": ["--gpu-memory-gb", "80"],
    "node8x80": ["--gpu-memory-gb", "80", "--devices", "8"],
}
LATER = ("gpu24", "gpu24_nf4", "gpu80")
"""Machines that `scripts/test-long` composes with every model."""
FEW, OTHERS = MODELS[::6], [model for index, model in enumerate(MODELS) if index % 6]


@cache
def compose(*overrides: str) -> Composed:
    with hydra_session(Source()):
        return compose_run(["experiment=none", *overrides], Source())


@pytest.mark.parametrize(
    ("hardware", "models"),
    [
        ("laptop", FEW),
        pytest.param("laptop", OTHERS[::2], marks=pytest.mark.slow),
        pytest.param("node8x80", MODELS[1::2], marks=pytest.mark.slow),
        *(pytest.param(name, MODELS, marks=pytest.mark.long) for name in LATER),
    ],
    ids=("laptop", "laptop-others", "node8x80", *LATER),
)
def test_every_model_composes_on_every_machine(hardware: str, models: list[str]) -> None:
    for model in models:
        alone = compose(f"model={model}").config
        config = compose(f"model={model}", f"hardware={hardware}").config
        assert config.model.path == alone.model.path
        assert config.model.lora.targets == alone.model.lora.targets
        assert config.chat_template == alone.chat_template
        if hardware in ("laptop", "gpu24", "gpu24_nf4"):
            assert (config.model.lora.rank, config.optimizer.lr) == (32, 1e-5)
        else:
            assert (config.model.dtype, config.optimizer.lr) == ("bfloat16", alone.optimizer.lr)


@pytest.mark.parametrize("model", REAL)
def test_a_preset_names_a_model_of_the_hub(model: str) -> None:
    config = compose(f"model={model}").config
    assert is_hub_id(config.model.path)
    assert config.model.dtype == "bfloat16"
    adapted = config.model.lora.rank > 0
    assert config.optimizer.lr == (1e-5 if adapted else 1e-6)
    assert config.model.lora.targets == TARGETS.get(model, ["all-linear"])
    assert config.chat_template.name == ("hermes" if model == "gemma3-1b" else "auto")


QWEN3: dict[str, Any] = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
GEMMA4: dict[str, Any] = {"vision_config": {}, "audio_config": {}}
GRANITE4: dict[str, Any] = {
    **{"vocab_size": 100352, "num_hidden_layers": 40, "tie_word_embeddings": True},
    **{"max_position_embeddings": 131072, "mamba_d_state": 128, "mamba_d_head": 64},
    "layer_types": [
        "full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)
    ],
}
NEMOTRON3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
"""M: Mamba2, E: experts, *: attention."""
SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "qwen3-1.7b": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "qwen3-8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        **QWEN3,
    ),
    "qwen3-14b": Qwen3Config(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        **QWEN3,
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "gemma4-e2b": Gemma4Config(
        text_config={
            **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
            **{"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        **GEMMA4,
    ),
    "gemma4-e4b": Gemma4Config(
        text_config={
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42},
            **{"num_key_value_heads": 2, "num_kv_shared_layers": 18},
        },
        **GEMMA4,
    ),
    "granite4-h-micro": GraniteMoeHybridConfig(
        **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"mamba_n_heads": 64, "shared_intermediate_size": 8192, "num_local_experts": 0},
        **GRANITE4,
    ),
    "granite4-h-tiny": GraniteMoeHybridConfig(
        **{"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4},
        **{"mamba_n_heads": 48, "shared_intermediate_size": 1024, "intermediate_size": 512},
        **{"num_local_experts": 64, "num_experts_per_tok": 6},
        **GRANITE4,
    ),
    "nemotron3-nano-30b-a3b": NemotronHConfig(
        hybrid_override_pattern=NEMOTRON3,
        **{"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2},
        **{"mamba_num_heads": 64, "moe_intermediate_size": 1856, "n_routed_experts": 128},
        **{"moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6},
    ),
}
"""Sizes of the models' published config.json, or of the sources that the presets name."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("gpt-oss-20b", 21),
        ("granite4-h-tiny", 7),
        ("nemotron3-nano-30b-a3b", 31.6),
        ("gemma4-e2b", 5.1),  # "E2B" leaves out the embeddings of each layer
        ("gemma4-e4b", 8),
    ],
)
def test_a_shape_has_the_published_number_of_weights(
    model: str, billions: float, tmp_path: Path
) -> None:
    SHAPES[model].save_pretrained(tmp_path)
    sizes = Sizes(ModelConfig(path=str(tmp_path)))
    assert sizes.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert sizes.layers == SHAPES[model].get_text_config().num_hidden_layers
    assert sizes.key_cache(4096) > 0


def fits(hardware: str, model: str, folder: Path) -> bool:
    SHAPES[model].save_pretrained(folder)
    config = compose(f"model={model}", f"hardware={hardware}", f"model.path={folder}").config
    options = plan_options(DECLARED["plan"].parse(MACHINES[hardware])[0])
    return not Planner(config, options.machine, 1024).estimate().excess


def test_a_laptop_trains_the_smallest(tmp_path: Path) -> None:
    assert fits("laptop", "qwen3-0.6b", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "model", "expected"),
    [
        ("laptop", "qwen3-1.7b", True),
        ("gpu24", "qwen3-0.6b", True),
        ("gpu24", "qwen3-1.7b", True),
        ("gpu24", "qwen3-8b", False),
        ("gpu24_nf4", "qwen3-8b", True),
        ("gpu24_nf4", "qwen3-14b", True),
        ("gpu80", "qwen3-0.6b", True),
        ("gpu80", "qwen3-1.7b", True),
    ],
)
def test_the_plan_says_what_fits(hardware: str, model: str, expected: bool, tmp_path: Path) -> None:
    assert fits(hardware, model, tmp_path) == expected


@pytest.mark.slow
def test_a_base_in_4_bits_is_proposed_where_adapters_do_not_fit(tmp_path: Path) -> None:
    SHAPES["qwen3-8b"].save_pretrained(tmp_path)
    settings = ("model=qwen3-8b", "hardware=gpu24", "engine=transformers_small")
    config = compose(*settings, f"model.path={tmp_path}").config
    options = plan_options(DECLARED["plan"].parse(["--gpu-memory-gb", "16"])[0])
    first = Planner(config, options.machine, 1024).remedies()[0]
    assert first.fits
    assert "model.quantization=nf4" in first.overrides.split()
