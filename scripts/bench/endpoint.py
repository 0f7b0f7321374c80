"""Cost of the endpoint: scripts/bench/endpoint.py [--quick] [--json FILE].

With a scripted engine:

endpoint_overhead_ms_64   CPU milliseconds of the endpoint's process per turn, median of the
                          rounds, with 64 agents at once; their clients are another process
merged_share              share of turns after the first that continue a trajectory
merged_share_<example>    the same of the agents in examples/, in a step of the bundled model; some
                          need AGENTS_PYTHON, the Python of the environment with their packages
                          that `scripts/test-ecosystems examples` makes

The bundled shop agent's training, against the run's own loop. Each run of an agent has a run of
the loop beside it, in turn before and after it; the figures are the medians of these pairs. Wall
time of a step is that of its rollouts and its update, over all steps of a run:

wall_over_loop_coroutine  an async function with `agent.http_client()`
wall_over_loop_network    the same with an httpx client of its own for each rollout
wall_over_loop_reuse      a reused process with aiohttp's client, `agent.per_process=128`
cpu_over_loop_…           CPU seconds of the whole command, agents included
cpu_ms_per_turn_…         CPU milliseconds by which the whole command exceeds the loop's, per turn
turns                     turns of a run of the loop; an agent's may differ by one in 200
process_start_cpu_s       CPU seconds to start and end the agent's program, which a process for each
                          rollout adds to each of them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agenttrain import ChatTemplateConfig, ResponseSchemaConfig, ScriptedEngine, load_chat
from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.engines.config import Sampling
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.tracking.metrics import agent_metrics
from agenttrain.types import Task
from agenttrain.utils.model_path import model_folder

AGENTS, TURNS = 64, 6
ROOT = Path(__file__).parents[2]
KIT = ROOT / "tests" / "kit"
PROGRAM = f"agent.command=[{sys.executable},{KIT / 'shop_agents.py'}]"
SHOP = {
    "loop": [],
    "coroutine": ["agent=endpoint", "agent._target_=shop_agents.in_process"],
    "network": ["agent=endpoint", "agent._target_=shop_agents.with_httpx"],
    "reuse": ["agent=endpoint", PROGRAM, "agent.reuse=true", "agent.per_process=128"],
}
"""The shop agent in the loop and as programs of others."""
REJOIN = "engine.rejoin_steps=6"
"""Decode steps until a rollout is back from its tools, in all runs: an agent takes longer to reply
than the run's own tools, and the engine samples meanwhile."""
EXAMPLES = {
    "shop_openai": None,
    "shop_anthropic": "AGENTS_PYTHON",
    "shop_langgraph": "AGENTS_PYTHON",
}
"""The example agents, and the variable that names the Python of their packages."""
TOOL = {
    "type": "function",
    "function": {
        "name": "sql",
        "description": "Run a query.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "sql", "arguments": {"query": "SELECT 1"}}\n</tool_call>'
CLIENTS = """
import asyncio, glob, json, os, sys, time
import httpx
folder, total, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tool = json.loads(sys.argv[4])
async def solve(path, http):
    given = json.load(open(path))
    headers = {"authorization": "Bearer " + given["api_key"]}
    messages = given["messages"]
    for _ in range(turns):
        body = {"messages": messages, "tools": [tool]}
        url = given["base_url"] + "/chat/completions"
        message = (await http.post(url, json=body, headers=headers)).json()["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "1"})
    await http.post(given["url"] + "/finish", headers=headers)
async def main():
    seen = set()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, verify=False, limits=limits) as http:
        tasks = []
        while len(seen) < total:
            for path in set(glob.glob(folder + "/*.json")) - seen:
                seen.add(path)
                tasks.append(asyncio.create_task(solve(path, http)))
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks)
asyncio.run(main())
"""


def bench(rounds: int) -> dict[str, float]:
    """Measure `rounds` rounds of 64 agents with 6 turns each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    limits = RolloutConfig(max_turns=TURNS, max_turn_tokens=64)
    message = {"role": "user", "content": "How much does the desk cost?"}
    costs, done = [], []

    async def measure() -> None:
        answer = tokenizer.encode(CALL, add_special_tokens=False)
        engine = ScriptedEngine([CALL] * TURNS, encode=lambda text: answer, keeps_sent=False)
        for number in range(rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                agents = Agents(AgentConfig(name="endpoint"), chat, Path(folder))
                command = [sys.executable, "-c", CLIENTS, folder, str(AGENTS), str(TURNS)]
                clients = subprocess.Popen([*command, json.dumps(TOOL)])
                attempts = [
                    RolloutRequest(
                        task=Task(task_id="desk", messages=(message,)),
                        sampling=Sampling(),
                        rollout_id=f"bench-{number}-{index}",
                    )
                    for index in range(AGENTS)
                ]
                started = time.process_time()
                rollouts = await asyncio.gather(
                    *(agents.attempt(one, engine, limits) for one in attempts)
                )
                spent = time.process_time() - started
                await agents.aclose()
                clients.wait()
            assert all(rollout.turns == TURNS for rollout in rollouts)
            if number:  # the first has the certificate in it
                costs.append(1000 * spent / (AGENTS * TURNS))
                done.extend(rollouts)

    asyncio.run(measure())
    return {
        "endpoint_overhead_ms_64": round(statistics.median(costs), 3),
        "merged_share": agent_metrics(done)["agent/merged_share"],
    }


def children_cpu() -> float:
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shop(name: str, steps: int) -> tuple[float, float, int]:
    """Train the shop agent; return seconds of the steps, CPU seconds of it all, and its turns."""
    path = os.pathsep.join([str(KIT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    before = children_cpu()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"steps={steps}", "eval.questions=0", "tracker=none", *SHOP[name]]
        words += [REJOIN, "rollout.on_malformed_call=stop"]  # the programs end there too
        command = [sys.executable, "-m", "agenttrain.cli", "experiment=shop", *words]
        subprocess.run(
            [*command, f"hydra.run.dir={folder}/run"],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
        turns = sum(
            span["origin"] == "sampled"
            for file in Path(folder, "run/rollouts").glob("step-*.jsonl")
            for line in file.read_text().splitlines()
            for trajectory in json.loads(line)["trajectories"]
            for span in trajectory["spans"]
        )
        rows = [json.loads(line) for line in lines]
    seconds = sum(row["time/rollout_s"] + row["time/train_s"] for row in rows)
    return seconds, children_cpu() - before, turns


def bench_shop(rounds: int, steps: int) -> dict[str, float]:
    """Measure `rounds` pairs of the loop and each of the agents."""
    figures: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in [each for each in SHOP if each != "loop"]:
            order = ["loop", name] if number % 2 == 0 else [name, "loop"]
            runs = {each: shop(each, steps) for each in order}
            (loop, loop_cpu, turns), (seconds, cpu, own) = runs["loop"], runs[name]
            # Nearly always equal: where a turn has a malformed call and a good one, the loop stops.
            assert abs(own - turns) <= turns / 200
            figures.setdefault(f"wall_over_loop_{name}", []).append(seconds / loop)
            figures.setdefault(f"cpu_over_loop_{name}", []).append(cpu / loop_cpu)
            more = 1000 * (cpu - loop_cpu) / turns
            figures.setdefault(f"cpu_ms_per_turn_{name}", []).append(more)
            figures.setdefault("turns", []).append(turns)
        before = children_cpu()
        program = [sys.executable, str(KIT / "shop_agents.py")]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        subprocess.run(program, check=True, input=b"", env=env)
        figures.setdefault("process_start_cpu_s", []).append(children_cpu() - before)
    return {name: round(statistics.median(values), 3) for name, values in figures.items()}


def bench_examples() -> dict[str, float]:
    """Let each example agent's program make 64 rollouts of the bundled model."""
    figures = {}
    for name, variable in EXAMPLES.items():
        python = sys.executable if variable is None else os.environ.get(variable)
        if python is None:
            print(f"{name}: not run, {variable} names no Python with its packages", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, name)
            shutil.copytree(ROOT / "examples" / name, folder)
            words = ["--config-dir", "conf", f"experiment={name}", "steps=1", "tasks_per_step=8"]
            words += ["optimizer.warmup_steps=0", "eval.questions=0", "tracker=none"]
            words.append(f"agent.command=[{python},agent.py]")
            subprocess.run(
                [sys.executable, "-m", "agenttrain.cli", *words, "hydra.run.dir=run"],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            row = json.loads(Path(folder, "run/metrics.jsonl").read_text().splitlines()[0])
        figures[f"merged_share_{name.removeprefix('shop_')}"] = row["agent/merged_share"]
    return figures


def main() -> None:
    """Print the figures, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures = bench(1 if arguments.quick else 5) | bench_examples()
    figures |= bench_shop(1 if arguments.quick else 3, steps=8)
    print(json.dumps(figures, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
