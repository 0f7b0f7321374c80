"""Time and memory of the training step: forward and backward over a step's rollouts, on CPU.

Side by side in one run, on the same random Qwen3 (4 layers of 256, fp32) and the same rollouts (a
prompt of 64 tokens, then a log-normal number of tokens, a quarter of them a tool's):

    bare    each rollout alone, no padding, head on sampled positions only, log_softmax, backward
    ours    make no use of common prefixes: packing, `Scorer`, the same loss
    shared  the same with training.share_prefix=auto, as a run has it
    flat    the tokens of shared, each once, but every branch a sequence of its own
    trl     TRL's own `GRPOTrainer._compute_loss` (loss_type=dapo, no gradient checkpointing) and
            backward, on the batch that its trainer would make of the rollouts: prompts padded to
            the left, completions to the right, tool tokens masked by `tool_mask`

TRL needs `pip install trl==1.16.0`. With one thread times are CPU seconds of the process, which
other work on the machine hardly changes; with two they are wall seconds. Each is the fewest of
several interleaved repetitions. The figures, for 16 rollouts and a vocabulary of 32,000 where
nothing else is said:

    time_over_bare_sigma_<s>              ours / bare; s is the log-normal's sigma
    time_over_bare_sigma_0.8_2_threads    the same with two threads
    time_over_bare_shared_prefix          shared / bare, prompts of 768 tokens, groups of 8
    time_over_unique_tokens_tree          shared / flat, 4 prompts of 64 tokens in groups of 4 after
                                          256 tokens that all share
    time_over_bare_tree                   shared / bare, the same rollouts
    speedup_vs_trl_sigma_<s>              trl / ours
    speedup_vs_trl_group_<g>, speedup_vs_trl_vocabulary_<v>      the same at sigma 0.8; of 152,000
                                          with 4 rollouts only, for TRL holds all their logits
    seconds_<variant>_<case>              what these are made of
    peak_mb_<variant>_<case>              memory that a step adds at its peak, MiB, in a process
                                          of its own
    loss_peak_over_trl_152k               ours / trl, of log-probabilities, entropies and their
                                          backward pass alone: 4,096 tokens, vocabulary 152,000
                                          (TRL's `_get_per_token_logps_and_entropies`)
    loss_peak_mb_ours, loss_peak_mb_trl   the same in MiB
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import transformers
from train_step_cases import SHARED_PREFIX, TREE, Case, Step, cases, loss_step, steps

REFERENCE = Case()
LOSS = {"tokens": 4096, "vocabulary": 152_000}


def measure(quick: bool) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    repetitions = 2 if quick else 3
    for name, case in cases(quick).items():
        seconds = fewest(steps(case, ("bare", "ours", "trl")), repetitions, time.process_time)
        figures.update({f"seconds_{variant}_{name}": value for variant, value in seconds.items()})
        figures[f"time_over_bare_{name}"] = seconds["ours"] / seconds["bare"]
        figures[f"speedup_vs_trl_{name}"] = seconds["trl"] / seconds["ours"]
        if not quick:
            for variant in seconds:
                figures[f"peak_mb_{variant}_{name}"] = peak_mb(variant, case=vars(case))
    figures.update(shared_prefix(repetitions))
    figures.update(tree(repetitions))
    torch.set_num_threads(2)
    both = fewest(steps(REFERENCE, ("bare", "ours")), repetitions, time.perf_counter)
    figures["time_over_bare_sigma_0.8_2_threads"] = both["ours"] / both["bare"]
    return {**figures, **loss_peaks()}


def shared_prefix(repetitions: int) -> dict[str, float]:
    """Long prompts, computed once per group."""
    seconds = fewest(
        steps(SHARED_PREFIX, ("bare", "ours", "shared")), repetitions, time.process_time
    )
    return {
        **{f"seconds_{name}_shared_prefix": value for name, value in seconds.items()},
        "time_over_bare_shared_prefix": seconds["shared"] / seconds["bare"],
    }


def tree(repetitions: int) -> dict[str, float]:
    """Two levels of prefixes: of all rollouts, and of each group."""
    seconds = fewest(steps(TREE, ("bare", "shared", "flat")), repetitions, time.process_time)
    return {
        **{f"seconds_{name}_tree": value for name, value in seconds.items()},
        "time_over_unique_tokens_tree": seconds["shared"] / seconds["flat"],
        "time_over_bare_tree": seconds["shared"] / seconds["bare"],
    }


def loss_peaks() -> dict[str, float]:
    """Of the head alone, against TRL's."""
    peaks = {name: peak_mb(name, loss=LOSS) for name in ("ours", "trl")}
    return {
        **{f"loss_peak_mb_{name}": value for name, value in peaks.items()},
        "loss_peak_over_trl_152k": peaks["ours"] / peaks["trl"],
    }


def fewest(
    variants: dict[str, Step], repetitions: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of each variant, in turns, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 + repetitions):
        for name, step in variants.items():
            started = clock()
            step()
            seconds[name].append(clock() - started)
    return {name: min(values[1:]) for name, values in seconds.items()}


def peak_mb(variant: str, **what: dict[str, float]) -> float:
    """Memory that a step of `variant` adds at its peak, in a process of its own."""
    command = [sys.executable, __file__, "--peak", json.dumps({"variant": variant, **what})]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])


def print_peak(asked: str) -> None:
    """What the child process does."""
    what = json.loads(asked)
    variant = what["variant"]
    if "loss" in what:
        step = loss_step(variant, **what["loss"])
    else:
        step = steps(Case(**what["case"]), (variant,))[variant]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    step()
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2])
    else:
        harness.run(__doc__ or "", measure)
