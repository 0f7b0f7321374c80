"""Servers that somebody else started: stubs that the tests start, kill and start again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import (
    TEXT,
    TOKEN_OF_OTHERS,
    failed_start,
    free_port,
    inputs,
    outside_stubs,
    running,
    sample,
    send,
    stubs,
    until,
)
from recurrent_families import tiny_recurrent
from server_stub import TOKEN_S

from agenttrain import cli
from agenttrain.engines.config import Sampling
from agenttrain.engines.placement import place
from agenttrain.engines.vllm_server.client import ServerFacts
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.files_transport import METHODS
from agenttrain.engines.vllm_server.fleet import FleetLost
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.health import MemberState
from agenttrain.engines.vllm_server.outside import NEEDS, Outside, problems
from agenttrain.engines.vllm_server.server_records import ServerPlan
from agenttrain.engines.vllm_server.starting import build, outside_servers
from agenttrain.runs.sampling import server_inputs
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.types import ConfigError


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, TOKEN_OF_OTHERS)


def outside(servers: list[Any], **settings: Any) -> dict[str, Any]:
    return {"count": 1, "admin_urls": [server.url for server in servers], **settings}


def live(engine: Any) -> list[int]:
    return [one.number for one in engine.fleet.members if one.state is MemberState.live]


@pytest.mark.slow
def test_they_serve_and_outlive_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        with outside_stubs(None, None) as servers:
            async with running(tmp_path, **outside(servers)) as engine:
                weights = engine.writer.folder
                assert weights.is_relative_to(tmp_path / "run"), "another machine may see it"
                await asyncio.gather(*(sample(engine, number) for number in range(20)))
                assert await send(engine, 0.5, 1) == [-0.5] * 3
                for server in servers:
                    assert await server.call("GET", "/weight_info") == {"weight_version": "1"}
                    assert len(await server.call("GET", "/stub/log")) >= 4
            assert not weights.exists()
            assert [server.process.poll() for server in servers] == [None, None]
            # The next run may have the same servers, with other weights.
            async with running(tmp_path / "next", **outside(servers)) as engine:
                await sample(engine, 1)

    asyncio.run(main())


@pytest.mark.slow
def test_one_that_comes_back_is_sent_the_weights_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_S, "0.01")

    async def main() -> None:
        with outside_stubs(None, None) as servers:
            async with running(tmp_path, **outside(servers)) as engine:
                await send(engine, 2.0, 7)
                work = [asyncio.create_task(sample(engine, n, 60)) for n in range(12)]
                await until(lambda: engine.fleet.members[0].requests > 1)
                servers[0].end()
                await asyncio.gather(*work)
                assert engine.fleet.resent > 0
                await until(lambda: live(engine) == [1])
                servers[0].start()
                await until(lambda: live(engine) == [0, 1])
                await asyncio.gather(*(sample(engine, n, 4) for n in range(40)))
                log = await servers[0].call("GET", "/stub/log")
                assert log and {one["version"] for one in log} == {"7"}

                # Back before anybody asked: its label shows it.
                servers[1].end()
                servers[1].start()
                await until(lambda: engine.fleet.members[1].boot == 2 and live(engine) == [0, 1])
                await asyncio.gather(*(sample(engine, n, 4) for n in range(40)))
                log = await servers[1].call("GET", "/stub/log")
                assert log and {one["version"] for one in log} == {"7"}
        assert f"server 0 ({servers[0].url}) " in capsys.readouterr().err

    asyncio.run(main())


@pytest.mark.slow
def test_none_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        with outside_stubs(None, None) as servers:
            async with running(tmp_path, **outside(servers, dead_s=1.0)) as engine:
                for server in servers:
                    server.end()
                with pytest.raises(FleetLost) as caught:
                    await asyncio.gather(*(sample(engine, n) for n in range(4)))
                text = str(caught.value)
                assert "no server is left" in text
                assert text.count("servers.dead_s=1 s are over") == 2
                assert all(server.url in text for server in servers)

    asyncio.run(main())


@pytest.mark.slow
def test_a_stopped_one_is_left_alone_until_it_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        with outside_stubs(None, None) as servers:
            async with running(tmp_path, **outside(servers, dead_s=0.5)) as engine:
                os.kill(servers[0].process.pid, signal.SIGSTOP)
                await asyncio.gather(*(sample(engine, n) for n in range(20)))
                assert live(engine) == [1]
                os.kill(servers[0].process.pid, signal.SIGCONT)
                await until(lambda: live(engine) == [0, 1])

    asyncio.run(main())


@pytest.mark.slow
def test_one_that_does_not_load_what_it_was_sent(tmp_path: Path) -> None:
    async def main() -> None:
        with outside_stubs(None, None) as servers:
            async with running(tmp_path, **outside(servers)) as engine:
                await servers[0].call("POST", "/stub/fault", {"kind": "deaf", "times": 1})
                await send(engine, 3.0, 1)
                assert engine.fleet.members[0].reason == "is not used: not 3.0"
                await asyncio.gather(*(sample(engine, n) for n in range(10)))
                # It is sent them again, and nobody has killed it.
                await until(lambda: live(engine) == [0, 1])
                assert servers[0].process.poll() is None
                log = await servers[0].call("GET", "/stub/log")
                assert {one["version"] for one in log} <= {"1"}

    asyncio.run(main())


@pytest.mark.slow
def test_fewer_than_the_run_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        with outside_stubs(None) as servers:
            await servers[0].ready()
            later = free_port()
            urls = [servers[0].url, f"http://127.0.0.1:{later}"]
            engine = stubs(tmp_path / "two", count=2, admin_urls=urls, start_s=1.0)
            text = await failed_start(engine)
            assert "servers.count=2: 1 of the servers of servers.admin_urls can be used" in text
            assert f"server 1 ({urls[1]}) does not answer" in text

            one = {"count": 1, "admin_urls": urls, "dead_s": 0.5}
            async with running(tmp_path / "one", **one) as engine:
                assert f"goes on without server 1 ({urls[1]})" in capsys.readouterr().out
                with outside_stubs(later):
                    await until(lambda: live(engine) == [0, 1])

    asyncio.run(main())


def test_others_than_the_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with outside_stubs(None, version="0.31.0", without=["/pause"]) as servers:
            engine = stubs(tmp_path / "other", **outside(servers))
            lines = (await failed_start(engine)).splitlines()
            key = f"servers.admin_urls={servers[0].url}"
            assert lines[0].startswith(f"{key}: vLLM 0.31.0 runs there")
            assert lines[1] == f"{key}: it lacks /pause; start it with {NEEDS['/pause']}"
        with outside_stubs(None) as servers:
            monkeypatch.setenv(TOKEN, "another")
            engine = stubs(tmp_path / "token", **outside(servers))
            with pytest.raises(FleetLost, match=f"{TOKEN}: {servers[0].url} refuses it"):
                await send(engine, 1.0, 0)
            await engine.aclose()
            monkeypatch.delenv(TOKEN)
            with pytest.raises(ConfigError, match=f"{TOKEN} is not set"):
                stubs(tmp_path / "none", **outside(servers))

    asyncio.run(main())


def test_weights_that_no_server_sees(tmp_path: Path) -> None:
    """Their folder is on another machine, or the server may not read it."""

    async def main() -> None:
        with outside_stubs(None) as servers:
            engine = stubs(tmp_path, **outside(servers))
            await engine.fleet._await_start()
            write = engine.writer.write

            def elsewhere(weights: Any, version: int) -> Any:
                files = write(weights, version)
                files.folder.rename(tmp_path / "elsewhere")
                return files

            engine.writer = type("Elsewhere", (), {"write": staticmethod(elsewhere)})()
            text = await failed_start(engine)
            assert "No such file or directory" in text
            assert "set weight_sync.folder" in text

    asyncio.run(main())


PLAN = ServerPlan(
    module="server_stub",
    model="model",
    tokenizer=None,
    dtype="float32",
    max_context=256,
    seed=0,
    engine={"quantization": None},
    servers={},
    rank=0,
    adapters=2,
    weights=None,
)
MODEL = {
    "dtype": "torch.float32",
    "max_model_len": 256,
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "skip_tokenizer_init": False,
}


@pytest.mark.parametrize(
    ("model", "run", "message"),
    [
        ({}, {}, None),
        (
            {"dtype": "torch.bfloat16"},
            {},
            "engine.dtype=float32: http://a:1 has bfloat16; set engine.dtype=bfloat16, or start it",
        ),
        ({"max_model_len": 128}, {}, "engine.max_context=256: http://a:1 takes 128 tokens"),
        ({"logprobs_mode": "raw_logprobs"}, {}, "start it with --logprobs-mode processed_logprobs"),
        ({"quantization": "fp8"}, {}, "engine.quantization=None: http://a:1 has fp8"),
        (
            {"skip_tokenizer_init": True},
            {"tokenizer": "model"},
            "has no tokenizer, which grammars nee",
        ),
        ({}, {"record_routes": True}, "start it with --enable-return-routed-experts"),
        ({}, {"rank": 16}, "model.lora.rank=16: http://a:1 takes adapters of rank 8; start it"),
    ],
)
def test_properties_that_differ(model: dict, run: dict, message: str | None) -> None:
    facts = ServerFacts(
        version="0.32.0",
        paths=frozenset([*NEEDS, "/v1/load_lora_adapter"]),
        config={
            "model_config": {**MODEL, **model},
            "weight_transfer_config": {"backend": "files"},
            "lora_config": {"max_lora_rank": 8},
            "parallel_config": {"worker_extension_cls": METHODS},
        },
        world_size=1,
    )
    plan = replace(PLAN, **run)
    outside = Outside(
        urls=("http://a:1",), router=None, token="x", plan=plan, text="", token_ids=()
    )
    found = list(problems("http://a:1", facts, outside))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


@pytest.mark.parametrize(
    ("has_states", "states", "convolutions", "dtype", "is_fit"),
    [
        (True, "float32", "auto", "bfloat16", True),
        (True, "auto", "auto", "bfloat16", False),  # vLLM takes the model's format
        (True, "auto", "auto", "float32", True),
        (True, "auto", "float32", "bfloat16", True),  # that of the convolutions, if it is set
        (True, "auto", "bfloat16", "float32", False),
        (True, "bfloat16", "auto", "float32", False),
        # Not shown: `test_a_server_that_does_not_show_its_states_is_warned_of`.
        (True, None, None, "bfloat16", True),
        (False, "auto", "auto", "bfloat16", True),
    ],
)
def test_recurrent_states_have_to_be_in_float32(
    has_states: bool, states: str | None, convolutions: str | None, dtype: str, is_fit: bool
) -> None:
    formats = {"mamba_ssm_cache_dtype": states, "mamba_cache_dtype": convolutions}
    facts = ServerFacts(
        version="0.32.0",
        paths=frozenset(NEEDS),
        config={
            "model_config": {**MODEL, "dtype": f"torch.{dtype}"},
            "cache_config": {key: name for key, name in formats.items() if name is not None},
            "weight_transfer_config": {"backend": "files"},
            "lora_config": None,
            "parallel_config": {"worker_extension_cls": METHODS},
        },
        world_size=1,
    )
    run = Outside(
        urls=("http://a:1",),
        router=None,
        token="x",
        plan=replace(PLAN, dtype=dtype),
        text="",
        token_ids=(),
        has_states=has_states,
    )
    found = list(problems("http://a:1", facts, run))
    assert found == [] if is_fit else "--mamba-ssm-cache-dtype float32" in found[0]


@pytest.mark.parametrize(
    ("family", "expected"), [("Qwen3_5", True), ("GraniteMoeHybrid", True), ("Lfm2", False)]
)
def test_the_models_config_says_whether_there_are_states(
    family: str, expected: bool, tmp_path: Path
) -> None:
    tiny_recurrent(family).config.save_pretrained(tmp_path)
    parts = inputs(tmp_path, tmp_path, count=1, admin_urls=["http://a:1"])
    assert outside_servers(PLAN, parts).has_states is expected


@pytest.mark.slow
def test_a_server_that_does_not_show_its_states_is_warned_of(tmp_path: Path) -> None:
    async def main() -> None:
        with outside_stubs(None) as servers:
            tiny_recurrent("Qwen3_5").config.save_pretrained(tmp_path / "model")
            (tmp_path / "run").mkdir()
            parts = inputs(tmp_path / "run", tmp_path / "model", **outside(servers))
            engine = build(VllmServerSettings(max_context=256), parts)
            try:
                with pytest.warns(RuntimeWarning, match="--mamba-ssm-cache-dtype float32"):
                    await send(engine, 1.0, 0)
            finally:
                await engine.aclose()

    asyncio.run(main())


@pytest.mark.slow
def test_a_router_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends requests to a server before the run has sent that one the weights."""
    monkeypatch.setenv(TOKEN_S, "0.01")

    async def main() -> None:
        with outside_stubs(None, None) as servers:
            port = free_port()
            words = [str(Path(__file__).parents[1] / "kit" / "router.py"), str(port)]
            router = subprocess.Popen([sys.executable, *words, *(one.url for one in servers)])
            try:
                url = f"http://127.0.0.1:{port}"
                async with running(tmp_path, **outside(servers, url=url, dead_s=20.0)) as engine:
                    await send(engine, 2.0, 7)
                    await asyncio.gather(*(sample(engine, n) for n in range(12)))
                    logs = [await one.call("GET", "/stub/log") for one in servers]
                    assert min(map(len, logs)) >= 5
                    work = [asyncio.create_task(sample(engine, n, 60)) for n in range(12)]
                    await asyncio.sleep(0.2)
                    servers[0].end()
                    servers[0].start()
                    await asyncio.gather(*work)
                    await asyncio.gather(*(sample(engine, n, 4) for n in range(12)))
                    await until(lambda: live(engine) == [0, 1])
                    completion = await engine.generate(TEXT, Sampling(max_tokens=2), session="a")
                    assert completion.versions == ((7, 2),)
                    assert engine.metrics()["fleet/requests"] > 37
            finally:
                router.kill()
                router.wait()

    asyncio.run(main())


def test_a_server_by_hand_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert cli.main(["engine-server", str(tmp_path / "server"), *words]) == 2
        return capsys.readouterr().err

    assert "--host 0.0.0.0: has no effect without --port" in refused("host=0.0.0.0")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "config.yaml").touch()  # the folder of a run, which has ended
    assert "no run with servers is going on in this folder" in refused("host=0.0.0.0")
    (tmp_path / "server" / "config.yaml").unlink()
    assert "--port x: expected a whole number, from 1 to 65535" in refused("port=x")
    assert "--number 1: has no effect beside --port" in refused("port=8000", "number=1")
    assert "servers.cuont=1: unknown key" in refused("port=8000", "servers.cuont=1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use; take another" in refused(f"port={taken.getsockname()[1]}")


def test_a_server_alone_has_the_first_gpus_of_its_machine(tmp_path: Path) -> None:
    with hydra_session(Source()):
        overrides = ["engine=vllm_server", "servers.tensor_parallel_size=2"]
        config = compose_run(overrides, Source()).config
    inputs = server_inputs(config, tmp_path, on_gpu=True)
    assert place(inputs.servers, inputs.trainers, inputs.taken) == ((0, 1),)
