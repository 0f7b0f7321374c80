"""What the transformers engine refuses, and what it does when a step fails."""

import asyncio
from dataclasses import replace

import pytest
import tiny
from engine_kit import PLAIN, expected_logprobs, ids_of, running, sharp_model
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from agenttrain.engines.base import EngineError, ImagesRefused, Lockstep
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], PLAIN, r"token_ids=\[\]"),
        ([5, 100_000], PLAIN, "100000 is outside of the model's vocabulary"),
        ([-1], PLAIN, "-1 is outside"),
        (list(range(20)), PLAIN, r"20 ids.*max_context=20.*engine\.max_context"),
        ([5], Sampling(), "max_tokens=0"),
        ([5], replace(PLAIN, temperature=-1), r"temperature=-1"),
        ([5], replace(PLAIN, top_p=0), r"top_p=0"),
        ([5], replace(PLAIN, top_k=-1), r"top_k=-1"),
        ([5], replace(PLAIN, min_p=2), r"min_p=2"),
    ],
)
def test_bad_requests_say_key_value_and_remedy(ids, sampling, message):
    async def run():
        async with running(sharp_model(), max_context=20) as engine:
            with pytest.raises(EngineError, match=message):
                await engine.generate(ids, sampling, session="a")

    asyncio.run(run())


def test_images_are_refused_and_a_parent_is_not():
    async def run():
        async with running(sharp_model(), max_context=20) as engine:
            with pytest.raises(ImagesRefused, match=r"session='a': 1 images were sent"):
                await engine.generate([5], PLAIN, session="a", images=[object()])
            return await engine.generate([5], PLAIN, session="a", parent="b")

    assert len(asyncio.run(run()).token_ids) == PLAIN.max_tokens


def test_a_failing_step_fails_its_requests_and_the_next_ones_go_on():
    model = sharp_model()

    def fail(*_):
        raise RuntimeError("out of memory")

    async def run():
        async with running(model) as engine:
            handle = model.model.layers[1].register_forward_pre_hook(fail)
            both = (engine.generate([5], PLAIN, session=s) for s in "ab")
            results = await asyncio.gather(*both, return_exceptions=True)
            handle.remove()
            return results, await engine.generate([5], PLAIN, session="a")

    results, after = asyncio.run(run())
    assert [type(r) for r in results] == [EngineError] * 2 and "out of memory" in str(results[0])
    assert after.logprobs == pytest.approx(expected_logprobs(model, [5], after, PLAIN), abs=1e-4)


def test_logits_that_are_not_finite_are_an_error_and_leave_nothing_behind():
    model = sharp_model()
    weight = model.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()

    async def run():
        async with running(model) as engine:
            weight.data.fill_(float("nan"))
            await engine.update((), 1)
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(ids_of(0, 30), PLAIN, session="a")
            weight.data.copy_(good)
            await engine.update((), 2)
            # The short row shares its batch with a long one, so that it reads (masked) old values.
            prompts = [ids_of(1, 3), ids_of(2, 30)]
            both = (engine.generate(p, PLAIN, session=str(len(p))) for p in prompts)
            return list(zip(prompts, await asyncio.gather(*both), strict=True))

    for prompt, completion in asyncio.run(run()):
        expected = expected_logprobs(model, prompt, completion, PLAIN)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_closing_fails_the_calls_that_wait_and_those_that_follow():
    async def run():
        async with running(sharp_model()) as engine:
            slow = replace(PLAIN, max_tokens=500)
            task = asyncio.create_task(engine.generate([5], slow, session="a"))
            await asyncio.sleep(0)
            await engine.aclose()
            with pytest.raises(EngineError, match="closed"):
                await task
            with pytest.raises(EngineError, match="closed"):
                await engine.generate([5], PLAIN, session="a")
            await engine.release("a")

    asyncio.run(run())


def test_models_whose_cache_it_cannot_keep_are_refused():
    small = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
    mamba = MambaForCausalLM(MambaConfig(**small, state_size=4)).eval()
    alibi = BloomForCausalLM(BloomConfig(hidden_size=32, vocab_size=64, n_layer=2, n_head=4)).eval()
    for model, message in (
        (mamba, "MambaForCausalLM (has a recurrent state|cannot run on this engine's cache)"),
        (alibi, "BloomForCausalLM cannot run on this engine's cache"),
    ):
        with pytest.raises(EngineError, match=message):
            TransformersEngine(model, TransformersSettings(max_context=32))


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(EngineError, match=r"engine\.max_context=100000.*512"):
        TransformersEngine(tiny.model(), TransformersSettings(max_context=100_000))


def test_the_engine_is_a_lockstep_engine():
    assert isinstance(TransformersEngine(tiny.model()), Lockstep)
