"""What a weight sync makes of an engine whose log-probabilities are not quite the policy's."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from fake_vllm import Machine, machine

from agenttrain.engines.config import Sampling
from agenttrain.training.config import WeightSyncConfig
from agenttrain.training.weight_sync import (
    StaleWeights,
    SyncProbe,
    named_weights,
    policy_logprobs,
    sync,
)
from agenttrain.types import Completion, Finish

__all__ = ["machine"]


class Noisy:
    """An engine with a model of its own, that is `noise` away at each token."""

    max_context = 64
    takes_adapters = False

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = tiny.model(seed=1).to(dtype)
        self.dtype = dtype
        self.noise: dict[int, float] = {}
        """From this token on, by the later one; token 0 is the first that is scored."""
        self.asked: list[tuple[list[int], Sampling]] = []
        self.received: dict[str, torch.Tensor] = {}

    async def generate(
        self, token_ids: Any, sampling: Sampling, *, session: str, **others: Any
    ) -> Completion:
        self.asked.append((list(token_ids), sampling))
        count = sampling.max_tokens
        return Completion(
            token_ids=tuple(9 + index for index in range(count)),
            logprobs=(0.0,) * count,
            finish=Finish.length,
            versions=((0, count),),
        )

    async def release(self, session: str) -> None:
        pass

    async def update(self, weights: Any, version: int) -> None:
        self.received = dict(weights)
        self.model.load_state_dict(self.received)

    async def score(self, token_ids: Any) -> list[float]:
        far = 0.0
        scores = []
        for index, logprob in enumerate(policy_logprobs(self.model, token_ids)):
            far = self.noise.get(index, far)
            scores.append(logprob + far)
        return scores

    async def sleep(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


def synced(
    engine: Noisy, before: SyncProbe | None = None, tolerance: float | None = None, **more: Any
) -> SyncProbe:
    """After a sync of a policy in the engine's format."""
    policy = SimpleNamespace(model=tiny.model(seed=1).to(engine.dtype))
    config = WeightSyncConfig(tolerance=tolerance)
    found = asyncio.run(sync(policy, engine, 1 if before is None else 2, config, before, **more))
    assert found is not None
    return found


def test_a_gap_in_numbers() -> None:
    gap = SyncProbe(
        token_ids=(5, 6, 7),
        start=1,
        policy_T=torch.tensor([-1.0, -2.0]),
        engine_T=torch.tensor([-1.1, -2.0]),
    ).gap
    assert (gap.mean, gap.q90, gap.max) == pytest.approx((0.05, 0.09, 0.1))
    assert gap.metrics() == {
        "weight_sync/gap": gap.mean,
        "weight_sync/gap_q90": gap.q90,
        "weight_sync/gap_max": gap.max,
    }


def test_a_sync_has_the_seconds_of_its_parts() -> None:
    class Slow(Noisy):
        async def update(self, weights: Any, version: int) -> None:
            await super().update(weights, version)
            await asyncio.sleep(0.05)

        async def score(self, token_ids: Any) -> list[float]:
            await asyncio.sleep(0.1)
            return await super().score(token_ids)

    began = time.perf_counter()
    probe = synced(Slow())
    whole = time.perf_counter() - began
    seconds = probe.metrics()
    send, load, check = (seconds[f"time/sync_{part}_s"] for part in ("send", "load", "probe"))
    assert send > 0 and load >= 0.05 and check >= 0.1
    assert send + load + check <= whole


def test_a_few_tokens_that_are_far_off_are_warned_of_once() -> None:
    """In bfloat16 right engines have some; a mixture of experts has tokens that are nats away."""
    engine = Noisy()
    engine.noise = {10: 6.0, 12: 0.0}  # 2 of 61 tokens: a mean of 0.2
    with pytest.warns(RuntimeWarning, match=r"weight sync 1: .* 6 \(mean 0\.19.*90 % quantile 0\)"):
        before = synced(engine)
    assert synced(engine, before).gap.mean > 0.1


@pytest.mark.parametrize("far", [0.12, float("nan")])
def test_an_engine_that_is_off_everywhere_stops_the_run(far: float) -> None:
    engine = Noisy()
    engine.noise = {0: far}
    with pytest.raises(StaleWeights, match=r"weight sync 1: .*weight_sync\.tolerance=0\.1\b"):
        synced(engine)


def test_the_gap_may_grow_five_times() -> None:
    """As the text grows less likely while the policy learns."""
    engine = Noisy()
    engine.noise = {0: 0.06}
    first = synced(engine)
    engine.noise = {0: 0.29}
    second = synced(engine, first)
    engine.noise = {0: 0.31}
    with pytest.raises(StaleWeights, match=r"at the first sync 0\.06 \(mean 0\.06"):
        synced(engine, second)  # 5 x 0.06 = 0.3, not 5 x 0.29
    engine.noise = {0: 0.29}
    with pytest.raises(StaleWeights, match=r"weight_sync\.tolerance=0\.1\."):
        synced(engine, second, tolerance=0.1)


def test_in_float32_on_a_cpu_a_single_token_is_enough() -> None:
    engine = Noisy(torch.float32)
    engine.noise = {10: 0.002, 11: 0.0}
    with pytest.raises(StaleWeights, match=r"tolerance=0\.001"):
        synced(engine)


def test_float32_on_a_gpu_is_as_far_as_tf32_makes_it(machine: Machine) -> None:
    engine = Noisy(torch.float32)
    engine.noise = {0: 0.01}
    synced(engine)


def test_the_text_is_what_the_engine_samples_after_the_end_of_a_prompt() -> None:
    engine = Noisy()
    prompt = list(range(7, 77))  # longer than half of the context, 63 tokens
    engine.noise = {0: 5.0, 30: 0.0}  # the prompt's own tokens do not count
    first = synced(engine, prompt_ids=prompt)
    ((asked, sampling),) = engine.asked
    assert (asked, sampling.temperature) == (prompt[-31:], 1.0)
    assert first.token_ids == (*prompt[-31:], *range(9, 9 + 32))
    assert first.start == 31
    assert synced(engine, first, prompt_ids=[1, 2]).token_ids == first.token_ids
    assert len(engine.asked) == 1


def test_the_optimizer_is_waited_for_before_the_first_weight_is_read(machine: Machine) -> None:
    """The engine's thread reads weights on a stream of its own."""

    class Reading(Noisy):
        async def update(self, weights: Any, version: int) -> None:
            machine.note("update")
            await super().update(weights, version)

    synced(Reading())
    assert [call for _, _, call in machine.calls][:2] == ["synchronize", "update"]
    assert machine.calls[0][:2] == ("MainThread", 3)


def test_weights_are_cast_to_the_engines_format_where_they_have_the_models() -> None:
    model = tiny.model(seed=1)
    model._keep_in_fp32_modules = ["q_norm"]
    sent = dict(named_weights(model, torch.bfloat16))
    for name, tensor in model.state_dict().items():
        dtype = torch.float32 if "q_norm" in name else torch.bfloat16
        assert sent[name].dtype is dtype
        assert torch.equal(sent[name], tensor.to(dtype))
    assert {tensor.dtype for _, tensor in named_weights(model)} == {torch.float32}


def test_an_engine_of_another_format_is_not_expected_to_move() -> None:
    """A step of float32 may be rounded away in bfloat16."""
    engine = Noisy()
    policy = SimpleNamespace(model=tiny.model(seed=1))

    async def steps() -> None:
        before = await sync(policy, engine, 0, WeightSyncConfig())
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1 + 1e-5)
        await sync(policy, engine, 1, WeightSyncConfig(), before)

    asyncio.run(steps())
    assert engine.received["model.norm.weight"].dtype is torch.bfloat16


class Copies(Noisy):
    """Two copies of the weights; the second one is off by `noise`."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.problems: list[str | None] = []

    async def verify(self, token_ids: Any, problem: Any) -> list[float]:
        exact = policy_logprobs(self.model, token_ids)
        copies = [exact, await self.score(token_ids)]
        self.problems = [problem(scores) for scores in copies]
        good = [scores for scores, wrong in zip(copies, self.problems, strict=True) if not wrong]
        return (good or copies)[0]


def test_each_copy_of_the_weights_is_checked() -> None:
    engine = Copies()
    first = synced(engine, prompt_ids=[5, 6])
    assert engine.problems == [None, None]
    engine.noise = {40: 0.5}
    assert synced(engine, first).gap.max < 1e-5, "the good copy's"
    fine, wrong = engine.problems
    assert fine is None and "differ from the policy's by up to 0.5" in str(wrong)


def test_without_a_good_copy_the_sync_fails() -> None:
    class Wrong(Copies):
        async def verify(self, token_ids: Any, problem: Any) -> list[float]:
            scores = [score + 0.5 for score in policy_logprobs(self.model, token_ids)]
            assert problem(scores) is not None
            return scores

    with pytest.raises(StaleWeights, match=r"by up to 0\.5"):
        synced(Wrong())
