"""Log-probabilities on a real tiny model: where the gradient goes, and that packing is exact."""

from __future__ import annotations

import pytest
import tiny
import torch
from training_cases import one_microbatch, policy, random_groups, rollout, with_tool

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.algorithms.credit import set_advantages
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.training.attention import UnsupportedAttention, packed_attention, packing
from agenttrain.training.batch import make_sequences, stand_in
from agenttrain.training.config import SharePrefix
from agenttrain.training.head import LogitTransform
from agenttrain.training.logprobs import (
    Scorer,
    UnsupportedModel,
    head_logprobs,
    packed_hidden,
    separate_hidden,
)
from agenttrain.training.segments import one_after_the_other
from agenttrain.types import Origin, Rollout

CPU = torch.device("cpu")
SAMPLED_FROM = [3, 4, 5, 13, 14]
"""Positions of `with_tool` whose next token was sampled."""


def scored(model: torch.nn.Module, rollouts: list[Rollout], *, token_budget: int = 10_000):
    """rollout_id -> (logprobs, entropies), and the gradient of the logprobs' sum."""
    scorer = Scorer(model, temperature=0.7, logits_budget_mb=1024)
    model.zero_grad()
    found = {}
    with scorer.ready():
        for microbatch in scorer.pack([make_sequences(r)[0] for r in rollouts], token_budget, CPU):
            logprobs_S, entropy_S = scorer(microbatch)
            logprobs_S.sum().backward()
            lengths = [sequence.sampled_length for sequence in microbatch.sequences]
            pieces = zip(logprobs_S.split(lengths), entropy_S.split(lengths), strict=True)
            for sequence, piece in zip(microbatch.sequences, pieces, strict=True):
                found[sequence.rollout.rollout_id] = piece
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_logprobs_and_entropies_are_those_of_the_full_logits() -> None:
    model, one = tiny.model(), with_tool()
    found, _ = scored(model, [one])
    logprobs_S, entropy_S = found[one.rollout_id]
    ids = torch.tensor(one.trajectories[0].token_ids)
    full_TV = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
    expected = full_TV[SAMPLED_FROM, [20, 21, 2, 22, 2]]
    assert torch.allclose(logprobs_S, expected, atol=1e-5)
    entropies = -(full_TV.exp() * full_TV).sum(-1)[SAMPLED_FROM]
    assert torch.allclose(entropy_S, entropies, atol=1e-5)
    assert not entropy_S.requires_grad


def test_gradient_with_respect_to_logits_is_zero_off_the_sampled_tokens() -> None:
    """The same loss through full logits: the same weights' gradient, and none elsewhere."""
    model, one = tiny.model(), with_tool()
    set_advantages(one, 0.5)
    config = AlgorithmConfig(name="test")
    microbatch = one_microbatch(one)

    def loss(logprobs_S: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(
            logprobs_S=logprobs_S,
            behaviour_S=logprobs_S.detach(),
            ref_logprobs_S=None,
            sequence_S=microbatch.sequence_S,
            advantages_S=microbatch.advantages_S,
            weights_B=torch.tensor([0.2]),
        )
        return policy_loss(inputs, config)[0]

    logits_TV = model(torch.tensor(one.trajectories[0].token_ids)[None]).logits[0]
    logits_TV.retain_grad()
    mask = torch.tensor(one.trajectories[0].loss_mask, dtype=torch.bool)
    logprobs_TV = logits_TV.log_softmax(-1)
    next_logprobs = logprobs_TV[:-1].gather(
        1, torch.tensor(one.trajectories[0].token_ids)[1:, None]
    )[:, 0]
    loss(next_logprobs[mask[1:]]).backward()
    full = {name: p.grad.clone() for name, p in model.named_parameters()}
    per_position = logits_TV.grad.abs().sum(1)
    assert [i for i, g in enumerate(per_position.tolist()) if g != 0] == SAMPLED_FROM

    model.zero_grad()
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1024)
    with scorer.ready():
        loss(scorer(microbatch)[0]).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, full[name], atol=1e-6), name


def test_logits_exist_for_sampled_tokens_only() -> None:
    """A head that someone watches is called, and only with what was sampled."""
    model, seen = tiny.model(), []
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1024)
    microbatch = one_microbatch(with_tool())
    with scorer.ready():
        plain, _ = scorer(microbatch)
        model.lm_head.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
        called, _ = scorer(microbatch)
    assert set(seen) == {(1, model.config.vocab_size), (5, model.config.vocab_size)}
    assert torch.allclose(plain, called, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_packed_is_separate_is_any_other_split(seed: int) -> None:
    model = tiny.model()
    rollouts = [one for group in random_groups(seed) for one in group]
    whole, gradient = scored(model, rollouts)
    total = {name: torch.zeros_like(g) for name, g in gradient.items()}
    for one in rollouts:
        alone, part = scored(model, [one])
        assert torch.allclose(whole[one.rollout_id][0], alone[one.rollout_id][0], atol=1e-5)
        for name, g in part.items():
            total[name] += g
    _, other = scored(model, rollouts, token_budget=70)
    for name, g in gradient.items():
        scale = g.abs().max()
        assert torch.allclose(g, total[name], atol=1e-5 * scale), name
        assert torch.allclose(g, other[name], atol=1e-5 * scale), name


def test_a_packed_rollout_cannot_see_its_neighbours() -> None:
    model = tiny.model()
    first, second = torch.arange(10, 30), torch.arange(40, 60)
    with packing(model), torch.no_grad():
        segments = one_after_the_other([20, 20])
        hidden = packed_hidden(model, torch.cat((first, second)), segments)
        changed = packed_hidden(model, torch.cat((first + 100, second)), segments)
    assert torch.equal(hidden[20:], changed[20:])
    assert not torch.allclose(hidden[:20], changed[:20])


def test_the_models_own_attention_is_back_afterwards() -> None:
    model = tiny.model().train()
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1024)
    with scorer.ready():
        assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_chunks_and_recomputation_change_nothing() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 3000, bias=False)
    hidden, labels = torch.randn(200, 16), torch.randint(0, 3000, (200,))
    results = []
    for budget in (1024, 1):  # 1 MB: 87 of the 200 tokens at once
        head.zero_grad()
        inputs = hidden.clone().requires_grad_()
        logprobs, entropies = head_logprobs(
            inputs, head, labels, transform=LogitTransform(temperature=0.5), logits_budget_mb=budget
        )
        (logprobs * torch.arange(200)).sum().backward()
        results.append((logprobs, entropies, inputs.grad, head.weight.grad.clone()))
    for kept, recomputed in zip(*results, strict=True):
        assert torch.allclose(kept, recomputed, rtol=1e-5, atol=1e-5)


def test_recomputed_logits_are_not_kept() -> None:
    head = torch.nn.Linear(4, 3000, bias=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        hidden = torch.randn(200, 4, requires_grad=True)
        labels = torch.zeros(200, dtype=torch.long)
        head_logprobs(hidden, head, labels, transform=LogitTransform(), logits_budget_mb=1)
    assert max(kept, default=0) < 3000 * 87


ASKED = {
    "sliding_window": 4,  # without the mask that goes with it
    "dropout": 0.1,
    "position_bias": torch.zeros(1),
    "is_causal": False,
    "something_new": "x",
}


@pytest.mark.parametrize("keyword", ASKED)
def test_attention_refuses_what_it_does_not_honour(keyword: str) -> None:
    states = torch.zeros(1, 2, 5, 4)
    with pytest.raises(UnsupportedAttention, match=keyword):
        packed_attention(
            torch.nn.Identity(),
            states,
            states,
            states,
            None,
            blocks=(),
            **{keyword: ASKED[keyword]},
        )


def test_attention_refuses_masks_and_caches() -> None:
    states, longer = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 9, 4)
    with pytest.raises(UnsupportedAttention, match="attention_mask"):
        packed_attention(torch.nn.Identity(), states, states, states, states, blocks=())
    with pytest.raises(UnsupportedAttention, match="over keys"):
        packed_attention(torch.nn.Identity(), states, longer, longer, None, blocks=())


def recurrent() -> torch.nn.Module:
    """Every position of the first layer sees a sum over those before it, as in linear attention."""
    model = tiny.model()
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.cumsum(1))
    return model


def test_a_model_that_cannot_be_packed_runs_one_rollout_at_a_time() -> None:
    model = recurrent()
    rollouts = [one for group in random_groups(0) for one in group]
    with pytest.warns(UserWarning, match=r"one forward pass per rollout.*hidden states differ"):
        found, _ = scored(model, rollouts)
    for one in rollouts:
        logits = model(torch.tensor(one.trajectories[0].token_ids)[None]).logits[0]
        sequence = make_sequences(one)[0]
        labels = sequence.token_ids_T[sequence.targets_S + 1]
        expected = (logits / 0.7).log_softmax(-1)[sequence.targets_S, labels]
        assert torch.allclose(found[one.rollout_id][0], expected, atol=1e-5)


def test_a_shared_prompt_that_the_model_cannot_take_is_refused_where_asked() -> None:
    with pytest.raises(UnsupportedModel, match=r"share_prefix=always.*cannot be packed"):
        Scorer(
            recurrent(),
            temperature=1.0,
            logits_budget_mb=1,
            share_prefix=SharePrefix.always,
        )


def test_a_head_that_is_not_the_last_word_is_refused() -> None:
    model = tiny.model()
    plain = model.forward

    def capped(*args: object, **kwargs: object):
        output = plain(*args, **kwargs)
        output.logits = 0.1 * torch.tanh(output.logits / 0.1)
        return output

    model.forward = capped
    with pytest.raises(UnsupportedModel, match=r"model\.path"):
        policy(model)


def test_separate_forwards_use_no_other_rollout() -> None:
    model, ids = tiny.model(), torch.arange(20, 30)
    with torch.no_grad():
        both = separate_hidden(model, torch.cat((ids, ids)), one_after_the_other([10, 10]))
    assert torch.equal(both[:10], both[10:])


def test_an_empty_reply_span_costs_nothing() -> None:
    one = rollout([(Origin.prompt, [7, 8]), (Origin.sampled, [9, 2]), (Origin.tool, [])])
    assert make_sequences(one)[0].targets_S.tolist() == [1, 2]


def test_a_row_that_stands_in_has_a_backward_pass_that_adds_nothing() -> None:
    model = tiny.model()
    microbatch = one_microbatch(stand_in())
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1)
    with scorer.ready():
        logprobs_S, entropy_S = scorer(microbatch)
    assert logprobs_S.shape == entropy_S.shape == (0,)
    logprobs_S.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(not gradient.any() for gradient in gradients)
