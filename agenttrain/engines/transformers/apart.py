"""engine=transformers in the rollout process: a copy of the model, to which weights are sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from agenttrain.engines.language_model import model_class
from agenttrain.engines.mixers import keep_float32
from agenttrain.engines.spec import EngineInputs
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.training.config import WeightSyncMode

SMALL = 10_000_000
"""Parameters below which one thread is faster than several on a CPU."""


class TransformersCopy(TransformersEngine):
    """A `Separate` `TransformersEngine`: weights are sent to it, also while it samples.

    Every token carries the version of the weights that gave its logits. `weight_sync.mode` decides
    about sequences in flight:

    - drain: the update waits for the turns that decode, and new turns wait for the update;
    - abort_resume: they go on, and the new weights read all of their tokens again;
    - in_flight: they go on with their KV cache, now of both weights, and no other sequence copies
      it.
    """

    takes_adapters = False
    model_names = True  # `ModelNames`: weights come by their names in the model

    def __init__(
        self,
        model: Any,
        settings: TransformersSettings,
        mode: WeightSyncMode,
        mixed_precision: str = "no",
        record_routes: bool = False,
    ) -> None:
        """`mode` is weight_sync.mode. The other arguments are those of `TransformersEngine`."""
        super().__init__(
            model, settings, mixed_precision=mixed_precision, record_routes=record_routes
        )
        self._mode = mode

    @property
    def dtype(self) -> torch.dtype:
        """Implement `OwnNumberFormat.dtype`."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all weights, by their names in the model, between two steps."""
        tensors = await asyncio.to_thread(dict, weights)  # they may be read from files

        def load() -> None:
            self._model.load_state_dict(tensors)
            keeps_cache = self._mode is WeightSyncMode.in_flight
            # The weights are loaded: this sets the version and, unless it is kept, drops the cache.
            self._worker.update(weights={}, version=version, keeps_cache=keeps_cache)

        drained = self._mode is WeightSyncMode.drain
        await self._run_between_steps(load, f"update to version {version}", drained=drained)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Implement `Separate.score`, between two steps."""
        score = partial(self._score, torch.tensor([token_ids]))
        scores: list[float] = await self._run_between_steps(score, "the score of the probe")
        return scores

    def _score(self, ids_1T: Tensor) -> list[float]:
        ids_1T = ids_1T.to(self._model.device)
        with self._worker.decoder.evaluating():
            logits_TV = self._model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
        return logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()

    async def sleep(self) -> None:
        """Do nothing: the copy uses no device of the trainer's process."""


def build_copy(settings: TransformersSettings, inputs: EngineInputs) -> TransformersCopy:
    """Build the engine of a rollout process, on the first GPU after the trainers'.

    Its copy of the policy has random weights until the trainer sends the first version.
    """
    architecture = AutoConfig.from_pretrained(inputs.model)
    dtype = getattr(torch, inputs.dtype)
    # Trainers have GPUs 0, 1, …. If there is none after them, share GPU 0: on a machine with one
    # GPU it is the trainer's too.
    device = f"cuda:{inputs.trainers % torch.cuda.device_count()}" if inputs.on_gpu else "cpu"
    # Random and not empty: the engine checks its cache with a forward pass of these weights. They
    # are drawn on the device, as a CPU takes a minute per billion. `fork_rng` restores the random
    # generators, so that later seeded draws do not depend on this.
    gpus = [device] if inputs.on_gpu else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        model = model_class(architecture.model_type).from_config(architecture, dtype=dtype)
    keep_float32(model)
    model = model.eval().requires_grad_(False).to(device)
    # On a CPU one thread is faster than several for a small model.
    is_small = model.num_parameters() < SMALL
    if is_small and not inputs.on_gpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return TransformersCopy(
        model, settings, inputs.sync_mode, inputs.mixed_precision, inputs.record_routes
    )
