"""The transformers engine on tiny random models, against plain forward passes."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from engine_kit import PLAIN, converse, expected_logprobs, ids_of, running, sharp_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.types import Finish

MIXED = [
    Sampling(seed=100),
    Sampling(temperature=0, seed=200),
    Sampling(temperature=0.6, seed=300),
    Sampling(temperature=1.4, top_k=5, seed=400),
    Sampling(top_p=0.8, seed=500),
    Sampling(temperature=0.9, min_p=0.05, top_k=30, top_p=0.95, seed=600),
]


@pytest.mark.parametrize("deterministic", [True, False])
def test_logprobs_agree_with_a_plain_forward_pass(deterministic):
    model = sharp_model()

    async def run():
        async with running(model, max_rows=5) as engine:
            names = [f"s{i}" for i in range(9)]
            if deterministic:
                engine.expect(names)
            work = (converse(engine, n, MIXED[i % 6]) for i, n in enumerate(names))
            return await asyncio.gather(*work)

    logs = asyncio.run(run())
    greedy = 0
    for prompt, sampling, completion in [turn for log in logs for turn in log]:
        expected = expected_logprobs(model, prompt, completion, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(completion.token_ids) == sampling.max_tokens
        greedy += sampling.temperature == 0
    assert greedy == 6


def test_greedy_takes_the_likeliest_token():
    model = sharp_model()

    async def run():
        async with running(model) as engine:
            return await engine.generate([5, 6], replace(PLAIN, temperature=0), session="a")

    completion = asyncio.run(run())
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, *completion.token_ids]])).logits[0, 1:-1]
    assert logits.argmax(-1).tolist() == list(completion.token_ids)


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch():
    async def run(sessions):
        async with running(sharp_model()) as engine:
            logs = await asyncio.gather(*(converse(engine, s, MIXED[0]) for s in sessions))
            return [c.token_ids for _, _, c in logs[0]], engine.stats.decode_steps

    alone, steps = asyncio.run(run(["s0"]))
    together, steps_together = asyncio.run(run([f"s{i}" for i in range(8)]))
    assert alone == together
    assert steps_together > steps == sum(map(len, alone))


def test_no_history_is_prefilled_twice():
    async def run():
        async with running(sharp_model()) as engine:
            log = await converse(engine, "a", PLAIN, turns=4)
            return log, engine.stats

    log, stats = asyncio.run(run())
    last, _, completion = log[-1]
    # Everything but sampled tokens once, and each turn's last sampled token with the reply.
    sampled = sum(len(c.token_ids) for _, _, c in log)
    context = len(last) - (sampled - len(completion.token_ids))
    assert stats.prefilled_tokens == context + len(log) - 1
    assert stats.decoded_tokens == stats.decode_steps == sampled


@pytest.mark.parametrize(
    ("settings", "copied", "prefilled"),
    [
        ({}, 21 + 20, 22 + 1 + 1 + 3),  # a1 from a0, and b0 its system message
        ({"share_prefix": False}, 0, 22 + 22 + 21 + 3),
    ],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_shared_beginning_is_prefilled_once(deterministic, settings, copied, prefilled):
    model = sharp_model()
    system = [3 + i % 20 for i in range(20)]
    prompts = {"a0": [*system, 5, 6], "a1": [*system, 5, 6], "b0": [*system, 7], "c0": [9, 8, 7]}
    samplings = {name: replace(MIXED[0], seed=i, max_tokens=6) for i, name in enumerate(prompts)}

    async def run():
        async with running(model, **settings) as engine:
            if deterministic:
                engine.expect(list(prompts))
            work = (
                engine.generate(ids, samplings[name], session=name) for name, ids in prompts.items()
            )
            return await asyncio.gather(*work), engine.stats

    completions, stats = asyncio.run(run())
    for (name, ids), completion in zip(prompts.items(), completions, strict=True):
        expected = expected_logprobs(model, ids, completion, samplings[name])
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert (stats.copied_tokens, stats.prefilled_tokens) == (copied, prefilled)


def test_a_session_whose_ids_do_not_extend_its_cache_is_prefilled_anew():
    model = sharp_model()

    async def run():
        async with running(model) as engine:
            first = await engine.generate([5, 6, 7, 8], PLAIN, session="a")
            other = [5, 6, 9, 8, *first.token_ids, 11]
            second = await engine.generate(other, PLAIN, session="a")
            return other, second, engine.stats.prefilled_tokens

    other, second, prefilled = asyncio.run(run())
    assert prefilled == 4 + len(other)
    assert second.logprobs == pytest.approx(
        expected_logprobs(model, other, second, PLAIN), abs=1e-4
    )


def test_a_released_session_starts_anew():
    async def run():
        async with running(sharp_model()) as engine:
            first = await engine.generate([5, 6, 7, 8], PLAIN, session="a")
            await engine.release("a")
            await engine.release("never seen")
            longer = [5, 6, 7, 8, *first.token_ids, 9]
            await engine.generate(longer, PLAIN, session="a")
            return len(longer), engine.stats.prefilled_tokens

    longer, prefilled = asyncio.run(run())
    assert prefilled == 4 + longer


def test_evicted_sessions_go_on_correctly():
    model = sharp_model()

    async def run():
        async with running(model, max_rows=2) as engine:
            pause = random.Random(0)
            work = (converse(engine, f"s{i}", MIXED[0], pause=pause) for i in range(6))
            logs = await asyncio.gather(*work)
            return logs, engine.stats.evictions

    logs, evictions = asyncio.run(run())
    assert evictions > 0
    for prompt, sampling, completion in [turn for log in logs for turn in log]:
        expected = expected_logprobs(model, prompt, completion, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_completion_ends_with_the_first_of_several_stop_ids():
    async def run():
        async with running(sharp_model()) as engine:
            free = await engine.generate([5, 6], replace(PLAIN, max_tokens=12), session="a")
            stops = (free.token_ids[8], free.token_ids[5], 1)
            first = next(i for i, token in enumerate(free.token_ids) if token in stops)
            asked = replace(PLAIN, max_tokens=12, stop_token_ids=stops)
            return free, first, await engine.generate([5, 6], asked, session="b")

    free, first, stopped = asyncio.run(run())
    assert (free.finish, len(free.token_ids)) == (Finish.length, 12)
    assert stopped.finish is Finish.stop
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.versions == ((0, first + 1),)


def test_the_budget_ends_with_the_context():
    async def run():
        async with running(sharp_model(), max_context=10) as engine:
            return await engine.generate(ids_of(0, 7), PLAIN, session="a")

    completion = asyncio.run(run())
    assert (completion.finish, len(completion.token_ids)) == (Finish.length, 3)


def test_a_long_prompt_is_prefilled_in_chunks(monkeypatch):
    monkeypatch.setattr("agenttrain.engines.transformers.decoder.CHUNK_TOKENS", 16)
    monkeypatch.setattr("agenttrain.engines.transformers.decoder.PASS_TOKENS", 24)
    model = sharp_model()

    async def run():
        async with running(model) as engine:
            prompts = [ids_of(n, n) for n in (5, 16, 17, 70, 12)]
            asked = (engine.generate(p, PLAIN, session=str(len(p))) for p in prompts)
            return list(zip(prompts, await asyncio.gather(*asked), strict=True))

    for prompt, completion in asyncio.run(run()):
        expected = expected_logprobs(model, prompt, completion, PLAIN)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_cancelling_frees_the_row_and_disturbs_nobody():
    model = sharp_model()

    async def run():
        async with running(model, max_rows=2) as engine:
            slow = replace(PLAIN, max_tokens=500)
            doomed = asyncio.create_task(engine.generate([5], slow, session="a"))
            other = asyncio.create_task(engine.generate([6], slow, session="b"))
            waiting = asyncio.create_task(engine.generate([7], PLAIN, session="c"))
            while engine.stats.decoded_tokens < 20:
                await asyncio.sleep(0.001)
            assert not waiting.done()
            doomed.cancel()
            third = await waiting
            assert not other.done()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return third, await engine.generate([5], PLAIN, session="a"), await other

    third, again, other = asyncio.run(run())
    assert len(other.token_ids) == 500
    for prompt, completion in (([7], third), ([5], again), ([6], other)):
        expected = expected_logprobs(model, prompt, completion, PLAIN)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_call_that_waits_while_its_session_is_released_fails():
    async def run():
        async with running(sharp_model()) as engine:
            slow = replace(PLAIN, max_tokens=500)
            task = asyncio.create_task(engine.generate([5], slow, session="a"))
            await asyncio.sleep(0)
            await engine.release("a")
            with pytest.raises(EngineError, match="released"):
                await task

    asyncio.run(run())


def test_after_an_update_in_place_no_cache_is_stale():
    model = sharp_model()

    async def run():
        async with running(model) as engine:
            first = await engine.generate([5, 6, 7], PLAIN, session="a")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            await engine.update((), version=3)
            longer = [5, 6, 7, *first.token_ids, 8]
            return longer, await engine.generate(longer, PLAIN, session="a")

    longer, second = asyncio.run(run())
    assert second.versions == ((3, 8),)
    assert second.logprobs == pytest.approx(
        expected_logprobs(model, longer, second, PLAIN), abs=1e-4
    )


def test_an_update_by_name_between_two_steps_of_a_completion():
    model, old = sharp_model(0), sharp_model(0)
    new = sharp_model(1)
    asked = replace(PLAIN, max_tokens=400)

    async def run():
        async with running(model) as engine:
            task = asyncio.create_task(engine.generate([5, 6], asked, session="a"))
            while engine.stats.decoded_tokens < 10:
                await asyncio.sleep(0.001)
            await engine.update(new.state_dict().items(), version=1)
            return await task

    completion = asyncio.run(run())
    (zero, before), (one, after) = completion.versions
    assert (zero, one, before + after) == (0, 1, 400)
    expected = expected_logprobs(old, [5, 6], completion, asked)[:before]
    expected += expected_logprobs(new, [5, 6], completion, asked)[before:]
    assert completion.logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"model.nope": torch.zeros(1)}, "unknown, e.g. model.nope"),
        (lambda s: s | {"model.norm.weight": torch.zeros(3)}, "another shape, e.g. model.norm"),
        (
            lambda s: {k: v for k, v in s.items() if k != "model.norm.weight"},
            "missing, e.g. model.norm",
        ),
    ],
)
def test_weights_are_checked_before_any_is_copied(change, message):
    model = sharp_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def run():
        async with running(model) as engine:
            with pytest.raises(EngineError, match=message):
                await engine.update(change(sharp_model(1).state_dict()).items(), 1)
            # One of two tied names is enough.
            tied = {k: v for k, v in before.items() if k != "lm_head.weight"}
            await engine.update(tied.items(), 1)

    asyncio.run(run())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_a_model_in_training_samples_without_dropout_and_stays_in_training():
    model = sharp_model(attention_dropout=0.5)
    model.gradient_checkpointing_enable()
    model.train()

    async def run():
        async with running(model) as engine:
            return await converse(engine, "a", PLAIN)

    log = asyncio.run(run())
    assert model.training
    model.eval()
    for prompt, sampling, completion in log:
        expected = expected_logprobs(model, prompt, completion, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def llama():
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        vocab_size=300,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


def gpt2():
    config = GPT2Config(n_embd=32, vocab_size=300, n_layer=2, n_head=4, initializer_range=0.4)
    return GPT2LMHeadModel(config).eval()


def eager_qwen():
    return sharp_model(attn_implementation="eager")


@pytest.mark.parametrize("build", [eager_qwen, llama, gpt2])
def test_other_models_and_eager_attention_are_served_too(build):
    torch.manual_seed(0)
    model = build()

    async def run():
        async with running(model) as engine:
            return await asyncio.gather(*(converse(engine, s, PLAIN) for s in "abc"))

    for prompt, sampling, completion in [turn for log in asyncio.run(run()) for turn in log]:
        expected = expected_logprobs(model, prompt, completion, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_under_autocast_updates_too_small_for_16_bits_change_nothing():
    """The trainer does not see them either: an engine that did would drift from it."""
    model = sharp_model()
    linear = [m.weight for n, m in model.named_modules() if "layers." in n and n.endswith("_proj")]

    def sample(mixed_precision):
        async def run():
            engine = TransformersEngine(model, mixed_precision=mixed_precision)
            try:
                return await engine.generate(ids_of(3, 20), PLAIN, session="a")
            finally:
                await engine.aclose()

        return asyncio.run(run())

    with torch.no_grad():
        for weight in linear:
            weight.copy_(weight.bfloat16())
        before = {name: sample(name) for name in ("no", "bf16")}
        for weight in linear:
            weight.mul_(1 + 2**-10)  # a quarter of the distance of two numbers of 8 bits
    after = {name: sample(name) for name in ("no", "bf16")}
    assert after["bf16"] == before["bf16"]
    assert after["no"].logprobs != before["no"].logprobs

    ids = [*ids_of(3, 20), *after["bf16"].token_ids]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=torch.tensor([ids])).logits[0, 19:-1].float()
    plain = logits.log_softmax(-1).gather(1, torch.tensor(ids[20:])[:, None])[:, 0]
    assert list(after["bf16"].logprobs) == pytest.approx(plain.tolist(), abs=0.25)
