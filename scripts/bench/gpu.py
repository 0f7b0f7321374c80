"""One GPU: forward and backward of a step's rollouts, beside a bare loop and TRL, in one process.

The model has random weights in bfloat16, in the shape of Qwen3-0.6B (`--shape 4b`: Qwen3-4B), and
a vocabulary of 151,936. All sides compute the same rollouts: four tasks, eight rollouts each,
prompts of 256 tokens, log-normal completions, every fourth token a tool's. Every round has new
lengths, as a run has, so that plans and code made for one shape count. Sides, interleaved:

    bare           each rollout alone, no padding, the head on sampled positions only
    unshared       packing with `Scorer`, training.share_prefix=never
    shared         training.share_prefix=auto, the default
    compiled       the same with training.compile=true; compiling is not part of any round
    trl_4, trl_8   TRL's own `GRPOTrainer._compute_loss` and backward, in batches of 4 and 8 by
                   length, under its bf16 autocast (needs trl==1.16.0)

Figures; times and rates are medians over the rounds after the first, peaks the highest of all:

    seconds_<side>, first_seconds_<side>     of a step, and of its first round
    peak_gib_<side>                          highest memory that the allocator handed out
    rate_<side>                              operations as `perf/mfu` counts them
                                             (`agenttrain.training.operations`: 6N per computed
                                             token, padding too, and attention; shared prompts
                                             once), over the dense bf16 peak of the card
    time_<side>_over_shared                  round by round, so that both have the same lengths
    peak_<side>_over_shared                  quotient of the peaks
    tokens, computed_tokens                  of the last round, without and with shared prompts
    kernel_varlen                            1 if attention is one varlen call per layer

`--profile FILE` writes the kernels with the most time of one step of the last side, and the share
of it in which the GPU stood idle.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import train_step_cases as cases
import transformers

from agenttrain.tracking.cards import peak_tflops
from agenttrain.training.batch import TrainingSequence, make_sequences
from agenttrain.training.config import SharePrefix
from agenttrain.training.logprobs import Scorer
from agenttrain.training.operations import TERA, card_name, count_operations
from agenttrain.training.segments import Segment, one_after_the_other

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
VOCABULARY = 151_936
UNKNOWN_TFLOPS = 989.0
"""Dense bf16 peak of an H100 or H200 (SXM), for devices without a known peak."""
CASE = cases.Case(
    sigma=0.8, tasks=4, group_size=8, vocabulary=VOCABULARY, prompt=256, median=384, longest=2048
)
LOGITS_BUDGET_MB = 1024


def build_model(shape: str, vocabulary: int, device: torch.device) -> Any:
    """Return a random model in bfloat16."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SHAPES[shape],
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with device:
        return transformers.Qwen3ForCausalLM(config).bfloat16().to(device).eval()


Side = Callable[[list[Any]], tuple[int, list[Segment]]]
"""Computes one step over rollouts and returns the number of tokens computed, and their segments."""


def ours(
    net: Any,
    share: SharePrefix,
    token_budget: int,
    device: torch.device,
    figures: dict[str, float],
    *,
    compile: bool = False,
) -> Side:
    """Packing and `Scorer`, as a run has them."""
    scorer = Scorer(
        net,
        temperature=1.0,
        logits_budget_mb=LOGITS_BUDGET_MB,
        share_prefix=share,
        compile=compile,
    )
    figures["kernel_varlen"] = float(scorer.varlen)

    def step(rollouts: list[Any]) -> tuple[int, list[Segment]]:
        rows = [make_sequences(rollout)[0] for rollout in rollouts]
        sampled = sum(row.sampled_length for row in rows)
        net.zero_grad()
        computed, segments = 0, []
        with scorer.ready():
            for batch in scorer.pack(rows, token_budget, device):
                logprobs, _ = scorer(batch)
                cases._loss(logprobs, batch.advantages_S, sampled).backward()
                computed += batch.token_ids_T.numel()
                segments += batch.segments
        return computed, segments

    return step


def bare(net: Any, device: torch.device) -> Side:
    """Each rollout alone."""

    def step(rollouts: list[Any]) -> tuple[int, list[Segment]]:
        rows = [make_sequences(rollout)[0] for rollout in rollouts]
        moved = [_moved(row, device) for row in rows]
        cases.bare_step(net, moved)()
        return sum(row.length for row in rows), unshared_segments(rollouts)

    return step


def _moved(row: TrainingSequence, device: torch.device) -> Any:
    class Moved:
        token_ids_T = row.token_ids_T.to(device)
        targets_S = row.targets_S.to(device)
        advantages_S = row.advantages_S.to(device)
        sampled_length = row.sampled_length

    return Moved


def trl(net: Any, chunk: int, device: torch.device) -> Side:
    """TRL's loss over batches of `chunk` rollouts of similar length."""
    trainer = cases._trl_trainer(net, bf16=device.type == "cuda", use_cpu=device.type == "cpu")

    def step(rollouts: list[Any]) -> tuple[int, list[Segment]]:
        order = sorted(rollouts, key=lambda rollout: len(rollout.trajectories[0].token_ids))
        sampled = sum(rollout.sampled_length for rollout in rollouts)
        net.zero_grad()
        computed = 0
        for first in range(0, len(order), chunk):
            inputs = cases._trl_inputs(order[first : first + chunk])
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            inputs["num_items_in_batch"] = torch.tensor(sampled, device=device)
            trainer._compute_loss(net, inputs).backward()
            computed += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        return computed, unshared_segments(rollouts)

    return step


def unshared_segments(rollouts: list[Any]) -> list[Segment]:
    """Return a segment for each rollout."""
    return list(
        one_after_the_other([len(rollout.trajectories[0].token_ids) for rollout in rollouts])
    )


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure all sides round by round."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = CASE
    if options.shape == "tiny":
        case = replace(CASE, tasks=1, group_size=4, vocabulary=1000, median=32, longest=64)
    net = build_model(options.shape, case.vocabulary, device)
    operations = count_operations(net)
    known = peak_tflops(card_name(device)) if device.type == "cuda" else None
    peak_rate = (known or UNKNOWN_TFLOPS) * TERA
    budget = options.token_budget
    build: dict[str, Callable[[], Side]] = {
        "bare": lambda: bare(net, device),
        "unshared": lambda: ours(net, SharePrefix.never, budget, device, figures),
        "shared": lambda: ours(net, SharePrefix.auto, budget, device, figures),
        "compiled": lambda: ours(net, SharePrefix.auto, budget, device, figures, compile=True),
        "trl_4": lambda: trl(net, 4, device),
        "trl_8": lambda: trl(net, 8, device),
    }
    figures: dict[str, float] = {}
    sides = {name: build[name]() for name in options.sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, float] = dict.fromkeys(sides, 0.0)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    computed: dict[str, int] = {}
    for round_ in range(options.rounds):
        rollouts = cases.rollouts(replace(case, seed=round_ + 1))
        tokens = sum(len(rollout.trajectories[0].token_ids) for rollout in rollouts)
        for name, step in sides.items():
            net.zero_grad()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            started = time.perf_counter()
            computed[name], segments = step(rollouts)
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() / 2**30)
            seconds[name].append(time.perf_counter() - started)
            done = operations.training(computed[name], segments)
            rates[name].append(done / seconds[name][-1] / peak_rate)
            print(f"round {round_} {name:10} {seconds[name][-1]:7.3f} s "
                  f"{tokens / seconds[name][-1]:9.0f} tokens/s rate {rates[name][-1]:.3f} "
                  f"peak {peaks[name]:.1f} GiB", flush=True)  # fmt: skip
    for name, values in seconds.items():
        figures[f"seconds_{name}"] = statistics.median(values[1:] or values)
        figures[f"first_seconds_{name}"] = values[0]
        figures[f"rate_{name}"] = statistics.median(rates[name][1:] or rates[name])
        figures[f"peak_gib_{name}"] = peaks[name]
    for name in sides.keys() - {"shared"}:
        if "shared" in sides:
            ratios = [a / b for a, b in zip(seconds[name], seconds["shared"], strict=True)]
            figures[f"time_{name}_over_shared"] = statistics.median(ratios[1:] or ratios)
            figures[f"peak_{name}_over_shared"] = peaks[name] / max(peaks["shared"], 1e-9)
    figures["tokens"] = tokens
    figures["computed_tokens"] = computed.get("shared", tokens)
    if options.profile:
        profile(sides[options.sides[-1]], rollouts, options.profile)
    return figures


def profile(step: Side, rollouts: list[Any], path: Path) -> None:
    """Write the kernels with the most time of one step, and the time that the GPU stood idle."""
    from torch.profiler import ProfilerActivity

    step(rollouts)
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    started = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiler:
        step(rollouts)
        torch.cuda.synchronize()
    wall = time.perf_counter() - started
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    kernels = [event for event in events if event.self_cpu_time_total == 0] or events
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    idle = 1 - busy / wall
    lines = [f"wall {wall:.3f} s under the profiler, kernels {busy:.3f} s, idle {idle:.2f}"]
    lines += [
        f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:6d} {event.key[:150]}"
        for event in kernels[:28]
    ]
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a profile here")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument(
        "--sides", nargs="+", default=["bare", "unshared", "trl_4", "trl_8", "shared", "compiled"]
    )
    options = parser.parse_args()
    figures = measure(options)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
