"""Host memory of a sharded start, and time of a sharded checkpoint: 4 processes over gloo.

A random model of an 8B shape scaled down (36 layers, hidden size 512 of 4096, untied embeddings,
float32: 0.5 GB) is started, and its checkpoint written, as `distributed=fsdp2` does. Memory is the
peak of resident memory above that of the process after its imports, of the process with the most;
a share is the model's bytes / 4. Each time is the median of some repetitions, in turn with that of
plain files of the same size, written and synced by the same 4 processes. The figures:

    start_rss_over_share              peak while weights are read, over a share and one layer
    start_rss_with_reference          the same with a frozen reference, over two shares and a layer
    start_rss_with_trial              peak of the whole start, over a share and a layer: a first
                                      forward pass gathers embeddings, head and two layers
    start_rss_whole_model             side by side: each process loads the whole model first
    read_weights_s                    seconds until the weights are there
    load_whole_model_s                the same where each process loads the whole model
    checkpoint_time_over_quarter      a checkpoint, over plain files of a quarter of it per process
    checkpoint_pause_over_write       the time that training waits for one written in background,
                                      over the time to write it
    checkpoint_gb, checkpoint_s       size and seconds
    read_checkpoint_s                 seconds to verify and read it
    sync_gather_peak_over_layer       peak while weights are gathered for a weight sync, over the
                                      most that is gathered at once: a layer, or the embeddings
    sync_gathers                      collective calls of it
    sync_gather_s                     seconds of it
    sync_gather_s_over_tensorwise     side by side: the time over that of a call for each weight
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch

PROCESSES = 4
SHAPE = {
    "vocab_size": 18_992,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def measure(quick: bool) -> dict[str, float]:
    """Start the processes and return what the first one measured."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"))
        figures: dict[str, float] = {}
        for verb in ("start", "reference", "whole", "save", "gather"):
            figures |= launched(verb, Path(folder), 1 if quick else 3)
    return figures


def write_model(folder: Path) -> None:
    """Write the model in two files, with as little memory as a process of it gets."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    model.save_pretrained(folder, max_shard_size="300MB")


def launched(verb: str, folder: Path, repetitions: int) -> dict[str, float]:
    """Run this script in 4 processes; return the figures of the first one."""
    from agenttrain.training.heap import MAPPED_FROM_THE_START  # as agenttrain's launcher does

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PROCESS": "1"}
    subprocess.run(
        [*launch, f"--nproc_per_node={PROCESSES}", __file__, verb, str(folder), str(repetitions)],
        check=True,
        env={**os.environ, **MAPPED_FROM_THE_START, **environment},
        stdout=sys.stderr,
    )
    return json.loads((folder / f"{verb}.json").read_text())


def resident(name: str) -> int:
    """Return bytes of this process: VmRSS is resident memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def process(verb: str, folder: Path, repetitions: int) -> None:
    """Measure one verb in this process."""
    from agenttrain.training.logprobs import Scorer
    from agenttrain.training.sharding import layers
    from agenttrain.training.sliced_weights import empty_model
    from agenttrain.training.world import World

    world = World.start()
    model = empty_model(folder / "model", torch.float32)
    weights = sum(p.nbytes for p in model.parameters())
    share, layer = weights / world.size, sum(p.nbytes for p in layers(model)[0].parameters())
    peaks: list[int] = []
    times: list[float] = []
    try_model = Scorer.choose_layout

    def choose_layout(scorer: Scorer, *args: Any, **options: Any) -> None:
        peaks.append(resident("VmHWM"))
        times.append(time.perf_counter())
        if verb == "start":
            try_model(scorer, *args, **options)
        else:  # the other figures need no forward pass
            scorer.packed, scorer.varlen, scorer.least_shared = True, False, None
            scorer.kernels = Counter()

    Scorer.choose_layout = choose_layout  # type: ignore[method-assign]
    world.barrier("the imports")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before, started = resident("VmRSS"), time.perf_counter()
    policy = start(verb, folder / "model", world)

    def over(peak: int, shares: int = 1) -> float:
        return (world.max(peak) - before) / (shares * share + layer)

    figures: dict[str, float] = {}
    if verb == "start":
        figures["start_rss_over_share"] = over(peaks[0])
        figures["start_rss_with_trial"] = over(resident("VmHWM"))
        figures["read_weights_s"] = times[0] - started
    elif verb == "reference":
        figures["start_rss_with_reference"] = over(peaks[0], shares=2)
    elif verb == "whole":
        figures["start_rss_whole_model"] = over(peaks[0])
        figures["load_whole_model_s"] = times[0] - started
    elif verb == "gather":
        figures |= gathers(policy, repetitions)
    else:
        figures |= checkpoint(policy, folder / "checkpoints", repetitions)
    if world.is_main:
        (folder / f"{verb}.json").write_text(json.dumps(figures))


def start(verb: str, folder: Path, world: Any) -> Any:
    """Return the policy, as a run makes it."""
    from transformers import AutoModelForCausalLM

    from agenttrain.algorithms.config import AlgorithmConfig, KlConfig
    from agenttrain.training.config import AdamWSettings, TrainingConfig
    from agenttrain.training.policy import Policy
    from agenttrain.training.sharding import Sharding
    from agenttrain.training.sliced_weights import SlicedWeights, empty_model

    weights = None
    if verb == "whole":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = empty_model(folder, torch.float32)
        weights = SlicedWeights(model, folder, world.rank)
    return Policy(
        model,
        algorithm=AlgorithmConfig(kl=KlConfig(beta=0.1) if verb == "reference" else None),
        optimizer=AdamWSettings(),
        training=TrainingConfig(),
        temperature=1.0,
        max_completion_tokens=64,
        steps=2,
        world=world,
        sharding=Sharding(),
        weights=weights,
    )


def gathers(policy: Any, repetitions: int) -> dict[str, float]:
    """Time gathers of all weights, by layer and one by one, in turn; measure the peak."""
    from torch.distributed.tensor.debug import CommDebugMode

    from agenttrain.training.sharding import full_tensor, layers
    from agenttrain.training.weight_sync import named_weights

    world, model = policy.world, policy.model

    def by_layer() -> None:
        for _ in named_weights(model):
            pass

    def tensorwise() -> None:
        for tensor in model.state_dict().values():
            full_tensor(tensor)

    with CommDebugMode() as calls:
        by_layer()
    world.barrier("the first gather")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    by_layer()
    peak = world.max(resident("VmHWM") - before)
    largest = max(
        sum(p.numel() * p.element_size() for p in layers(model)[0].parameters()),
        *(p.numel() * p.element_size() for p in model.parameters()),
    )
    seconds: dict[str, list[float]] = {"layer": [], "tensor": []}
    for _ in range(repetitions * 3):
        seconds["layer"].append(timed(world, by_layer))
        seconds["tensor"].append(timed(world, tensorwise))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "sync_gather_peak_over_layer": peak / largest,
        "sync_gathers": calls.get_total_counts(),
        "sync_gather_s": middle["layer"],
        "sync_gather_s_over_tensorwise": middle["layer"] / middle["tensor"],
    }


def timed(world: Any, work: Callable[[], object]) -> float:
    """Return the seconds of work that all processes begin and end together."""
    world.barrier("the start of a timing")
    started = time.perf_counter()
    work()
    world.barrier("the end of a timing")
    return time.perf_counter() - started


def checkpoint(policy: Any, folder: Path, repetitions: int) -> dict[str, float]:
    """Time checkpoints and plain files in turn."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from agenttrain.training.checkpoint import Checkpoints

    world = policy.world
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    policy.optimizer.step()  # makes the moments
    policy.optimizer.zero_grad()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    saver = Checkpoints(folder, tokenizer=tokenizer, keep=1, main=world.is_main)

    saver.save(policy, step=1)
    size = sum(file.stat().st_size for file in (folder / "latest").iterdir())
    seconds: dict[str, list[float]] = {"plain": [], "save": [], "pause": [], "rest": []}
    works: dict[str, Callable[[int], object]] = {
        "plain": lambda step: plain(folder / f"plain-{world.rank}", size),
        "save": lambda step: saver.save(policy, step=10 * step),
        "pause": lambda step: saver.begin(policy, step=10 * step + 1),
        "rest": lambda step: saver.finish(world),
    }
    for step in range(2, 2 + repetitions):
        for name, work in works.items():
            seconds[name].append(timed(world, partial(work, step)))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    read = timed(world, lambda: saver.load_latest(policy))
    if world.is_main:
        shutil.rmtree(folder)
    return {
        "checkpoint_time_over_quarter": middle["save"] / middle["plain"],
        "checkpoint_pause_over_write": middle["pause"] / (middle["pause"] + middle["rest"]),
        "checkpoint_gb": size / 1e9,
        "checkpoint_s": middle["save"],
        "read_checkpoint_s": read,
    }


def plain(path: Path, size: int) -> None:
    """Write this process's part of that many bytes, and force it to disk."""
    chunk = os.urandom(2**24)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // PROCESSES // len(chunk)):
            file.write(chunk)
        os.fsync(file.fileno())
    path.unlink()


if __name__ == "__main__":
    if os.environ.get("PROCESS"):
        process(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
        from agenttrain.launch.worker import leave
        from agenttrain.utils.exit_codes import DONE

        leave(DONE)
    harness.run(__doc__ or "", measure)
