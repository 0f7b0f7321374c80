"""Asynchronous training: what it gains, how old rollouts become, what kills leave, what is learnt.

    python scripts/bench/async_training.py [--quick] [--only PART ...] [--json FILE]

Whole runs of `agenttrain`, each in processes of its own. The model of the first figures is a
script, its tools sleep, and an update sleeps 2 s, so that they need little of the CPU: 8 tasks of 8
rollouts with 4 tool turns, each call lognormal (median 0.5 s, 99 % below 8 s), the same in every
run. --quick: fewer steps, all times a fifth. Parts: speed, servers, staleness, kills, learning.

speedup_scripted_k1, _k2  time of the synchronous run over that with max_staleness = 1, 2; from the
                          first request for rollouts to the end of the last weight sync
rule_ratio_k1, _k2        time of that run over what its own sampling times and the rule
                          end(b) = max(end(b-1), end(b-k-1) + T_roll(b)) + T_train say
step_s_k0, _k1, _k2       mean seconds of a step
speedup_servers_k1        the same for the bundled agent, two vLLM servers on this CPU, its own
                          update and the tools of above, 10 steps; only in an environment that
                          has vLLM
servers_step_s_k0, _k1    mean seconds of a step of these two runs
servers_tool_share        seconds that the slowest rollout of a step spends in its tools over those
                          of the step, with max_staleness=0: the share that can overlap on two cores
staleness_max_k0 … _k4    greatest staleness of a rollout, times a twentieth, 50 steps (--quick: 12)
dropped                   async/dropped of all these runs
serials_lost, _twice      tasks that a run with k = 2, killed at random instants (12; --quick: 3)
                          and resumed, trained not at all, or twice
kills                     these kills
reward_k0, _k1, _k2       bundled agent, 40 steps (--quick: 26) with CISPO at half of its
                          experiment's learning rate (the ratio to the engine's probabilities
                          corrects), two runs at a time: mean reward of the last ten steps, mean of
                          3 seeds (--quick: one)
steps_to_0.9_k0 …         first step at which the mean reward of the latest three is at least 0.9;
                          mean of the seeds
reward_k0_seed0 …,        the same of each run
steps_to_0.9_k0_seed0 …
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import psutil

TASKS, SAMPLES = 8, 8
COMMON = ("tracker=none", "tracker.rollouts=all", "eval.questions=0")
SCRIPTED = (
    *("debug=tiny", *COMMON, f"tasks_per_step={TASKS}", f"algorithm.group_size={SAMPLES}"),
    *("engine._target_=async_parts.SCRIPTED", "tools=[]", "stop_tools=[]"),
    *("+tools.wait._target_=async_parts.wait", "+tools.wait.timeout_s=600"),
    *("~reward.exact_match", "+reward.chance._target_=async_parts.chance"),
    *("algorithm/objective=own", "algorithm.objective._target_=async_parts.slow"),
    *("rollout.max_turns=6", "rollout.max_turn_tokens=48", "rollout.process=own"),
    *("training.token_budget=1000000", "checkpoint.every=null"),
)
AGENT = (
    *("experiment=shop", *COMMON, "checkpoint.every=null", "weight_sync.mode=abort_resume"),
    "stop_when.above=null",
)
STALE = ("optimizer.lr=8e-4", "algorithm/objective=cispo")
"""Settings of the learning part: with updates as large as the experiment's older rollouts teach
less, and a clip around their probabilities takes the gradient of the tokens that decide."""
AT_ONCE = 2
"""Runs of the learning part side by side: no time is taken of them."""


def run(folder: Path, *arguments: str, scale: float = 1.0) -> None:
    """Run agenttrain to its end."""
    command = [sys.executable, "-m", "agenttrain.cli", *arguments, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, env=environment(scale), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def environment(scale: float) -> Mapping[str, str]:
    """Return the environment of a run whose times are multiplied by `scale`."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    threads = {"OMP_NUM_THREADS": "1", "BENCH_SCALE": str(scale)}
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def ahead(k: int) -> str:
    return f"async_training.max_staleness={k}"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def phases(folder: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """Return begin and end of the trainer's phases of a run that was not resumed."""
    times = {}
    for row in rows(folder / "timeline" / "trainer-0.jsonl"):
        if "phase" in row:
            times[row["phase"], row["step"]] = (row["time"], row["time"] + row["seconds"])
    return times


def seconds(folder: Path, steps: int) -> float:
    """Return the time of a run's steps."""
    times = phases(folder)
    return times["sync", steps][1] - times["rollout", 1][0]


def predicted(folder: Path, steps: int, k: int) -> float:
    """Return the time that the rule gives for the run's own times of sampling and training."""
    times, groups = phases(folder), rows(folder / "rollouts" / "journal.jsonl")
    ends = [0.0]
    for step in range(1, steps + 1):
        own = [row for row in groups if row["step"] == step]
        sampling = max(row["ended"] for row in own) - min(row["begun"] for row in own)
        training = times["sync", step][1] - times["rollout", step][1]
        started = ends[max(step - k - 1, 0)]
        ends.append(max(ends[-1], started + sampling) + training)
    return ends[-1]


def speed(root: Path, quick: bool) -> dict[str, float]:
    """Time the scripted runs."""
    steps, scale = (8, 0.2) if quick else (30, 1.0)
    taken, ratios = {}, {}
    for k in (0, 1, 2):
        folder = root / f"speed-{k}"
        run(folder, *SCRIPTED, f"steps={steps}", ahead(k), scale=scale)
        taken[k] = seconds(folder, steps)
        if k:
            ratios[f"rule_ratio_k{k}"] = taken[k] / predicted(folder, steps, k)
    return {
        **{f"speedup_scripted_k{k}": taken[0] / taken[k] for k in (1, 2)},
        **ratios,
        **{f"step_s_k{k}": one / steps for k, one in taken.items()},
    }


def servers(root: Path, quick: bool) -> dict[str, float]:
    """Time the bundled agent with two servers; nothing without vLLM."""
    if find_spec("vllm") is None:
        return {}
    steps, taken = (3 if quick else 10), {}
    for k in (0, 1):
        folder = root / f"servers-{k}"
        run(
            folder,
            *(*AGENT, "engine=vllm_server", "servers.count=2", "engine.kv_cache_mb=64"),
            *("engine.max_context=512", "tools.sql._target_=async_parts.SlowSql"),
            *("+tools.sql.timeout_s=600", f"tasks_per_step={TASKS}", f"steps={steps}", ahead(k)),
        )
        taken[k] = seconds(folder, steps)
    return {
        "speedup_servers_k1": taken[0] / taken[1],
        **{f"servers_step_s_k{k}": one / steps for k, one in taken.items()},
        "servers_tool_share": tool_seconds(root / "servers-0", steps) / taken[0],
    }


def tool_seconds(folder: Path, steps: int) -> float:
    """Return the seconds in tools of the slowest rollout of each step, added up."""
    rollouts = [row for row in rows(folder / "timeline" / "rollouts.jsonl") if "rollout" in row]
    total = 0.0
    for step in range(1, steps + 1):
        own = [row for row in rollouts if row["rollout"].startswith(f"train-{step}-")]
        last = max(own, key=lambda row: row["time"] + row["seconds"])
        total += sum(taken for _, _, taken in last["calls"])
    return total


def staleness(root: Path, quick: bool) -> dict[str, float]:
    """Measure how old rollouts become, and what is dropped."""
    steps, figures, dropped = (12 if quick else 50), {}, 0.0
    for k in (0, 1, 2, 4):
        folder = root / f"staleness-{k}"
        run(folder, *SCRIPTED, f"steps={steps}", ahead(k), scale=0.05)
        ages = [
            row["staleness"]
            for step in range(1, steps + 1)
            for row in rows(folder / "rollouts" / f"step-{step:06d}.jsonl")
        ]
        assert len(ages) == steps * TASKS * SAMPLES
        figures[f"staleness_max_k{k}"] = float(max(ages))
        dropped += sum(row.get("async/dropped", 0) for row in rows(folder / "metrics.jsonl"))
    return {**figures, "dropped": dropped}


def kills(root: Path, quick: bool) -> dict[str, float]:
    """Kill a run at random instants, resume it, and count the tasks that it trained."""
    rng, folder, count = random.Random(3), root / "kills", 3 if quick else 12
    wanted = (*SCRIPTED[:-1], "checkpoint.every=2", ahead(2), "steps=400")
    killed = 0
    while killed < count:
        resumed = (folder / "config.yaml").exists()
        command = (f"resume={folder}",) if resumed else (*wanted, f"hydra.run.dir={folder}")
        process = subprocess.Popen(
            [sys.executable, "-m", "agenttrain.cli", *command],
            env=environment(0.05),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A run goes on without its rollout process, unless that is killed twice in a step.
        while killed < count and process.poll() is None:
            wanted_phases = phases_of(folder) + rng.randint(1, 12)
            while phases_of(folder) < wanted_phases and process.poll() is None:
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 1))
            if process.poll() is not None:
                break
            trainer = psutil.Process(process.pid)
            rollouts = [
                one for one in trainer.children() if "rollout_process" in str(one.cmdline())
            ]
            victim = rng.choice([trainer, *rollouts])
            victim.send_signal(signal.SIGKILL)
            killed += 1
            psutil.wait_procs([victim], 90)
            if victim == trainer:
                process.wait()
                psutil.wait_procs(rollouts, 90)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = len(rows(folder / "metrics.jsonl"))
    last = done + 3
    subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", f"resume={folder}", f"steps={last}"],
        env=environment(0.05),
        check=True,
        capture_output=True,
    )
    trained = Counter(serial for step in range(1, last + 1) for serial in serials(folder, step))
    return {
        "serials_lost": float(last * TASKS - len(trained)),
        "serials_twice": float(sum(times > 1 for times in trained.values())),
        "kills": float(count),
    }


def phases_of(folder: Path) -> int:
    """Return the number of phases that the trainer has ended, in all attempts."""
    path = folder / "timeline" / "trainer-0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def serials(folder: Path, step: int) -> list[int]:
    """Return the serials of the groups that a step trained."""
    records = rows(folder / "rollouts" / f"step-{step:06d}.jsonl")
    assert all(one["staleness"] <= 2 for one in records)
    names = [one["group_id"].split("-") for one in records if one["rollout_id"].endswith("-0")]
    return [(int(number) - 1) * TASKS + int(place) for _, number, place in names]


def learning(root: Path, quick: bool) -> dict[str, float]:
    """Train the bundled agent with and without staleness."""
    seeds, steps = (1, 26) if quick else (3, 40)

    def train(cell: tuple[int, int]) -> tuple[float, float]:
        k, seed = cell
        folder = root / f"learning-{k}-{seed}"
        mode = ("rollout.process=own", *(() if k else ("rollout.deterministic=false",)))
        run(folder, *AGENT, *STALE, *mode, ahead(k), f"steps={steps}", f"seed={seed}")
        rewards = [row["reward"] for row in rows(folder / "metrics.jsonl")]
        print(f"k={k} seed={seed}:", *(f"{reward:.2f}" for reward in rewards), flush=True)
        return statistics.mean(rewards[-10:]), steps_to(rewards, 0.9)

    cells = [(k, seed) for seed in range(seeds) for k in (0, 1, 2)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = dict(zip(cells, pool.map(train, cells), strict=True))
    figures = {}
    for place, name in enumerate(("reward", "steps_to_0.9")):
        for k in (0, 1, 2):
            own = [results[k, seed][place] for seed in range(seeds)]
            figures[f"{name}_k{k}"] = statistics.mean(own)
            figures |= {f"{name}_k{k}_seed{seed}": value for seed, value in enumerate(own)}
    return figures


def steps_to(rewards: Sequence[float], least: float) -> float:
    """Return the first step after which three steps have this mean reward; NaN: none."""
    for step in range(3, len(rewards) + 1):
        if statistics.mean(rewards[step - 3 : step]) >= least:
            return float(step)
    return float("nan")


PARTS = {part.__name__: part for part in (speed, servers, staleness, kills, learning)}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bench-async-") as temporary:
        harness.run_parts(
            __doc__ or "",
            {name: partial(part, Path(temporary)) for name, part in PARTS.items()},
        )
