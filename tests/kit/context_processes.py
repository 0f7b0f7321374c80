"""Run by torchrun in each process: packed trees over several processes against one.

``context_processes.py <family>…`` tells, from the first process, the largest differences of hidden
states and gradients from those of one process, relative, for each family and layout, and
``context_processes.py --bytes`` what was sent beside the formula, and ``context_processes.py
--blamed <mode> <folder>`` who is named for an update that is not finite, and
``context_processes.py --refused`` the error of each process if the last one's states are wrong.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from packing_families import tiny_family
from process_states import blamed
from recurrent_families import RECURRENT, tiny_recurrent
from torch import Tensor
from torchrun import tell
from transformers import PreTrainedModel

from agenttrain.launch.worker import leave
from agenttrain.training.attention import packing
from agenttrain.training.batch import stand_in
from agenttrain.training.config import ActivationCheckpointing
from agenttrain.training.context_group import ContextGroup
from agenttrain.training.context_parallel import pack_together
from agenttrain.training.context_tree import split_tree
from agenttrain.training.logprobs import (
    TRIAL,
    Scorer,
    UnsupportedModel,
    check_context,
    packed_hidden,
)
from agenttrain.training.recomputation import recomputed_modules, recomputing
from agenttrain.training.segments import Segment
from agenttrain.training.world import World
from agenttrain.utils.exit_codes import DONE

# Lengths, each with the index of its parent: those of the packing tests, and one long rollout.
TREE = (
    *((65, None), (64, None), (2, None), (130, 1), (1, 1), (63, 2)),
    *((1, 2), (3, 4), (1, 4)),
)
LAYOUTS = {
    "tree": TREE,
    "long": ((250, None),),
    "one_after_the_other": ((90, None), (40, None), (40, None), (7, None)),
    "short": ((2, None), (1, 0), (9, 0), (1, 2)),
}


def segments_of(layout: tuple[tuple[int, int | None], ...]) -> tuple[Segment, ...]:
    """Segments one after the other, with their parents."""
    segments: list[Segment] = []
    for length, parent in layout:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, length, None if parent is None else segments[parent]))
    return tuple(segments)


def compare(
    model: PreTrainedModel, segments: tuple[Segment, ...], group: ContextGroup
) -> dict[str, float]:
    """The largest relative differences from one process."""
    tokens = segments[-1].end
    drawn = torch.Generator().manual_seed(4)
    ids_T = torch.randint(3, 64, (tokens,), generator=drawn)
    weights_TH = torch.randn(tokens, model.config.hidden_size, generator=drawn)
    split = split_tree(segments, group)
    own_t = split.tree.packed_positions()
    with packing(model):  # the backward pass too: checkpointed layers run there again
        model.zero_grad()
        whole_TH = packed_hidden(model, ids_T, segments)
        (whole_TH * weights_TH).sum().backward()
        expected = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
        model.zero_grad()
        part_tH = packed_hidden(model, ids_T[own_t], segments, split=split)
        (part_tH * weights_TH[own_t]).sum().backward()
    group.add_gradients(model)
    found = {name: w.grad for name, w in model.named_parameters() if name in expected}
    return {
        "hidden": gap(part_tH, whole_TH[own_t]),
        "gradient": max(gap(found[name], expected[name]) for name in expected),
    }


def gap(tensor: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest number."""
    return float((tensor - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def family(name: str, group: ContextGroup) -> dict[str, float]:
    """The largest differences of a family over all layouts; of all processes."""
    model = tiny_recurrent(name) if name in RECURRENT else tiny_family(name)
    level = ActivationCheckpointing.all if name == "Qwen3" else ActivationCheckpointing.none
    with recomputing(recomputed_modules(model, level)):
        results = [
            compare(model, segments_of(layout), group)
            for layout in LAYOUTS.values()
            if layout[0][0] < model.config.max_position_embeddings
        ]
    worst = torch.tensor([max(one[key] for one in results) for key in ("hidden", "gradient")])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(("hidden", "gradient"), worst.tolist(), strict=True))


def sent(group: ContextGroup, world: World) -> dict[str, int]:
    """Bytes of one update of 300 tokens, and what the formula says."""
    model = tiny_family("Qwen2")  # 2 layers, 2 heads of 8 for keys and values, float32
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, defer=True)
    scorer.choose_layout(torch.device("cpu"), world, context=group)
    targets_S = torch.arange(40, 299)
    ids_T = torch.arange(300) % 61 + 3
    rollout = replace(
        stand_in(), token_ids_T=ids_T, targets_S=targets_S, behaviour_S=torch.zeros(259)
    )
    own = [rollout] if world.is_main else []
    (microbatch,) = pack_together(scorer.pack, own, 100, torch.device("cpu"), group)
    before = group.sent_bytes
    with scorer.ready():
        logprobs_S, _ = scorer(microbatch)
        logprobs_S.sum().backward()
    counted = int(world.sum(group.sent_bytes - before))
    width = 2 * (8 + 8)
    # Keys and values make n - 1 hops in each of the two passes, their gradients n.
    hops = 2 * (group.size - 1) + group.size
    return {
        "sent": counted,
        "formula": 2 * 300 * width * 4 * hops,  # 2 layers, 4 bytes a number
        "logprobs": len(logprobs_S),
    }


def refused(group: ContextGroup, world: World) -> dict[str, str]:
    """The error of the trial if the last process has wrong states of its own tokens."""
    model = tiny_family("Qwen2")
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, defer=True)
    tokens = TRIAL[-1].end
    if world.rank == world.size - 1:
        model.model.norm.register_forward_hook(
            lambda _, __, states: states + float(states.shape[1] < tokens)
        )
    try:
        check_context(scorer, None, torch.device("cpu"), group, world)
    except UnsupportedModel as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    """The families of the command line, the bytes, who is blamed, or what is refused."""
    world = World.start()
    if sys.argv[1] == "--blamed":
        results: dict = blamed(sys.argv[2], world, Path(sys.argv[3]))
    elif sys.argv[1] == "--refused":
        tell(world.rank, refused(ContextGroup(world, world.size), world))
        return
    elif sys.argv[1] == "--bytes":
        results = sent(ContextGroup(world, world.size), world)
    else:
        group = ContextGroup(world, world.size)
        results = {name: family(name, group) for name in sys.argv[1:]}
    if world.is_main:
        tell(world.rank, results)


if __name__ == "__main__":
    main()
    leave(DONE)
