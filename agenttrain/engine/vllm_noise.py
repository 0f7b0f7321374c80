"""The noise of requests with seeds on CPU, asked of their generators many steps at a time."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

AHEAD = 64
"""Numbers drawn at once."""
BOUND = 2**31
"""Of a number, as vLLM draws it."""

Ahead = WeakKeyDictionary[Generator, list[int]]
"""Numbers that a request's generator was asked for, the next one last."""


def draw_ahead(llm: Any) -> None:
    """Sample the same tokens as vLLM 0.32, at less cost.

    At every step its `TopKTopPSampler.forward_cpu` asks each row's generator for one number, by
    three operations of torch: a twentieth of a step of 64 rows of a small model. Numbers drawn
    ahead are the same in the same order; of requests without a seed the noise may be another. Where
    vLLM samples another way, nothing changes.
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
    ahead: Ahead,
    logits: Tensor,
    generators: dict[int, Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `forward_cpu`: a token of each row of logits [rows, vocabulary], and all logprobs."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p).float()
    rows = len(logits)
    # Those without a seed share torch's own generator.
    seeds = [0] * rows if len(generators) == rows else torch.randint(0, BOUND, (rows,)).tolist()
    for row, generator in generators.items():
        numbers = ahead.get(generator)
        if not numbers:
            numbers = torch.randint(0, BOUND, (AHEAD,), generator=generator).tolist()[::-1]
            ahead[generator] = numbers
        seeds[row] = numbers.pop()
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds)), logprobs
