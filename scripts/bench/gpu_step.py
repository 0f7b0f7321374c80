"""The parts `step` and `cases` of gpu.py: forward and backward over the rollouts of a step.

All sides compute the same rollouts: four tasks, eight rollouts each, prompts of 256 tokens,
log-normal completions, every fourth token a tool's, a vocabulary of 151,936. Every round has new
lengths, as a run has, so that plans and code made for one shape count. Sides, in turns:

    bare           each rollout alone, no padding, the head on sampled positions only
    unshared       packing with `Scorer`, training.share_prefix=never
    shared         training.share_prefix=auto, the default
    compiled       the same with training.compile=true
    policy         the default through `Policy.microbatches` and the trainer's `compute_gradient`
    shared_at_trl_4, shared_at_trl_8    the default with microbatches of as many tokens as the
                   largest batch of trl_4 and trl_8 has, padding included: for the memory
    trl_4, trl_8   TRL's own `GRPOTrainer._compute_loss` and backward, in batches of 4 and 8 by
                   length, under its bf16 autocast (needs trl==1.16.0)

Each side first takes two steps that are not measured, in which layers and the head are compiled.
Our sides run without cuDNN's attention, as a run does, the others as torch chooses. Figures of a
side; times and rates are medians over the rounds, peaks the highest of all:

    kernel             attention kernels: those of the `Scorer`'s trial, or of a step of the others
    seconds            of a step
    first_seconds      of the first step that was not measured, with compilation
    rate               operations as `perf/mfu` counts them (`agenttrain.training.operations`: 6N
                       per computed token, padding too, and attention; shared prompts once), over
                       the dense bf16 peak of the card
    peak_gib           weights, and the most that the allocator handed out beside them in a step;
                       what the other sides keep between their steps does not count
    time_over_shared   round by round, so that both have the same lengths
    peak_over_shared   quotient of the peaks
    microbatch_tokens  most tokens of a microbatch in the last round

`cases` has a pair of sides for every case of `train_step_cases.py`, and their quotient:

    shared_over_unshared    speed: seconds of `unshared` over those of `shared`, round by round

`--profile FILE` writes the kernels with the most time of one step of the last side, and the share
of it in which the GPU stood idle.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import train_step_cases as cases
import transformers

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.tracking.cards import peak_tflops
from agenttrain.trainer import compute_gradient
from agenttrain.training.batch import TrainingSequence, make_sequences
from agenttrain.training.config import SharePrefix, TrainingConfig, optimizer_settings
from agenttrain.training.kernels import counting_calls, disable_cudnn_attention, kernel_names
from agenttrain.training.logprobs import Scorer
from agenttrain.training.operations import TERA, Operations, card_name, count_operations
from agenttrain.training.policy import Policy
from agenttrain.training.segments import Segment, one_after_the_other

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
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
TINY = {"vocabulary": 1000, "median": 32, "longest": 64}
LOGITS_BUDGET_MB = 1024
WARM_UP_SEEDS = (1001, 1002)
ROUNDS, CASE_ROUNDS, QUICK_ROUNDS = 6, 3, 2


def build_model(
    shape: str, vocabulary: int, device: torch.device, *, tied: bool = True, **more: Any
) -> Any:
    """Return a random model in bfloat16; `more` are settings of its configuration."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SHAPES[shape],
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        **more,
    )
    with device:
        return transformers.Qwen3ForCausalLM(config).bfloat16().to(device).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Size of a step."""

    tokens: int
    """Tokens that were computed: shared prompts once, padding too."""
    segments: list[Segment]
    microbatch_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to compute a step."""

    step: Callable[[list[Any]], Computed]
    """Forward and backward over rollouts, from no gradients."""
    ours: bool
    kernel: str | None = None
    """Attention kernels; None: those of a step are counted."""
    clear: Callable[[], None] = lambda: None
    """Drops the gradients that the model itself does not hold."""


def ours(
    net: Any,
    share: SharePrefix,
    token_budget: Callable[[list[Any]], int],
    device: torch.device,
    *,
    compile: bool = False,
) -> Side:
    """Packing and `Scorer`, as a run has them; `token_budget` is that of the step's rollouts."""
    scorer = Scorer(
        net,
        temperature=1.0,
        logits_budget_mb=LOGITS_BUDGET_MB,
        share_prefix=share,
        compile=compile,
    )

    def step(rollouts: list[Any]) -> Computed:
        rows = [make_sequences(rollout)[0] for rollout in rollouts]
        sampled = sum(row.sampled_length for row in rows)
        sizes: list[int] = []
        segments: list[Segment] = []
        with scorer.ready():
            for batch in scorer.pack(rows, token_budget(rollouts), device):
                logprobs, _ = scorer(batch)
                cases._loss(logprobs, batch.advantages_S, sampled).backward()
                sizes.append(batch.token_ids_T.numel())
                segments += batch.segments
        return Computed(tokens=sum(sizes), segments=segments, microbatch_tokens=max(sizes))

    return Side(step=step, ours=True, kernel=kernel_names(scorer.kernels))


def through_policy(net: Any, token_budget: int) -> Side:
    """The default through the package's own `Policy` and `compute_gradient`."""
    policy = Policy(
        net,
        algorithm=AlgorithmConfig(name="grpo"),
        optimizer=optimizer_settings({"name": "adamw"}),
        training=TrainingConfig(token_budget=token_budget),
        temperature=1.0,
        max_completion_tokens=CASE.longest,
        steps=1,
    )

    def step(rollouts: list[Any]) -> Computed:
        for rollout in rollouts:
            rollout.reward = float(rollout.sample % 2)
        sizes: list[int] = []
        segments: list[Segment] = []
        with policy.ready():
            for minibatch in policy.minibatches(policy.score([rollouts])):
                for batch in policy.microbatches(minibatch):
                    compute_gradient(policy, minibatch, batch)
                    sizes.append(batch.token_ids_T.numel())
                    segments += batch.segments
        return Computed(tokens=sum(sizes), segments=segments, microbatch_tokens=max(sizes))

    return Side(step=step, ours=True, kernel=policy.kernel, clear=policy.optimizer.zero_grad)


def bare(net: Any, device: torch.device) -> Side:
    """Each rollout alone."""

    def step(rollouts: list[Any]) -> Computed:
        rows = [make_sequences(rollout)[0] for rollout in rollouts]
        moved = [_moved(row, device) for row in rows]
        cases.bare_step(net, moved)()
        lengths = [row.length for row in rows]
        return Computed(
            tokens=sum(lengths),
            segments=list(one_after_the_other(lengths)),
            microbatch_tokens=max(lengths),
        )

    return Side(step=step, ours=False)


def _moved(row: TrainingSequence, device: torch.device) -> Any:
    class Moved:
        token_ids_T = row.token_ids_T.to(device)
        targets_S = row.targets_S.to(device)
        advantages_S = row.advantages_S.to(device)
        sampled_length = row.sampled_length

    return Moved


def trl_batches(rollouts: list[Any], count: int) -> list[list[Any]]:
    """Return batches of `count` rollouts of similar length."""
    order = sorted(rollouts, key=lambda rollout: len(rollout.trajectories[0].token_ids))
    return [order[first : first + count] for first in range(0, len(order), count)]


def padded_tokens(batch: list[Any]) -> int:
    """Return the tokens of a batch as TRL pads it."""
    prompts = [rollout.trajectories[0].prompt_length for rollout in batch]
    lengths = [len(rollout.trajectories[0].token_ids) for rollout in batch]
    completions = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    return len(batch) * (max(prompts) + max(completions))


def largest_trl_batch(count: int, rollouts: list[Any]) -> int:
    """Return the tokens of the largest of TRL's batches."""
    return max(map(padded_tokens, trl_batches(rollouts, count)))


def trl(net: Any, count: int, device: torch.device) -> Side:
    """TRL's loss over batches of `count` rollouts."""
    trainer = cases._trl_trainer(net, bf16=device.type == "cuda", use_cpu=device.type == "cpu")

    def step(rollouts: list[Any]) -> Computed:
        sampled = sum(rollout.sampled_length for rollout in rollouts)
        batches = trl_batches(rollouts, count)
        for batch in batches:
            inputs = {k: tensor.to(device) for k, tensor in cases._trl_inputs(batch).items()}
            inputs["num_items_in_batch"] = torch.tensor(sampled, device=device)
            trainer._compute_loss(net, inputs).backward()
        lengths = [len(rollout.trajectories[0].token_ids) for rollout in rollouts]
        return Computed(
            tokens=sum(map(padded_tokens, batches)),
            segments=list(one_after_the_other(lengths)),
            microbatch_tokens=largest_trl_batch(count, rollouts),
        )

    return Side(step=step, ours=False)


def measure_step(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the sides of `step`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = CASE
    if options.shape == "tiny":
        case = replace(CASE, tasks=2, group_size=4, **TINY)
    net = build_model(options.shape, case.vocabulary, device)
    budget = options.token_budget
    build: dict[str, Callable[[], Side]] = {
        "bare": lambda: bare(net, device),
        "unshared": lambda: ours(net, SharePrefix.never, lambda _: budget, device),
        "shared": lambda: ours(net, SharePrefix.auto, lambda _: budget, device),
        "compiled": lambda: ours(net, SharePrefix.auto, lambda _: budget, device, compile=True),
        "policy": lambda: through_policy(net, budget),
    }
    for count in (4, 8):
        build[f"shared_at_trl_{count}"] = partial(
            ours, net, SharePrefix.auto, partial(largest_trl_batch, count), device
        )
        if importlib.util.find_spec("trl") is not None:
            build[f"trl_{count}"] = partial(trl, net, count, device)
    names = options.sides or [*build]
    if unknown := [name for name in names if name not in build]:
        raise SystemExit(f"--sides {' '.join(unknown)}: choose from {', '.join(build)}")
    disable_cudnn_attention()  # for the trials of our sides, as in a run
    sides = {name: build[name]() for name in names}
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    figures = measure_sides(net, sides, case, rounds)
    if options.profile:
        rollouts = cases.rollouts(case)
        profile(sides[names[-1]].step, rollouts, Path(options.profile))
    return figures


def measure_cases(options: argparse.Namespace) -> dict[str, Any]:
    """Measure shared and unshared prompts in every case of `train_step_cases.py`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = {"reference": CASE, **cases.cases(options.quick)}
    chosen |= {"shared_prefix": cases.SHARED_PREFIX, "tree": cases.TREE}
    if options.shape == "tiny":
        chosen = {name: replace(case, **TINY) for name, case in chosen.items()}
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else CASE_ROUNDS)
    disable_cudnn_attention()
    figures: dict[str, Any] = {}
    for name, case in chosen.items():
        net = build_model(options.shape, case.vocabulary, device)
        sides = {
            side: ours(net, share, lambda _: options.token_budget, device)
            for side, share in (("unshared", SharePrefix.never), ("shared", SharePrefix.auto))
        }
        figures[name] = measure_sides(net, sides, case, rounds)
        speed = figures[name]["sides"]["unshared"]["time_over_shared"]
        figures[name]["shared_over_unshared"] = speed
    return figures


def measure_sides(
    net: Any, sides: Mapping[str, Side], case: cases.Case, rounds: int
) -> dict[str, Any]:
    """Measure sides in turns, round by round."""
    device = net.device
    operations = count_operations(net)
    weights_gib = sum(weight.nbytes for weight in net.parameters()) / 2**30
    figures: dict[str, dict[str, Any]] = {name: {} for name in sides}
    for name, side in sides.items():
        figures[name] |= warm_up(net, side, case)
    steps: dict[str, list[Measured]] = {name: [] for name in sides}
    for round_ in range(rounds):
        rollouts = cases.rollouts(replace(case, seed=round_ + 1))
        tokens = sum(len(rollout.trajectories[0].token_ids) for rollout in rollouts)
        for name, side in sides.items():
            measured = measure_once(net, side, rollouts)
            steps[name].append(measured)
            print(f"round {round_} {name:16} {measured.seconds:7.3f} s "
                  f"{tokens / measured.seconds:9.0f} tokens/s "
                  f"peak {weights_gib + measured.added_gib:.1f} GiB", flush=True)  # fmt: skip
    for name, measurements in steps.items():
        side_figures = figures[name]
        side_figures["seconds"] = statistics.median(m.seconds for m in measurements)
        side_figures["rate"] = statistics.median(m.rate(operations) for m in measurements)
        if device.type == "cuda":
            side_figures["peak_gib"] = weights_gib + max(m.added_gib for m in measurements)
        side_figures["microbatch_tokens"] = measurements[-1].computed.microbatch_tokens
        side_figures["computed_tokens"] = measurements[-1].computed.tokens
        if name != "shared" and "shared" in sides:
            pairs = zip(measurements, steps["shared"], strict=True)
            side_figures["time_over_shared"] = statistics.median(
                other.seconds / shared.seconds for other, shared in pairs
            )
    if device.type == "cuda" and "shared" in figures:
        for side_figures in figures.values():
            side_figures["peak_over_shared"] = (
                side_figures["peak_gib"] / figures["shared"]["peak_gib"]
            )
    return {"tokens": tokens, "rounds": rounds, "sides": figures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step of a side."""

    seconds: float
    added_gib: float
    """Most that the allocator handed out beside what was there before. 0 on a CPU."""
    computed: Computed

    def rate(self, operations: Operations) -> float:
        """Return the share of the card's peak."""
        known = peak_tflops(card_name(DEVICE)) if torch.cuda.is_available() else None
        done: float = operations.training(self.computed.tokens, self.computed.segments)
        return done / self.seconds / ((known or UNKNOWN_TFLOPS) * TERA)


DEVICE = torch.device("cuda")


def warm_up(net: Any, side: Side, case: cases.Case) -> dict[str, Any]:
    """Take steps that are not measured; return the first one's seconds, and the kernel."""
    first, *others = (cases.rollouts(replace(case, seed=seed)) for seed in WARM_UP_SEEDS)
    kernel = side.kernel
    if kernel is None:  # not for our sides: layers compiled while calls are counted count them too
        with counting_calls() as kernels:
            seconds = measure_once(net, side, first).seconds
        kernel = kernel_names(kernels)
    else:
        seconds = measure_once(net, side, first).seconds
    for rollouts in others:
        measure_once(net, side, rollouts)
    return {"kernel": kernel, "first_seconds": seconds}


def measure_once(net: Any, side: Side, rollouts: list[Any]) -> Measured:
    """Measure one step."""
    on_gpu = net.device.type == "cuda"
    net.zero_grad()
    side.clear()
    gc.collect()
    torch.backends.cuda.enable_cudnn_sdp(not side.ours)
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    computed = side.step(rollouts)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    net.zero_grad()
    side.clear()
    return Measured(seconds=seconds, added_gib=(peak - before) / 2**30, computed=computed)


def profile(step: Callable[[list[Any]], Computed], rollouts: list[Any], path: Path) -> None:
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
