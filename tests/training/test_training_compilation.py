"""Compiled layers and head, by torch's real compiler (it needs a C++ compiler): slow tests."""

from __future__ import annotations

import shutil

import pytest
import tiny
import torch
from recurrent_families import tiny_recurrent
from torch._dynamo.utils import counters

from agenttrain.algorithms.credit import set_advantages
from agenttrain.training.batch import make_sequences
from agenttrain.training.compilation import compiled
from agenttrain.training.config import ActivationCheckpointing
from agenttrain.training.logprobs import Scorer, UnsupportedModel
from agenttrain.types import Completion, Finish, Origin, Rollout, Task

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_compiled_functions():
    """Forget functions that another test compiled, or made up."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def sequences(seed: int):
    """Four rollouts of one prompt of 16 tokens, with 4 to 40 sampled tokens."""
    noise = torch.Generator().manual_seed(seed)
    prompt = torch.randint(300, (16,), generator=noise).tolist()
    for sample in range(4):
        length = int(torch.randint(4, 41, (1,), generator=noise))
        sampled = tuple(torch.randint(300, (length,), generator=noise).tolist())
        rollout = Rollout(
            task=Task(task_id="t", messages=()),
            rollout_id=f"t-{sample}",
            group_id="t",
            sample=sample,
        )
        trajectory = rollout.trajectories[0]
        trajectory.append_context(prompt, Origin.prompt)
        trajectory.append_sampled(
            Completion(
                token_ids=sampled,
                logprobs=(-1.0,) * length,
                finish=Finish.stop,
                versions=((0, length),),
            ),
            trajectory.token_ids,
        )
        set_advantages(rollout, (-1.0) ** sample)
        yield from make_sequences(rollout)


def results(
    *, compile: bool, checkpointed: bool = False, recurrent: bool = False
) -> list[torch.Tensor]:
    """Log-probabilities, entropies and gradients of three microbatches of different lengths."""
    model = (
        tiny_recurrent("Qwen3_5", vocab_size=300)
        if recurrent
        else tiny.model(initializer_range=0.4)
    )
    level = ActivationCheckpointing.all if checkpointed else ActivationCheckpointing.none
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, compile=compile, level=level)
    values = []
    for seed in range(3):
        model.zero_grad()
        with scorer.ready():
            (batch,) = scorer.pack([*sequences(seed)], 1024, CPU)
            logprobs_S, entropy_S = scorer(batch)
            (logprobs_S * batch.advantages_S).sum().backward()
        values += [logprobs_S.detach(), entropy_S.detach()]
        values += [weight.grad.clone() for weight in model.parameters()]
    return values


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_values_and_gradients_are_those_of_layers_as_they_are(checkpointed):
    expected = results(compile=False, checkpointed=checkpointed)
    counters.clear()
    found = results(compile=True, checkpointed=checkpointed)
    for value, other in zip(found, expected, strict=True):
        assert (value - other).norm() <= 1e-5 * other.norm()
    # The first microbatch may compile, the other lengths do not.
    assert counters["frames"]["total"] <= 8


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")
def test_layouts_of_recurrent_layers_are_not_compiled():
    """Otherwise torch would compile code for each microbatch, 80 functions for these three."""
    expected = results(compile=False, recurrent=True)
    counters.clear()
    found = results(compile=True, recurrent=True)
    for value, other in zip(found, expected, strict=True):
        assert (value - other).norm() <= 1e-5 * other.norm()
    assert counters["frames"]["total"] <= 20


def test_layers_are_compiled_inside_the_block_only(monkeypatch):
    """An engine that samples from the same model calls the layers as they are."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    model = tiny.model()
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, compile=True)
    layer = model.model.layers[0]
    assert "forward" not in vars(layer)
    with scorer.ready():
        assert "forward" in vars(layer)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("failure", ["raises", "differs"])
def test_a_model_that_cannot_be_compiled_is_refused(monkeypatch, failure):
    def broken(function, dynamic):
        def call(*states, **keywords):
            if failure == "raises":
                raise RuntimeError("no compiler")
            return function(*states, **keywords) * 1.01

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(UnsupportedModel) as raised:
        Scorer(tiny.model(), temperature=1.0, logits_budget_mb=1, compile=True)
    assert "training.compile=true" in str(raised.value)
    assert "training.compile=false" in str(raised.value)
