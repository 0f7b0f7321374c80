"""Parts of scripts/bench/fleet.py: servers as a run has them, rollouts of random ids, models."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.spec import EngineInputs
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.server_engine import VllmServerEngine
from agenttrain.engines.vllm_server.starting import build
from agenttrain.training.config import Transport, WeightSyncMode
from agenttrain.training.weight_sync import named_weights, policy_logprobs

CONTEXT, EQUAL = 1024, 1e-4
LONG = 32_768
"""Tokens of a long prompt."""
TEXT = [7 + n % 90 for n in range(60)]
"""The probe."""
PATIENT_S = 120.0
"""servers.dead_s where deaths are meant."""
Turn = tuple[list[int], Any]


class Fleet:
    """Servers of a model, as a run has them."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        source: Path,
        count: int,
        *,
        by: int = 1,
        dead_s: float = PATIENT_S,
        context: int = CONTEXT,
    ) -> None:
        """Start them; `by`: workers of each."""
        folder.mkdir()
        inputs = EngineInputs(
            policy=None,
            model=source,
            dtype="float32",
            adapters=None,
            tokenizer=None,
            sync_mode=WeightSyncMode.drain,
            sync_folder=None,
            transport=Transport.auto,
            servers=ServersConfig(count=count, tensor_parallel_size=by, restarts=9, dead_s=dead_s),
            seed=0,
            on_gpu=False,
            rank=0,
            run_folder=folder,
        )
        settings = VllmServerSettings(max_context=context, kv_cache_mb=256, max_rows=128)
        engine = build(settings, inputs)
        assert isinstance(engine, VllmServerEngine)
        self.engine, self.model, self.version = engine, model, -1

    async def sync(self) -> float:
        """Send the policy's weights to all servers; return the seconds."""
        self.version += 1
        expected = policy_logprobs(self.model, TEXT)

        def problem(scores: Sequence[float]) -> str | None:
            gap = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            return None if gap <= EQUAL else f"a gap of {gap:.3g}"

        begun = time.monotonic()
        await self.engine.update(named_weights(self.model), self.version)
        await self.engine.verify(TEXT, problem)
        return time.monotonic() - begun

    async def all_live(self) -> None:
        """Wait until every server serves."""
        while any(one.state is not MemberState.live for one in self.engine.fleet.members):
            await asyncio.sleep(0.1)


async def rollout(
    engine: Any, number: int, *, turns: int, tokens: int, temperature: float, length: int = 61
) -> list[Turn]:
    """Return prompt and completion of each turn; the first prompt has `length` ids, replies 20."""
    noise = random.Random(number)
    ids = [100 + number % 400] + [7 + (number // 4 + n) % 90 for n in range(length - 1)]
    done = []
    for turn in range(turns):
        sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=100 * number + turn)
        completion = await engine.generate(ids, sampling, session=f"rollout-{number}")
        done.append((list(ids), completion))
        ids += [*completion.token_ids, *(noise.randrange(7, 300) for _ in range(20))]
    await engine.release(f"rollout-{number}")
    return done


async def step(engine: Any, count: int, first: int = 0, **shape: Any) -> list[list[Turn]]:
    """Return the rollouts of a step, those with the numbers from `first` on."""
    shape = {"turns": 2, "tokens": 100, "temperature": 1.0, **shape}
    numbers = range(first, first + count)
    return await asyncio.gather(*(rollout(engine, number, **shape) for number in numbers))


def exactness(model: Any, one: list[list[Turn]], other: list[list[Turn]]) -> dict[str, float]:
    """Compare rollouts up to the first token that rounding may decide."""
    equal, gap = 0, 0.0
    for ours, theirs in zip(one, other, strict=True):
        good = True
        for (ids, a), (_, b) in zip(ours, theirs, strict=True):
            pairs = list(zip(a.token_ids, b.token_ids, strict=True))
            same = next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))
            logprobs = list(zip(a.logprobs, b.logprobs, strict=True))[:same]
            gap = max([gap, *(abs(x - y) for x, y in logprobs)])
            if same < len(pairs):
                with torch.no_grad():
                    seen = torch.tensor([[*ids, *a.token_ids[:same]]])
                    best = model(seen).logits[0, -1].topk(2).values
                good = (best[0] - best[1]).item() < EQUAL
                break  # the next turns have other prompts
        equal += good
    return {"http_vs_inprocess_ids_equal": equal / len(one), "max_dlogp": gap}


def big_model(folder: Path) -> Any:
    """Save and return a random model of 0.5 GB in float32."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return saved_model(config, folder)


def long_model(folder: Path) -> Any:
    """Save and return a small random model whose context has room for LONG tokens."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LONG + CONTEXT,
        rope_theta=1e6,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return saved_model(config, folder)


def saved_model(config: Qwen3Config, folder: Path) -> Any:
    """Save and return a random model in float32."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model
