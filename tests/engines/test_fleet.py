"""Servers of a run: requests, weights, deaths. The servers are stubs in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import torch
from fleet_kit import (
    PATIENCE_S,
    TEXT,
    call,
    expected,
    failed_start,
    fault,
    gone,
    record,
    running,
    sample,
    send,
    stubs,
    until,
)
from server_stub import CONFIG, FAULTS, TOKEN_S

from agenttrain import cli
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm_server import local
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.scratch import remove
from agenttrain.types import Finish


def states(engine) -> list[MemberState]:
    return [member.state for member in engine.fleet.members]


def both_live(engine) -> bool:
    return states(engine) == [MemberState.live] * 2


def test_requests_weights_and_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as engine:
            pids = [record(tmp_path, n).pid for n in (0, 1)]
            pids += [record(tmp_path, n).wrapper for n in (0, 1)]
            assert (tmp_path / "run/servers/0.json").stat().st_mode & 0o777 == 0o600
            first = await engine.generate(TEXT, Sampling(max_tokens=4, seed=5), session="a")
            # Cut at a stop token, which it contains.
            stop = first.token_ids[1]
            cut = await engine.generate(
                TEXT, Sampling(max_tokens=4, seed=5, stop_token_ids=(stop,)), session="a"
            )
            assert first.token_ids == expected(TEXT, 4, 5) and first.logprobs == (-1.0,) * 4
            assert (first.finish, first.versions) == (Finish.length, ((0, 4),))
            assert (cut.token_ids, cut.finish) == (first.token_ids[:2], Finish.stop)

            assert await send(engine, 0.5, 1) == [-0.5] * 3
            later = await engine.generate(TEXT, Sampling(max_tokens=4, seed=5), session="a")
            assert (later.logprobs, later.versions) == ((-0.5,) * 4, ((1, 4),))

            await asyncio.gather(*(sample(engine, number) for number in range(40)))
            served = [await call(tmp_path, n, "GET", "/stub/log") for n in (0, 1)]
            assert min(map(len, served)) >= 8
            ids = [tuple(one["ids"]) for one in served[0] + served[1]]
            assert len(ids) == 43, "nothing is sent twice without need"

            # A session stays with its server, turn after turn.
            for _ in range(6):
                await engine.generate(TEXT, Sampling(max_tokens=2, seed=1), session="long")
            more = [len(await call(tmp_path, n, "GET", "/stub/log")) for n in (0, 1)]
            assert sorted(new - len(old) for new, old in zip(more, served, strict=True)) == [0, 6]

            await no_route_answers_without_the_token(tmp_path)
            with pytest.raises(EngineError, match="400 id out of vocabulary"):
                await engine.generate([9999], Sampling(max_tokens=1), session="a")
            with pytest.raises(EngineError, match=r"max_context=256"):
                await engine.generate([7] * 256, Sampling(max_tokens=1), session="a")
            weights = engine.writer.folder
            assert weights.is_dir()
        assert gone(pids)
        assert not weights.exists()
        assert sorted(os.listdir(tmp_path / "run/servers")) == ["0.log", "1.log", "status.json"]

    asyncio.run(main())


async def no_route_answers_without_the_token(folder: Path) -> None:
    server = record(folder, 0)
    wrong = {"Authorization": f"Bearer {server.token}x"}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        for method, path in (
            *(("GET", "/weight_info"), ("GET", "/version"), ("GET", "/stub/log")),
            *(("POST", "/pause"), ("POST", "/inference/v1/generate")),
            *(("OPTIONS", "/pause"), ("GET", "/health/"), ("GET", "//health")),
        ):
            for headers in ({}, wrong, {"Authorization": "Bearer"}):
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
        assert (await http.get("/health")).status_code == 200


@pytest.mark.slow
def test_requests_of_a_killed_server_are_sent_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It serves again only once it has the weights of now."""
    monkeypatch.setenv(TOKEN_S, "0.01")

    async def main() -> None:
        async with running(tmp_path) as engine:
            await send(engine, 2.0, 7)
            fleet = engine.fleet
            work = [asyncio.create_task(sample(engine, n, 60)) for n in range(12)]
            await until(lambda: fleet.members[0].requests > 1)
            os.kill(record(tmp_path, 0).pid, signal.SIGKILL)
            await asyncio.gather(*work)
            assert fleet.resent > 0
            await until(lambda: both_live(engine))
            metrics, resent = engine.metrics(), fleet.resent
            assert (metrics["fleet/deaths"], metrics["fleet/servers"]) == (1, 2)
            assert metrics["fleet/requests"] == 12 + metrics["fleet/resent"] > 12 + resent == 12
            assert 0.5 <= metrics["fleet/load"] < 1
            assert "server 0" in capsys.readouterr().err
            assert record(tmp_path, 0).boot == 2
            await asyncio.gather(*(sample(engine, n, 4) for n in range(40)))
            log = await call(tmp_path, 0, "GET", "/stub/log")
            assert log and {one["version"] for one in log} == {"7"}

    asyncio.run(main())


@pytest.mark.slow
def test_servers_that_answer_badly(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, dead_s=100.0, restarts=50) as engine:
            # One aborted request: sent again, and nobody is killed.
            for number in (0, 1):
                await fault(tmp_path, number, "abort")
            await asyncio.gather(*(sample(engine, n) for n in range(20)))
            await until(lambda: both_live(engine))
            assert [record(tmp_path, n).boot for n in (0, 1)] == [1, 1]

            # Errors without end, though it is in good health: killed.
            await fault(tmp_path, 0, "error", times=1000)
            number = 0
            while record(tmp_path, 0).boot == 1:
                number += 1
                await sample(engine, number)
            assert "3 calls failed one after the other" in engine.fleet.members[0].reason
            await until(lambda: both_live(engine))

            # The engine's process hangs behind a front that answers.
            engine.fleet._servers.dead_s = 1.0
            await fault(tmp_path, 1, "hang")
            await asyncio.gather(*(sample(engine, n) for n in range(20)))
            await until(lambda: record(tmp_path, 1).boot > 1 and both_live(engine))
            assert "did not answer for servers.dead_s=1 s" in engine.fleet.members[1].reason

    asyncio.run(main())


@pytest.mark.slow
def test_a_request_that_every_server_fails_at_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS, '{"abort": 5}')

    async def main() -> None:
        async with running(tmp_path, count=1) as engine:
            # The third failure kills the server; the fourth and fifth are the next start's.
            with pytest.raises(EngineError, match="5 servers one after the other failed"):
                await sample(engine, 1)
            assert record(tmp_path, 0).boot == 2

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_does_not_load_what_it_was_sent(tmp_path: Path) -> None:
    """It says 200; its log-probabilities say that it lies."""

    async def main() -> None:
        async with running(tmp_path) as engine:
            await fault(tmp_path, 0, "deaf")
            await send(engine, 3.0, 1)
            assert engine.fleet.members[0].reason == "was killed: not 3.0"
            completions = await asyncio.gather(
                *(engine.generate(TEXT, Sampling(max_tokens=2), session=f"{n}") for n in range(20))
            )
            assert {completion.logprobs for completion in completions} == {(-3.0, -3.0)}
            await until(lambda: both_live(engine))
            log = await call(tmp_path, 0, "GET", "/stub/log")
            assert {one["version"] for one in log} <= {"1"}

            # All of them: nothing is sampled, and the caller gets what it cannot accept.
            for number in (0, 1):
                await fault(tmp_path, number, "deaf")
            assert await send(engine, 4.0, 2) == [-3.0] * 3
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await sample(engine, 1)

    asyncio.run(main())


@pytest.mark.slow
def test_weights_that_a_server_cannot_read(tmp_path: Path) -> None:
    """A bit of the file flips on its way: no server loads it."""

    async def main() -> None:
        async with running(tmp_path, count=1, restarts=0) as engine:
            write = engine.writer.write

            def torn(weights, version):
                files = write(weights, version)
                path = files.folder / "weights-00000.safetensors"
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
                return files

            engine.writer = type("Torn", (), {"write": staticmethod(torn), "folder": "x"})()
            with pytest.raises(FleetLost) as caught:
                await send(engine, 2.0, 1)
            assert "weight update 1: the files of the weights: " in str(caught.value)
            assert "bytes of w are not those that were written" in str(caught.value)

    asyncio.run(main())


@pytest.mark.slow
def test_a_full_folder_of_weights(tmp_path: Path) -> None:
    """One error with the folder and its setting; the servers keep the weights that they have."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        async with running(tmp_path, count=1) as engine:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # as a full disk
            try:
                with pytest.raises(EngineError) as caught:
                    await engine.update(iter([("w", torch.tensor([2.0]))]), 1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            folder = engine.writer.folder
            assert str(caught.value).startswith(f"weight update 1: {folder}/1.part/weights-00000")
            assert "File too large" in str(caught.value)
            assert str(caught.value).endswith(f"are in {folder} (weight_sync.folder)")
            await sample(engine, 1)
            (served,) = await call(tmp_path, 0, "GET", "/stub/log")
            assert served["version"] == "0"
            await send(engine, 3.0, 2)
            assert {path.name for path in folder.iterdir() if path.is_dir()} <= {"0", "1.part", "2"}

    asyncio.run(main())


@pytest.mark.slow
def test_no_server_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_S, "0.01")

    async def main() -> None:
        async with running(tmp_path, restarts=0) as engine:
            work = [asyncio.create_task(sample(engine, n, 200)) for n in range(4)]
            await until(lambda: sum(member.requests for member in engine.fleet.members) == 4)
            for number in (0, 1):
                os.kill(record(tmp_path, number).pid, signal.SIGKILL)
            ends = await asyncio.gather(*work, return_exceptions=True)
            assert {type(end) for end in ends} == {FleetLost}
            text = str(ends[0])
            assert "server 0 was ended by SIGKILL" in text and "server 1 was ended by" in text
            assert text.count("stub on port") == 2, "the end of each log"

    asyncio.run(main())


@pytest.mark.slow
def test_a_killed_server_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Names that its processes had mapped go with them, however they end."""

    async def main() -> None:
        async with running(tmp_path, restarts=0) as engine:
            shared = (await call(tmp_path, 0, "POST", "/stub/share"))["name"]
            file, server = Path("/dev/shm", shared), record(tmp_path, 0)
            assert file.exists() and Path(server.scratch[0]).is_dir()
            await until(lambda: str(file) in record(tmp_path, 0).scratch)
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: states(engine)[0] is MemberState.gone)
            assert not file.exists() and not Path(server.scratch[0]).exists()

            # The wrapper is killed: at the end of the run, or at the next start.
            name = {"name": f"vllm_dist_{uuid4().hex}-tp:0-[0-1]-cpushm_0"}  # as CPU workers do
            shared = (await call(tmp_path, 1, "POST", "/stub/share", name))["name"]
            file, server = Path("/dev/shm", shared), record(tmp_path, 1)
            await until(lambda: str(file) in record(tmp_path, 1).scratch)
            os.kill(server.wrapper, signal.SIGKILL)
            assert gone([server.pid]) and file.exists()
        assert not file.exists() and not Path(server.scratch[0]).exists()

    asyncio.run(main())


def test_only_files_of_servers_are_removed(tmp_path: Path) -> None:
    for name in ("agenttrain-server-x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "psm_1").touch()
    remove([str(tmp_path / name) for name in ("agenttrain-server-x", "other", "psm_1", "absent")])
    assert sorted(os.listdir(tmp_path)) == ["other", "psm_1"]


@pytest.mark.slow
def test_a_killed_wrapper_takes_its_server_along(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as engine:
            pid, wrapper = record(tmp_path, 0).pid, record(tmp_path, 0).wrapper
            os.kill(wrapper, signal.SIGKILL)
            assert gone([pid])
            await until(lambda: states(engine)[0] is MemberState.gone)
            assert engine.fleet.members[0].reason == "lost its wrapper"
            await asyncio.gather(*(sample(engine, n) for n in range(10)))

    asyncio.run(main())


@pytest.mark.long
def test_a_server_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes the place of one without restarts left; nothing else does."""

    def refused(*words: str) -> str:
        assert cli.main(["engine-server", *words]) == 2
        return capsys.readouterr().err

    run = str(tmp_path / "run")
    assert "no run with servers is going on in this folder" in refused(run)

    async def main() -> None:
        async with running(tmp_path, restarts=0) as engine:
            assert "--number 2: this run has servers.count=2" in refused(run, "number=2")
            assert "number=0: server 0 of" in refused(run, "number=0")
            os.kill(record(tmp_path, 0).pid, signal.SIGKILL)
            await until(lambda: states(engine)[0] is MemberState.gone)
            command = [sys.executable, "-m", "agenttrain.cli", "engine-server", run, "number=0"]
            by_hand = subprocess.Popen(command)
            await until(lambda: both_live(engine))
            assert record(tmp_path, 0).boot == 2
            pid = record(tmp_path, 0).pid
            by_hand.terminate()
            assert await asyncio.to_thread(by_hand.wait) == 0
            assert gone([pid]) and engine.writer.folder.is_dir()

    asyncio.run(main())


@pytest.mark.slow
def test_the_servers_of_a_run_at_a_glance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")

    def table(*words: str) -> str:
        assert cli.main(["servers", run, *words]) == 0
        return capsys.readouterr().out

    def rows() -> list[list[str]]:
        return [line.split() for line in table("--lines", "0").splitlines()[2:]]

    assert cli.main(["servers", run]) == 2
    assert "no servers of a run have been here" in capsys.readouterr().err

    async def main() -> None:
        async with running(tmp_path, restarts=0) as engine:
            await sample(engine, 1)
            await until(lambda: {row[1] for row in rows()} == {"live"})
            await until(lambda: sum(int(row[4]) for row in rows()) == 1)
            urls = [record(tmp_path, n).url for n in (0, 1)]
            assert [(row[0], row[2], row[3], row[5], row[6]) for row in rows()] == [
                ("0", "0", "0", "1", urls[0]),
                ("1", "0", "0", "1", urls[1]),
            ]
            assert "as of" in table() and table().count("| stub on port") == 2
            assert record(tmp_path, 0).token not in table("--json")
            os.kill(record(tmp_path, 0).pid, signal.SIGKILL)
            await until(lambda: rows()[0][1] == "gone")
            assert "server 0 was ended by SIGKILL" in table()

    asyncio.run(main())
    assert "the run has ended" in table()
    status = json.loads(table("--json"))
    assert [(one["state"], one["version"]) for one in status["servers"]] == [
        ("gone", 0),
        ("live", 0),
    ]
    assert (status["ended"], status["running"]) == (True, False)
    for words in (["--lines", "x"], ["step=3"], []):
        target = words and [run, *words]
        assert cli.main(["servers", *target]) == 2


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        engine = stubs(tmp_path, module="agenttrain.engines.vllm_server.absent", count=1)
        text = await failed_start(engine)
        assert "a server did not start: server 0 ended with exit code 1" in text
        assert "No module named agenttrain.engines.vllm_server.absent" in text

    asyncio.run(main())


def test_a_server_that_is_never_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, '{"without": ["/health"]}')
    pids: list[int] = []

    async def main() -> None:
        engine = stubs(tmp_path, count=1, start_s=3.0)
        try:
            starting = asyncio.create_task(send(engine, 1.0, 0))
            await until(lambda: (tmp_path / "run/servers/0.log").exists())
            await until(lambda: record(tmp_path, 0).pid)
            pids.append(record(tmp_path, 0).pid)
            with pytest.raises(FleetLost) as caught:
                await starting
        finally:
            await engine.aclose()
        assert "server 0 did not start within servers.start_s=3 s" in str(caught.value)
        assert "stub on port" in str(caught.value), "the end of its log"

    asyncio.run(main())
    assert gone(pids)


def test_a_wrapper_that_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written nothing: the run does not wait for it, and shows its last words."""
    monkeypatch.setattr(local, "WRAPPER", "agenttrain.engines.vllm_server.absent")

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            text = await failed_start(stubs(tmp_path, count=1))
        assert "a server did not start: server 0 lost its wrapper" in text
        assert "No module named agenttrain.engines.vllm_server.absent" in text

    asyncio.run(main())


RUN = """
import asyncio, sys, time
from pathlib import Path
from fleet_kit import record, send, stubs

folder = Path(sys.argv[1])
engine = stubs(folder)
asyncio.run(send(engine, 1.0, 0))
print(engine.writer.folder)
for number in (0, 1):
    print(record(folder, number).pid, record(folder, number).wrapper, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "kit")},  # for `fleet_kit`
    )
    assert run.stdout is not None
    run.stdout.readline()  # the line on the start of the servers
    weights = Path(run.stdout.readline().strip())
    pids = [int(word) for _ in (0, 1) for word in run.stdout.readline().split()]
    assert len(pids) == 4 and weights.is_dir()
    run.kill()
    run.wait()
    run.stdout.close()
    assert gone(pids)
    assert not weights.exists()
