"""Packed and with a shared prompt, every family computes what it computes one rollout at a time."""

from __future__ import annotations

import pytest
import torch
import transformers
from packing_families import FAMILIES, SMALL, WINDOW, tiny_family
from training_cases import one_microbatch, rollout, with_tool

from agenttrain.engines.soft_cap import keep_soft_cap
from agenttrain.training.attention import (
    UnsupportedAttention,
    packed_mask,
    packing,
)
from agenttrain.training.batch import make_sequences
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import (
    Scorer,
    UnsupportedModel,
    check_head,
    logit_transform,
    packed_hidden,
    separate_hidden,
    why_not_packed,
)
from agenttrain.training.policy import score_microbatches
from agenttrain.training.segments import Segment, one_after_the_other
from agenttrain.types import Origin

CPU = torch.device("cpu")

PROMPT = Segment(57, 20)
TURN = Segment(77, 12, PROMPT)
LAYOUT = (
    Segment(0, 30),
    Segment(30, 27),
    PROMPT,
    TURN,
    Segment(89, 11, PROMPT),
    Segment(100, 3, PROMPT),
    Segment(103, 5, TURN),
    Segment(108, 4, TURN),
)
"""Two rollouts alone, and four of a prompt of 20, two of which share 12 more; all but one longer
than the window."""


def run(hidden, model: torch.nn.Module, ids: torch.Tensor):
    """Hidden states, and every parameter's gradient of a weighted sum of them."""
    model.zero_grad()
    states = hidden(model, ids, LAYOUT)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    (states * weights).sum().backward()
    return states.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_is_separate(name: str) -> None:
    model = tiny_family(name)
    keep_soft_cap(model)
    ids = torch.randint(3, 64, (112,), generator=torch.Generator().manual_seed(1))
    assert why_not_packed(model) is None
    check_head(model)
    random_state = torch.get_rng_state()
    separate, expected = run(separate_hidden, model, ids)
    with packing(model):
        packed, found = run(packed_hidden, model, ids)
    # Nothing random: recomputed modules keep no state of the generator.
    assert torch.get_rng_state().equal(random_state)
    assert (packed - separate).abs().max() <= 1e-5 * separate.abs().max()
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        gap = (found[parameter] - gradient).abs().max()
        assert gap <= 1e-5 * gradient.abs().max() + 1e-7, parameter


def test_no_window_is_crossed_with_gradients() -> None:
    """Gemma 3's own window, of 1,024 tokens: a pass with gradients keeps all that is computed."""
    config = transformers.Gemma3TextConfig(
        **{**SMALL, **FAMILIES["Gemma3"], "sliding_window": 1024, "max_position_embeddings": 2048}
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    tokens: dict[bool, list[int]] = {True: [], False: []}
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: tokens[torch.is_grad_enabled()].append(inputs[0].numel())
    )
    assert why_not_packed(model) is None
    assert tokens[True] == [23, 23]  # 9 + 6 + 5 + 3 of the two checks for leaks
    assert max(tokens[False]) > 1024


def test_a_soft_cap_is_not_left_to_attention_that_ignores_it() -> None:
    model = tiny_family("Gemma2")
    model.config._attn_implementation = "sdpa"  # as transformers before 5.21 loads it
    Scorer(model, temperature=1.0, logits_budget_mb=1)
    assert model.config._attn_implementation == "eager"
    other = tiny_family("Gemma3")  # has no cap
    Scorer(other, temperature=1.0, logits_budget_mb=1)
    assert other.config._attn_implementation == "sdpa"


def test_weights_that_are_no_numbers_are_named_as_such() -> None:
    model = tiny_family(next(iter(FAMILIES)))
    model.get_output_embeddings().weight.data[3, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match="its weights hold NaN or infinity"):
        check_head(model)


@pytest.mark.parametrize(
    "name", [name for name, own in FAMILIES.items() if "sliding_window" in own]
)
def test_the_window_is_what_these_families_are_tested_beyond(name: str) -> None:
    """With a window longer than every rollout the states are others: the test above sees it."""
    model = tiny_family(name)
    ids = torch.arange(3, 3 + 4 * WINDOW)
    segments = one_after_the_other([4 * WINDOW])
    with packing(model), torch.no_grad():
        windowed = packed_hidden(model, ids, segments)
        model.config.sliding_window = 1000
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = 1000
        whole = packed_hidden(model, ids, segments)
    assert torch.allclose(windowed[:WINDOW], whole[:WINDOW], atol=1e-5)
    assert not torch.allclose(windowed[WINDOW:], whole[WINDOW:], atol=1e-3)


@pytest.mark.parametrize("name", ["Gemma2", "Cohere2", "Granite", "Qwen3"])
def test_logprobs_are_of_the_logits_that_the_model_itself_makes(name: str) -> None:
    """Gemma 2 caps its logits, Cohere and Granite scale them."""
    own = {"final_logit_softcapping": 2.0, "logit_scale": 0.3, "logits_scaling": 4.0}
    model = tiny_family(name)
    for setting in own.keys() & vars(model.config).keys():
        setattr(model.config, setting, own[setting])
        setattr(model, setting, own[setting])
    scorer = Scorer(model, temperature=0.7, logits_budget_mb=1)
    one = with_tool()
    logits = model(torch.tensor(one.trajectories[0].token_ids)[None]).logits[0] / 0.7
    expected = logits.log_softmax(-1)[[3, 4, 5, 13, 14], [20, 21, 2, 22, 2]]
    with scorer.ready():
        logprobs, _ = scorer(one_microbatch(one))
    assert torch.allclose(logprobs, expected, atol=1e-5)
    transform = logit_transform(model)
    assert (transform.scale, transform.softcap) == {
        "Gemma2": (1.0, 2.0),
        "Cohere2": (0.3, None),
        "Granite": (0.25, None),
        "Qwen3": (1.0, None),
    }[name]


def test_a_mask_of_chunks_is_refused() -> None:
    """Attention is not told of the chunks of Llama 4."""
    config = transformers.Llama4TextConfig(
        **{
            **SMALL,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
        }
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    assert "local mask" in (why_not_packed(model) or "")


@pytest.mark.parametrize("name", ["Qwen3Moe", "Gemma3", "GptOss"])
def test_families_are_packed_in_bfloat16(name: str) -> None:
    assert why_not_packed(tiny_family(name).bfloat16()) is None


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [5.0] * 4,
    "factor": 6.4,
}


@pytest.mark.parametrize("share", SharePrefix)
def test_a_rollout_is_scored_alike_beside_one_that_is_longer_than_the_pretraining(share) -> None:
    """LongRoPE (Phi) has other frequencies beyond 40 tokens: for those rollouts, and no others."""
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SMALL, rope_parameters=LONG_ROPE, original_max_position_embeddings=40
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    prompt = list(range(3, 33))
    rollouts = [
        rollout([(Origin.prompt, prompt), (Origin.sampled, [5 + sample] * own)], sample=sample)
        for sample, own in enumerate((4, 30, 10, 11))
    ]
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, share_prefix=share)
    found = score_microbatches(
        scorer, scorer.pack([make_sequences(one)[0] for one in rollouts], 1000, CPU)
    )
    for one in rollouts:
        ids = torch.tensor(one.trajectories[0].token_ids)
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[29:-1].gather(1, ids[30:, None])[:, 0]
        assert torch.allclose(found[one.rollout_id, 0][0], logprobs, atol=1e-4), one.rollout_id


def test_masks_of_the_models_own_are_refused() -> None:
    for asked in ({"use_vmap": True}, {"attention_mask": torch.ones(1, 4)}, {"local_size": 4}):
        with pytest.raises(UnsupportedAttention):
            packed_mask(**asked)
