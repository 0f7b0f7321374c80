"""The sampling noise of vLLM's requests on CPU: from all bits of their seeds, and cheap."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

Noises = WeakKeyDictionary[Generator, Random]
"""A request's noise by the generator that vLLM made for it."""


def use_whole_seeds(llm: Any) -> None:
    """Sample each request by all 63 bits of its seed, at less cost than vLLM 0.32 by 32 of them.

    At every step its `TopKTopPSampler.forward_cpu` asks each row's generator for a number of 31
    bits, by three operations of torch: a twentieth of a step of 64 rows of a small model. That
    generator reads the lower 32 bits of its seed on a CPU (all of them on a GPU). Of requests
    without a seed the noise is torch's own. Where vLLM samples another way, nothing changes.
    """
    runner = llm.model_executor.driver_worker.worker.model_runner
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)  # its second runner has another
    if (
        sampler is not None
        and sampler.forward == sampler.forward_cpu
        and sampler.logprobs_mode == "processed_logprobs"
        and not sampler.use_fp64_gumbel
    ):
        sampler.forward = partial(_sample, WeakKeyDictionary())


def _sample(
    noises: Noises,
    logits: Tensor,
    generators: dict[int, Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do as `forward_cpu`: a token of each row of logits [rows, vocabulary], and all logprobs."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p).float()
    rows = len(logits)
    # Those without a seed share torch's own generator.
    seeds = [0] * rows if len(generators) == rows else torch.randint(2**31, (rows,)).tolist()
    for row, generator in generators.items():
        noise = noises.get(generator)
        if noise is None:
            noise = noises[generator] = Random(generator.initial_seed())
        seeds[row] = noise.getrandbits(63)
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds)), logprobs
