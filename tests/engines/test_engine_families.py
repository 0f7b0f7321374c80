"""The transformers engine on models with windows and states, against plain forward passes.

Tiny random models whose states remember, and whose windows hold 8 tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers
from engine_kit import running
from packing_families import FAMILIES, WINDOW, tiny_family
from recurrent_families import RECURRENT, UNWRAPPED, family_params, tiny_recurrent
from transformers import DynamicCache

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.mixers import ADAPTERS
from agenttrain.engines.transformers.apart import TransformersCopy
from agenttrain.engines.transformers.cache import RowCache
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.transformers.layers import LayerKind
from agenttrain.engines.transformers.scheduler import Seat
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion

SLIDING = [name for name, settings in FAMILIES.items() if "sliding_window" in settings]
NAMES = family_params((*RECURRENT, *SLIDING))
ONE_OF_EACH = ("Qwen3_5", "Lfm2", "Bamba", "Zamba2", "Gemma3")
"""A delta rule, a convolution, a Mamba2, one beside attention in a layer, and a window."""
EXPERTS = {"Qwen3_5Moe", "Qwen3Next", "KimiLinear", "Lfm2Moe", "GraniteMoeHybrid", "NemotronH"}
EXPERTS |= {"GptOss", "Mixtral", "Phimoe", "Qwen2Moe", "Qwen3Moe", "Glm4Moe", "DeepseekV3"}


def model_of(name: str) -> torch.nn.Module:
    return tiny_recurrent(name) if name in RECURRENT | UNWRAPPED else tiny_family(name)


def tolerance(name: str) -> float:
    """Routes of experts near a tie turn on the last bits."""
    return 3e-4 if name in EXPERTS else 1e-4


def ids_of(seed: object, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(3, 64) for _ in range(count)]


def plain_logprobs(model, ids: Sequence[int], first: int) -> list[float]:
    """Of ids[first:], by one forward pass without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()


def assert_plain(model, prompt: Sequence[int], completion: Completion, gap: float = 1e-4) -> None:
    expected = plain_logprobs(model, [*prompt, *completion.token_ids], len(prompt))
    assert completion.logprobs == pytest.approx(expected, abs=gap)


async def converse(engine, session: str, lengths: Sequence[int], tokens: int = 4):
    """Turns whose context grows by these numbers of ids: [(ids sent, completion)]."""
    ids, log = [], []
    for turn, length in enumerate(lengths):
        ids += ids_of(f"{session} {turn}", length)
        sampling = Sampling(max_tokens=tokens, seed=turn)
        completion = await engine.generate(ids, sampling, session=session)
        log.append((list(ids), completion))
        ids += completion.token_ids
    return log


@pytest.mark.parametrize("name", [*NAMES, *(name for name in FAMILIES if name not in SLIDING)])
def test_logprobs_agree_with_a_plain_forward_pass(name: str) -> None:
    """Ragged prefills, decoding past two windows, and replies around a chunk of 64 tokens."""
    model = model_of(name)
    turns = {"a": (70, 1, 63), "b": (3, 64), "c": (1, 65), "d": (2, 1, 1)}

    async def run():
        async with running(model) as engine:
            work = (converse(engine, s, own, 2 * WINDOW + 4) for s, own in turns.items())
            return await asyncio.gather(*work), engine.stats

    logs, stats = asyncio.run(run())
    for prompt, completion in [turn for log in logs for turn in log]:
        assert_plain(model, prompt, completion, tolerance(name))
    # Every id of a context once, and each turn's last sampled id with the next reply. A prompt of
    # one id is decoded.
    assert stats.prefilled_tokens == 70 + 1 + 63 + 3 + 64 + 65 + 2 + 1 + 1 + 6


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_copied_where_it_stands(name: str) -> None:
    model = model_of(name)
    system = ids_of("system", 20)
    group = [*system, 5, 6]
    prompts = {"a0": group, "a1": group, "a2": group, "b0": [*system, 7, 8, 9], "c0": [9, 8, 7]}
    sampling = Sampling(max_tokens=10, seed=3)

    async def run():
        async with running(model) as engine:
            engine.expect(list(prompts))
            work = (engine.generate(ids, sampling, session=name) for name, ids in prompts.items())
            return await asyncio.gather(*work), engine.stats

    completions, stats = asyncio.run(run())
    for ids, completion in zip(prompts.values(), completions, strict=True):
        assert_plain(model, ids, completion, tolerance(name))
    # a0 pauses after 20 ids, which b0 copies, and after 21, which a1 and a2 copy.
    assert stats.copied_tokens == 20 + 21 + 21
    assert stats.prefilled_tokens == 22 + 1 + 1 + 3 + 3


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_session_that_extends_an_idle_one_continues_from_its_row(name: str) -> None:
    model = model_of(name)

    async def run():
        async with running(model) as engine:
            ((sent, first),) = await converse(engine, "a", (30,), 20)
            known = [*sent, *first.token_ids]
            fork = [*known, *ids_of("fork", 9)]
            other = [*known, *ids_of("other", 5)]
            parted = [*known[:40], *ids_of("parted", 5)]  # ends before the row does
            asked = [("fork", fork), ("a", other), ("parted", parted)]
            turns = [
                (ids, await engine.generate(ids, Sampling(max_tokens=9, seed=1), session=session))
                for session, ids in asked
            ]
            return turns, engine.stats.copied_tokens

    turns, copied = asyncio.run(run())
    for ids, completion in turns:
        assert_plain(model, ids, completion)
    assert copied == 30 + 19  # the last sampled id was never fed


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_session_that_goes_back_is_prefilled_anew(name: str) -> None:
    """As by a template that drops what was thought."""
    model = model_of(name)

    async def run():
        async with running(model) as engine:
            ((sent, first),) = await converse(engine, "a", (30,), 20)
            back = [*sent[:25], *first.token_ids[10:], *ids_of("back", 3)]
            completion = await engine.generate(back, Sampling(max_tokens=9), session="a")
            return back, completion, engine.stats.prefilled_tokens

    back, completion, prefilled = asyncio.run(run())
    assert_plain(model, back, completion)
    assert prefilled == 30 + len(back)


@pytest.mark.parametrize("max_rows", [2, 5])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_rows_move_and_are_evicted_with_their_states(name: str, max_rows: int) -> None:
    model = model_of(name)

    async def run():
        async with running(model, max_rows=max_rows) as engine:
            work = (converse(engine, f"s{n}", (9 * n + 1, n + 1, 3), n + 2) for n in range(6))
            return await asyncio.gather(*work), engine.stats.evictions

    logs, evictions = asyncio.run(run())
    assert evictions > 0
    for prompt, completion in [turn for log in logs for turn in log]:
        assert_plain(model, prompt, completion)


async def in_lockstep(model, turns: dict[str, tuple[Sequence[int], int]]):
    """Converse in sessions that are all expected: {session: (lengths, tokens of a turn)}."""

    async def one(engine, session: str):
        log = await converse(engine, session, *turns[session])
        await engine.release(session)
        return log

    async with running(model) as engine:
        engine.expect(list(turns))
        logs = await asyncio.gather(*(one(engine, session) for session in turns))
    return [turn for log in logs for turn in log]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_idle_row_moves_with_its_states(name: str) -> None:
    """`a` ends first. `d` takes its row, and `a` goes on from where `d` was."""
    model = model_of(name)
    turns = {"a": ((9, 5), 2), **dict.fromkeys("bcd", ((9, 5), 14))}
    for prompt, completion in asyncio.run(in_lockstep(model, turns)):
        assert_plain(model, prompt, completion)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_each_pass_has_its_own_padding(name: str) -> None:
    """Passes of one shape follow one another: `a` is fed 3, 6 and 4 ids, and `b` 6, 4 and 6."""
    model = model_of(name)
    turns = {"a": ((3, 5, 3), 1), "b": ((6, 3, 5), 1)}  # each turn but the first feeds one id more
    for prompt, completion in asyncio.run(in_lockstep(model, turns)):
        assert_plain(model, prompt, completion)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_a_much_longer_one(name: str) -> None:
    model = model_of(name)

    async def run(sessions):
        async with running(model) as engine:
            return (await asyncio.gather(*(converse(engine, *own) for own in sessions)))[0]

    short, long = ("short", (2, 1)), ("long", (150, 40))
    for (_, alone), (_, beside) in zip(
        asyncio.run(run([short])), asyncio.run(run([short, long])), strict=True
    ):
        assert alone.token_ids == beside.token_ids
        assert alone.logprobs == pytest.approx(beside.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_long_prompt_is_prefilled_in_chunks(name: str, monkeypatch) -> None:
    monkeypatch.setattr("agenttrain.engines.transformers.decoder.CHUNK_TOKENS", 16)
    monkeypatch.setattr("agenttrain.engines.transformers.decoder.PASS_TOKENS", 24)
    model = model_of(name)

    async def run():
        async with running(model) as engine:
            lengths = (5, 16, 17, 70, 12)
            return await asyncio.gather(*(converse(engine, str(n), (n,), 9) for n in lengths))

    for ((prompt, completion),) in asyncio.run(run()):
        assert_plain(model, prompt, completion)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_after_an_update_in_place_rows_are_computed_anew(name: str) -> None:
    """Both by the session that has the row, and by another one that might copy it."""
    model = model_of(name)

    async def run():
        async with running(model) as engine:
            ((sent, first),) = await converse(engine, "a", (30,), 20)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            await engine.update((), version=1)
            ids = [*sent, *first.token_ids, 7, 8]
            sampling = Sampling(max_tokens=9, seed=1)
            return ids, [await engine.generate(ids, sampling, session=s) for s in ("b", "a")]

    ids, completions = asyncio.run(run())
    for completion in completions:
        assert_plain(model, ids, completion)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_rows_go_on_with_the_states_of_older_weights_and_no_other_copies_them(name: str) -> None:
    old, new = model_of(name), model_of(name)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.05)
    prompt = ids_of("kept", 30)

    async def run():
        settings = TransformersSettings(max_context=200)
        engine = TransformersCopy(model_of(name), settings, WeightSyncMode.in_flight)
        try:
            await engine.update(old.state_dict().items(), 1)
            first = await engine.generate(prompt, Sampling(max_tokens=20, seed=1), session="a")
            await engine.update(new.state_dict().items(), 2)
            ids = [*prompt, *first.token_ids, 7, 8]
            other = await engine.generate(ids, Sampling(max_tokens=5), session="b")
            copied = engine.stats.copied_tokens
            return (
                ids,
                other,
                await engine.generate(ids, Sampling(max_tokens=5), session="a"),
                copied,
            )
        finally:
            await engine.aclose()

    ids, other, kept, copied = asyncio.run(run())
    assert copied == 0
    assert_plain(new, ids, other)
    # The same by transformers' cache: all but the last sampled id by the old weights.
    text = [*ids, *kept.token_ids]
    cache = DynamicCache(config=old.config)

    def feed(model, start: int, end: int) -> torch.Tensor:
        new_ids, positions = torch.tensor([text[start:end]]), torch.arange(start, end)[None]
        with torch.no_grad():
            output = model(input_ids=new_ids, position_ids=positions, past_key_values=cache)
        return output.logits[0, -1]

    feed(old, 0, 49)
    logits = [feed(new, 49, 52), *(feed(new, end - 1, end) for end in range(53, 57))]
    logprobs = torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(text[52:])[:, None])
    assert kept.logprobs == pytest.approx(logprobs[:, 0].tolist(), abs=1e-4)
    assert abs(kept.logprobs[0] - plain_logprobs(new, text, len(ids))[0]) > 1e-3


@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2", "Bamba", "Gemma3"])
def test_in_bfloat16_recurrent_states_stay_in_float32(name: str) -> None:
    model = model_of(name).bfloat16()

    async def run():
        async with running(model) as engine:
            return await converse(engine, "a", (70, 9), 30), engine._worker.decoder.cache

    log, cache = asyncio.run(run())
    for prompt, completion in log:
        expected = plain_logprobs(model, [*prompt, *completion.token_ids], len(prompt))
        gaps = torch.tensor(completion.logprobs) - torch.tensor(expected)
        assert gaps.abs().mean() < 0.05
    formats = {tensor.dtype for layer in cache.layers for tensor in layer.by_row(1)}
    recurrent = {torch.float32} if name in ("Qwen3_5", "Bamba") else set()
    assert formats == {torch.bfloat16} | recurrent


@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2", "Gemma3"])
def test_a_run_in_lockstep_repeats_to_the_bit(name: str) -> None:
    model = model_of(name)

    async def run(seed: int):
        pause = random.Random(seed)

        async def one(engine, session: str):
            await asyncio.sleep(pause.random() * 0.01)
            log = await converse(engine, session, (int(session) * 7 + 2, 5), 9)
            await engine.release(session)
            return log

        async with running(model, max_rows=3) as engine:
            sessions = [str(n) for n in range(5)]
            engine.expect(sessions)
            return await asyncio.gather(*(one(engine, session) for session in sessions))

    assert asyncio.run(run(0)) == asyncio.run(run(1))


@pytest.mark.parametrize(
    ("kind", "copied"),
    [
        (LayerKind(keys=True), 30),  # all keys: the row can be cut
        (LayerKind(keys=True, window=8), 0),
        (LayerKind(state_count=1), 0),
        (LayerKind(keys=True, state_count=1), 0),
    ],
)
def test_only_rows_of_all_keys_are_copied_in_part(kind: LayerKind, copied: int) -> None:
    """Two sessions may ask for one prompt that extends a copied row by a single id."""
    cache = RowCache([kind], max_rows=4, max_length=64)
    cache.reserve(2, 40)
    source = Seat(session="a", order=0, row=0, history=np.arange(31), cached=31)
    seat = Seat(session="b", order=1, row=1, source=source, shared=30)
    assert cache.copy_prefixes([seat]) == seat.cached == copied
    source.cached = 30
    seat.source, seat.cached = source, 0
    assert cache.copy_prefixes([seat]) == seat.cached == 30


def test_a_ring_does_not_grow_beyond_its_window() -> None:
    model = model_of("Ministral")

    async def run():
        async with running(model) as engine:
            await converse(engine, "a", (70,), 5)
            return engine._worker.decoder.cache

    sliding, full = asyncio.run(run()).layers
    # A row, and the slot for padding; 2 heads of 8 numbers. Full rows grow by 128 tokens.
    assert tuple(sliding.keys.shape) == (WINDOW + 1, 2, 8)
    assert tuple(full.keys.shape) == (128 + 1, 2, 8)


def test_a_window_that_no_sequence_exceeds_is_full_attention() -> None:
    """Rows can then be cut: a later session copies a part of an active row."""
    model = model_of("Mistral")
    model.config.sliding_window = 64

    async def run(context):
        async with running(model, max_context=context) as engine:
            ((sent, _),) = await converse(engine, "a", (30,), 9)
            parted = [*sent[:25], 5, 6]
            completion = await engine.generate(parted, Sampling(max_tokens=9), session="b")
            return parted, completion, engine.stats.copied_tokens

    for context, expected in ((64, 25), (65, 0)):
        parted, completion, copied = asyncio.run(run(context))
        assert_plain(model, parted, completion)
        assert copied == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Jamba", "JambaForCausalLM differs from a plain forward pass"),
        ("MiniMax", "MiniMaxForCausalLM has recurrent layers whose scan takes no layout of rows"),
    ],
)
def test_recurrent_models_that_it_cannot_serve_are_refused(name: str, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        TransformersEngine(model_of(name))


def test_a_soft_cap_is_not_left_to_attention_that_ignores_it() -> None:
    model = tiny_family("Gemma2")
    model.config._attn_implementation = "sdpa"  # as transformers before 5.21 loads it
    TransformersEngine(model, TransformersSettings(max_context=128))
    assert model.config._attn_implementation == "eager"


def test_attention_in_chunks_is_refused() -> None:
    config = transformers.Llama4TextConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        intermediate_size_mlp=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        pad_token_id=0,
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    with pytest.raises(EngineError, match="has layers of chunked_attention, for which"):
        TransformersEngine(model, TransformersSettings(max_context=64))


@pytest.mark.parametrize(
    ("name", "function"),
    [("Qwen3_5", "torch_chunk_gated_delta_rule"), ("Bamba", "mamba2_chunk_scan")],
)
def test_the_check_finds_a_scan_that_padding_changes(name, function, monkeypatch) -> None:
    model = model_of(name)
    monkeypatch.setitem(
        ADAPTERS, function, lambda function, _, *args, **own: function(*args, **own)
    )
    module = __import__(type(model).__module__, fromlist=["_"])
    original = getattr(module, function)
    monkeypatch.setattr(module, function, getattr(original, "function", original))
    with pytest.raises(EngineError, match="differs from a plain forward pass by"):
        TransformersEngine(model)
