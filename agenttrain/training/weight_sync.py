"""The engine gets the policy's weights, and is asked whether it holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.config.schema import WeightSyncConfig
from agenttrain.engine.base import Engine, Separate
from agenttrain.training.lora import ADAPTER, adapter_weights, is_adapted
from agenttrain.training.policy import Policy
from agenttrain.training.sharded_state import is_sharded
from agenttrain.training.sharding import whole
from agenttrain.types import AgenttrainError

PROBE_TOKENS = 128
STEP = 7919
"""A prime: the probe's ids wander over the whole vocabulary."""
TOLERANCES = {torch.float32: 1e-3}
OTHER_TOLERANCE = 0.2
"""In bfloat16, where kernels differ by a rounding of 1/256 in every layer."""


class StaleWeights(AgenttrainError):
    """After a weight sync the engine does not sample from the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Log-probabilities of the fixed sequence after a weight sync."""

    policy_T: Tensor
    engine_T: Tensor


async def sync(
    policy: Policy,
    engine: Engine,
    version: int,
    config: WeightSyncConfig,
    before: Probed | None = None,
) -> Probed | None:
    """Every token that `engine` samples from now on is of weights `version`.

    An engine that samples from `policy.sampler` itself only forgets what it cached. One with
    weights of its own is sent them, and then scores a fixed sequence, which is returned:
    StaleWeights if the policy's log-probabilities of it are others, or if they moved since
    `before`, the sync before this one, and the engine's did not. All processes of a run do it
    together.
    """
    if not isinstance(engine, Separate):
        policy.refresh_sampler()
        await engine.update((), version)
        return None
    as_adapters = engine.takes_adapters and is_adapted(policy.model)
    await engine.update(
        adapter_weights(policy.model).items() if as_adapters else named_weights(policy.model),
        version,
    )
    probe_ids = probe(policy.model, engine.max_context)
    sharded = is_sharded(policy.model)
    expected_T = torch.tensor(
        policy.probe(probe_ids) if sharded else policy_logprobs(policy.model, probe_ids)
    )
    found = Probed(policy_T=expected_T, engine_T=torch.tensor(await engine.score(probe_ids)))
    tolerance = config.tolerance or TOLERANCES.get(policy.model.dtype, OTHER_TOLERANCE)
    _check_gap(found, version, tolerance)
    # Merged into weights of 16 bits, small changes of adapters are rounded away.
    if before and (as_adapters or not is_adapted(policy.model)):
        _check_moved(before, found, version)
    return found


def _check_gap(found: Probed, version: int, tolerance: float) -> None:
    gap_T = (found.engine_T - found.policy_T).abs()
    if not gap_T.max() <= tolerance:
        raise StaleWeights(
            f"weight sync {version}: the engine's log-probabilities of a fixed sequence differ "
            f"from the policy's by up to {gap_T.max().item():.3g} (mean {gap_T.mean().item():.3g}; "
            f"weight_sync.tolerance={tolerance:g}). It does not hold the policy's weights: do "
            "engine and trainer know the same model, in the same format (engine.vllm.quantization)?"
        )


def _check_moved(before: Probed, found: Probed, version: int) -> None:
    """One step changes little, less than kernels differ in bfloat16: but it changes something."""
    moved_T = (found.policy_T - before.policy_T).abs()
    if moved_T.count_nonzero() > len(moved_T) / 2 and torch.equal(found.engine_T, before.engine_T):
        raise StaleWeights(
            f"weight sync {version}: the policy's log-probabilities of a fixed sequence moved by "
            f"up to {moved_T.max().item():.3g} and the engine's not by a bit: the new weights did "
            "not reach it. resume=… engine=transformers goes on without it"
        )


async def rest(engine: Engine) -> None:
    """The policy is about to be updated: an engine that can gives its memory back."""
    if isinstance(engine, Separate):
        await engine.rest()


def probe(model: PreTrainedModel, max_context: int) -> list[int]:
    """A fixed sequence of ids from all over the vocabulary."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [index * STEP % vocabulary for index in range(1, min(PROBE_TOKENS, max_context - 1))]


def policy_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """Log-probability of every id after the first, by a plain forward pass."""
    training = model.training
    model.eval()
    ids_T = torch.tensor(token_ids, device=model.device)
    try:
        with torch.no_grad():
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    finally:
        model.train(training)
    return logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].tolist()


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight by the name that transformers saves it under, tied ones under each name.

    Adapters are merged, one weight at a time: the engine gets a model without them. Sharded weights
    are gathered one at a time: every process has to take them all.
    """
    modules = dict(model.named_modules()) if is_adapted(model) else {}
    for name, tensor in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if "lora_" in name:
            continue
        layer = modules.get(owner.removesuffix(".base_layer"))
        if isinstance(layer, LoraLayer) and kind == "weight":
            adapted: Any = layer  # peft's class for linear layers, which alone has the method
            tensor = tensor + adapted.get_delta_weight(ADAPTER).to(tensor.dtype)
        yield name.replace(".base_layer.", "."), whole(tensor.detach())
