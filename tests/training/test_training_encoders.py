"""Models with encoders of images and sound, trained on text: the encoders take no part in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import fleet_kit
import pytest
import tiny
import torch
import transformers
from encoder_families import ENCODERS, LANGUAGE_MODELS, tiny_with_encoders
from packing_families import WINDOW
from test_training_recurrent import assert_same, run, tree
from training_cases import policy, rollout

from agenttrain.engines.config import Sampling
from agenttrain.engines.language_model import encoder_weights, language_model
from agenttrain.engines.transformers.apart import build_copy
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.checkpoint_files import auto_class, verify
from agenttrain.training.config import LoraSettings
from agenttrain.training.footprint import SavedActivations, cached_layers, empty_model
from agenttrain.training.images import freeze_encoders
from agenttrain.training.logprobs import check_head, why_not_packed
from agenttrain.training.lora import add_lora
from agenttrain.training.operations import count_operations
from agenttrain.training.sharding import give_storage
from agenttrain.training.sliced_weights import SlicedWeights, load_whole, why_not_sliced
from agenttrain.training.sliced_weights import empty_model as sliced_model
from agenttrain.training.weight_sync import named_weights, policy_logprobs
from agenttrain.training.world import World
from agenttrain.types import Origin

CPU = torch.device("cpu")
FAMILIES = list(ENCODERS)
LAYOUT = tree((70, None), (66, None), (5, 1), (1, 1), (3, 3))


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_packed_as_each_sequence_alone(name: str) -> None:
    model = tiny_with_encoders(name)
    check_head(model)
    assert why_not_packed(model) is None
    packed = run(model, packed=True, layout=LAYOUT)
    assert_same(packed, run(model, packed=False, layout=LAYOUT))
    assert packed[1].keys().isdisjoint(encoder_weights(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_encoders_are_frozen(name: str) -> None:
    model = tiny_with_encoders(name)
    freeze_encoders(model)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.requires_grad is not parameter_name.startswith(ENCODERS[name])
    for beginning in ENCODERS[name]:
        assert any(frozen.startswith(beginning) for frozen in encoder_weights(model))


def test_a_model_that_reads_text_alone_has_no_encoders() -> None:
    for name in ("Gemma3", "Lfm2Vl"):
        text = tiny_with_encoders(name).config.text_config
        model = getattr(transformers, LANGUAGE_MODELS[name])(text)
        assert encoder_weights(model) == {}
        assert language_model(model) is model.model


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_in_the_language_model_alone(name: str) -> None:
    model = tiny_with_encoders(name)
    add_lora(model, LoraSettings(rank=2))
    adapted = [n for n, p in model.named_parameters() if p.requires_grad]
    assert adapted and all(n.startswith("model.language_model.") for n in adapted)


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_are_those_of_the_language_model(name: str) -> None:
    model = tiny_with_encoders(name)
    freeze_encoders(model)
    alone = getattr(transformers, LANGUAGE_MODELS[name])(model.config.text_config)
    assert count_operations(model) == count_operations(alone)


def test_gemma_4_has_embeddings_in_each_layer_and_heads_of_two_sizes() -> None:
    model = tiny_with_encoders("Gemma4")
    lookups = language_model(model).embed_tokens_per_layer.weight
    weights = sum(p.numel() for p in language_model(model).parameters())
    counted = count_operations(model)
    assert counted.trained == weights - lookups.numel()
    # 2 layers of each kind with 4 heads of 8, and of 16 where they attend to everything.
    assert counted.widths == {WINDOW: 2 * 4 * 8, None: 2 * 4 * 16}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_samples_text(name: str) -> None:
    """It compares its own log-probabilities with plain ones when it is made."""
    model = tiny_with_encoders(name)
    prompt = list(range(3, 23))

    async def sample() -> tuple[tuple[int, ...], tuple[float, ...]]:
        engine = TransformersEngine(model, TransformersSettings(max_rows=2))
        completion = await engine.generate(prompt, Sampling(max_tokens=5, seed=0), session="a")
        await engine.aclose()
        return completion.token_ids, completion.logprobs

    ids, logprobs = asyncio.run(sample())
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, 19:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert list(logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["Gemma4", "Lfm2Vl"])
def test_an_update_leaves_the_encoders(name: str) -> None:
    learner = policy(tiny_with_encoders(name), lr=1e-3)
    before = {n: p.clone() for n, p in learner.model.named_parameters()}
    group = [
        rollout([(Origin.prompt, [7, 8, 9]), (Origin.sampled, [20 + n, 2])], sample=n, reward=n)
        for n in range(2)
    ]
    train_policy(learner, [group])
    after = dict(learner.model.named_parameters())
    changed = {n for n, p in before.items() if not torch.equal(p, after[n])}
    assert "model.language_model.embed_tokens.weight" in changed
    assert changed.isdisjoint(encoder_weights(learner.model))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_read_whole_and_in_slices_alike(name: str, tmp_path: Path) -> None:
    tiny_with_encoders(name).save_pretrained(tmp_path)
    whole = auto_class(tmp_path).from_pretrained(tmp_path)
    assert type(whole) is type(tiny_with_encoders(name))
    assert why_not_sliced(tmp_path) is None
    sliced = sliced_model(tmp_path, torch.float32)
    weights = SlicedWeights(sliced, tmp_path, 0)
    give_storage(sliced, CPU)
    weights.fill(sliced, World())
    assert type(sliced) is type(whole)
    expected = whole.state_dict()
    assert sliced.state_dict().keys() == expected.keys()
    for name, tensor in sliced.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_checkpoint_has_the_settings_of_the_image_processors(tmp_path: Path) -> None:
    """Servers of other programs do not load a model with encoders without them."""
    source = tmp_path / "model"
    tiny_with_encoders("Gemma3").save_pretrained(source)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (source / name).write_text(f'{{"name": "{name}"}}')
    learner = policy(load_whole(source, torch.float32))
    saved = Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1).save(learner, step=1)
    verify(saved)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (saved / name).read_text() == (source / name).read_text()
    again = auto_class(saved).from_pretrained(saved)
    assert type(again) is type(learner.model)
    weights = again.state_dict()
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(weights[name], tensor), name


def test_a_copy_in_another_process_has_the_names_of_the_trainers_model(tmp_path: Path) -> None:
    tiny_with_encoders("Lfm2Vl").save_pretrained(tmp_path)
    inputs = fleet_kit.inputs(tmp_path, model=tmp_path)
    copy = build_copy(TransformersSettings(max_rows=2), inputs)
    trained, ids = load_whole(tmp_path, torch.float32), list(range(3, 20))

    async def scores() -> list[float]:
        await copy.update(named_weights(trained), 1)
        result = await copy.score(ids)
        await copy.aclose()
        return result

    assert asyncio.run(scores()) == pytest.approx(policy_logprobs(trained, ids), abs=1e-4)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3_5"])
def test_a_plan_counts_the_layers_of_the_language_model(name: str) -> None:
    config = tiny_with_encoders(name).config
    model = empty_model(config, torch.float32, LoraSettings())
    alone = empty_model(config.text_config, torch.float32, LoraSettings())
    assert type(alone).__name__ == LANGUAGE_MODELS[name]
    assert cached_layers(model) == cached_layers(alone)
    assert SavedActivations(model, None)(32) == SavedActivations(alone, None)(32)
