"""Activations and messages of one long rollout over 1, 2 and 4 processes, over gloo.

A rollout of 32,768 tokens (with `--quick` 2,048), all but 256 of them sampled, through a random
model of 2 layers of hidden size 64 in float32: forward and backward, one thread each. Activations
are the bytes of distinct tensors that autograd saves for the backward pass, weights left out, of
the process with the most. The figures:

    activations_mb_plain           of one process without context parallel, whose attention on a
                                   CPU keeps a mask for every 256 queries; on a GPU it has none
    activations_mb_1               of one process by the same functions as several, without masks
    activations_over_share_<n>     of n processes, over activations_mb_1 / n
    sent_mb_<n>                    keys, values and their gradients that the processes send in all
    sent_over_formula_<n>          the same over `formula`
    seconds_<n>                    both passes; the processes share the machine's cores
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch

TOKENS, SHORT, PROMPT = 32_768, 2_048, 256
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": TOKENS,
}
MB = 1e6
PLAIN = "--plain"


def measure(quick: bool) -> dict[str, float]:
    """Measure 1, 2 and 4 processes."""
    tokens = SHORT if quick else TOKENS
    (plain,) = launched(1, tokens, PLAIN)
    (alone,) = launched(1, tokens)
    figures = {
        "activations_mb_plain": plain["saved"] / MB,
        "seconds_plain": plain["seconds"],
        "activations_mb_1": alone["saved"] / MB,
        "seconds_1": alone["seconds"],
    }
    for processes in (2, 4):
        found = launched(processes, tokens)
        saved = max(one["saved"] for one in found)
        sent = sum(one["sent"] for one in found)
        figures[f"activations_over_share_{processes}"] = saved / alone["saved"] * processes
        figures[f"sent_mb_{processes}"] = sent / MB
        figures[f"sent_over_formula_{processes}"] = sent / formula(tokens, processes)
        figures[f"seconds_{processes}"] = max(one["seconds"] for one in found)
    return figures


def formula(tokens: int, processes: int) -> int:
    """Return the bytes that the processes send in all layers: 4 for a number and a hop.

    Keys and values make n - 1 hops in each of the two passes, their gradients n.
    """
    width = 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    hops = 2 * (processes - 1) + processes
    return SHAPE["num_hidden_layers"] * tokens * width * 4 * hops


def launched(processes: int, tokens: int, *options: str) -> list[dict[str, float]]:
    """Run this script in some processes; return what each measured."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PROCESS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*launch, f"--nproc_per_node={processes}", __file__, str(tokens), folder, *options],
            check=True,
            env={**os.environ, **environment},
            stdout=sys.stderr,
        )
        return [json.loads(file.read_text()) for file in Path(folder).iterdir()]


def process(tokens: int, folder: Path, *, plain: bool) -> None:
    """Run both passes in this process, and write what they saved and sent."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agenttrain.training.batch import TrainingSequence
    from agenttrain.training.context_group import ContextGroup
    from agenttrain.training.logprobs import Scorer, pack_evenly
    from agenttrain.training.world import World

    world, cpu = World.start(), torch.device("cpu")
    group = None if plain else ContextGroup(world, world.size)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, defer=True)
    scorer.choose_layout(cpu, world, context=group)
    rollouts: list[TrainingSequence] = [rollout(tokens)] if world.is_main else []
    (microbatch,) = pack_evenly(scorer, rollouts, tokens, cpu, None, group)
    sent = 0 if group is None else group.sent_bytes  # by the trial
    started = time.perf_counter()
    with scorer.ready():
        saved, logprobs_S = saved_bytes(model, lambda: scorer(microbatch)[0])
        logprobs_S.sum().backward()
    figures = {
        "saved": saved,
        "sent": 0 if group is None else group.sent_bytes - sent,
        "seconds": time.perf_counter() - started,
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(figures))


def rollout(tokens: int) -> Any:
    """Return a rollout of that many tokens."""
    from dataclasses import replace

    from agenttrain.training.batch import stand_in

    targets_S = torch.arange(PROMPT - 1, tokens - 1)
    ids_T = torch.arange(tokens) * 7 % SHAPE["vocab_size"]
    behaviour_S = torch.zeros(len(targets_S))
    return replace(stand_in(), token_ids_T=ids_T, targets_S=targets_S, behaviour_S=behaviour_S)


def saved_bytes(model: torch.nn.Module, forward: Any) -> tuple[int, Any]:
    """Return the bytes that a forward pass saves for the backward pass, and its result."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    return sum(storage.nbytes() for storage in storages.values()), result


if __name__ == "__main__":
    if os.environ.get("PROCESS"):
        process(int(sys.argv[1]), Path(sys.argv[2]), plain=PLAIN in sys.argv)
    else:
        harness.run(__doc__ or "", measure)
