"""Presets of models and of hardware: each with each, and what `agenttrain plan` says of them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, Qwen3Config

from agenttrain.commands.plan.command import planned
from agenttrain.commands.plan.remedies import Planner
from agenttrain.commands.verbs import DECLARED
from agenttrain.settings.compose import Composed, Source, compose_run, hydra_session
from agenttrain.utils.files import conf_folder, list_groups
from agenttrain.utils.hub import is_hub_id

GROUPS = list_groups(conf_folder())
MODELS = [name for name in GROUPS["model"] if name != "folder"]
REAL = (
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b"),
    *("llama3.1-8b", "llama3.2-1b", "llama3.2-3b", "gemma3-1b", "smollm3", "lfm2-1.2b"),
    *("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.6-35b-a3b", "qwen3.8-27b"),
    *("lfm2.5-1.2b", "nemotron3-nano-4b", "gpt-oss-20b"),
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "qwen3-30b-a3b": ATTENTION,
    "gpt-oss-20b": ATTENTION,
    "qwen3.6-35b-a3b": [*ATTENTION, "in_proj_qkv", "in_proj_z", "out_proj"],
    "nemotron3-nano-4b": ["in_proj", *ATTENTION, "up_proj", "down_proj"],
}
"""Targets of presets whose adapters are not on all linear layers."""
MACHINES = {
    "laptop": ["--cpu", "--host-memory-gb", "16"],
    "gpu24": ["--gpu-memory-gb", "24"],
    "gpu80": ["--gpu-memory-gb", "80"],
    "node8x80": ["--gpu-memory-gb", "80", "--devices", "8"],
}


@cache
def compose(*overrides: str) -> Composed:
    with hydra_session(Source()):
        return compose_run(["experiment=none", *overrides], Source())


@pytest.mark.parametrize(
    ("hardware", "models"),
    [
        *(("laptop", MODELS[::2]), ("node8x80", MODELS[1::2])),
        *(pytest.param(name, MODELS, marks=pytest.mark.long) for name in ("gpu24", "gpu80")),
    ],
    ids=("laptop", "node8x80", "gpu24", "gpu80"),
)
def test_every_model_composes_on_every_machine(hardware: str, models: list[str]) -> None:
    for model in models:
        alone = compose(f"model={model}").config
        config = compose(f"model={model}", f"hardware={hardware}").config
        assert config.model.path == alone.model.path
        assert config.model.lora.targets == alone.model.lora.targets
        assert config.chat_template == alone.chat_template
        if hardware in ("laptop", "gpu24"):
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
}
"""Sizes of the models' published config.json."""


def fits(hardware: str, model: str, folder: Path) -> bool:
    SHAPES[model].save_pretrained(folder)
    config = compose(f"model={model}", f"hardware={hardware}", f"model.path={folder}").config
    options = planned(DECLARED["plan"].parse(MACHINES[hardware])[0])
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
        ("gpu80", "qwen3-0.6b", True),
        ("gpu80", "qwen3-1.7b", True),
    ],
)
def test_the_plan_says_what_fits(hardware: str, model: str, expected: bool, tmp_path: Path) -> None:
    assert fits(hardware, model, tmp_path) == expected
