"""Experts that vLLM 0.32 returns, from arrays and answers in its forms. No vLLM and no GPU here.

`vllm/outputs.py`: `CompletionOutput.routed_experts`, [tokens - 1, layers, top_k], uint8 or uint16.
`vllm/entrypoints/scale_out/token_in_token_out/protocol.py`: the base64 text of a .npy file.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import sys
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest
from fake_vllm import Machine, machine

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import EngineDtype, Sampling
from agenttrain.engines.routed_experts import read_routes
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.engines.vllm_server.client import ServerClient, completion_of
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.server_process import server_flags
from agenttrain.engines.vllm_server.server_records import ServerPlan
from agenttrain.types import Completion, Routes
from agenttrain.utils.model_path import model_folder
from agenttrain.utils.sections import plain

__all__ = ["machine"]

# Prompt 7 8 9, sampled 20 21 2: positions 0 to 4 were fed. Two layers, of which the first has no
# experts, and three of 300 experts for each token.
#              7            8            9            20             21
EXPERTS = [[1, 2, 3], [4, 5, 6], [7, 8, 299], [10, 11, 12], [13, 14, 15]]
WHOLE = np.array([[[0, 0, 0], row] for row in EXPERTS], dtype=np.uint16)
ROUTES = Routes(
    experts=np.array([[[0, 0, 0], row] for row in EXPERTS[2:]], dtype="<u2").tobytes(),
    layers=2,
    top_k=3,
)


def encoded(experts: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, experts, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


def answer(**changes: object) -> dict[str, object]:
    content = [{"token_id": token, "logprob": -0.5} for token in (20, 21, 2)]
    choice = {
        "token_ids": [20, 21, 2],
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "weight_versions": [{"version": "6", "start": 0, "end": 3}],
    }
    return {"choices": [{**choice, **changes}]}


@pytest.mark.parametrize("start", [0, 1, 2])
def test_rows_of_the_sampled_tokens(start: int) -> None:
    """With `routed_experts_prompt_start` = 2 the prompt's last position is the first row."""
    assert read_routes(WHOLE[start:], 3) == ROUTES
    returned = answer(routed_experts=encoded(WHOLE[start:]))
    assert completion_of(returned, record_routes=True).routes == ROUTES


def test_narrow_numbers_are_the_same_experts() -> None:
    narrow = np.minimum(WHOLE, 255).astype(np.uint8)
    assert read_routes(narrow, 3) == read_routes(narrow.astype(np.int32), 3)


def test_experts_of_an_answer_are_not_read_unless_they_are_recorded() -> None:
    """A server that serves several runs returns them to all."""
    assert completion_of(answer()).routes is None
    assert completion_of(answer(routed_experts="no base64 of an array")).routes is None


def test_a_request_may_want_none_of_a_server_that_returns_experts() -> None:
    body = json.dumps(answer(routed_experts=encoded(WHOLE[2:]))).encode()
    headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        await reader.readexactly(int(length[1]))
        writer.write(f"HTTP/1.1 200 OK\r\n{headers}connection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def main() -> list[Routes | None]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, aclosing(ServerClient(url, "x", timeout_s=60.0)) as client:
            return [
                (
                    await client.generate(
                        [7, 8, 9],
                        Sampling(max_tokens=3, routes=routes),
                        request_id=f"wants {routes}",
                        session="a",
                        salt="s",
                        record_routes=True,
                    )
                ).routes
                for routes in (True, False)
            ]

    assert asyncio.run(main()) == [ROUTES, None]


def test_an_answer_without_the_recorded_experts_is_refused() -> None:
    for returned in (answer(), answer(routed_experts=None)):
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            completion_of(returned, record_routes=True)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "--enable-return-routed-experts"),
        (WHOLE[3:], r"shape \[2, 2, 3\] with 3 sampled tokens"),
        (WHOLE[:, 0], r"shape \[5, 3\]"),
        (WHOLE.astype(np.float32), "float32"),
    ],
)
def test_other_forms_are_refused(experts: np.ndarray | None, message: str) -> None:
    with pytest.raises(EngineError, match=message) as refused:
        read_routes(experts, 3)
    assert str(refused.value).startswith("algorithm.router_replay=rollout: ")


def test_text_that_is_no_array_is_refused() -> None:
    with pytest.raises(EngineError, match="no array"):
        broken = answer(routed_experts=base64.b64encode(b"abc").decode())
        completion_of(broken, record_routes=True)


def complete(*, routes: bool = True, **settings: bool) -> Completion:
    """Three tokens after the prompt 1 5 6, by an engine over the stand-in of vLLM."""

    async def main() -> Completion:
        config = VllmSettings(dtype=EngineDtype.float32)
        engine = VllmEngine(model_folder("bundled:shop"), config, **settings)
        try:
            sampling = Sampling(max_tokens=3, routes=routes)
            return await engine.generate([1, 5, 6], sampling, session="a")
        finally:
            await engine.aclose()

    return asyncio.run(main())


def test_the_engine_asks_for_experts_and_reads_them(machine: Machine) -> None:
    routes = complete(record_routes=True).routes
    assert machine.llms[0].arguments.enable_return_routed_experts
    # Positions 2 to 4: the prompt's last, and two sampled tokens.
    rows = [[[position, 1], [0, position]] for position in (2, 3, 4)]
    expected = np.array(rows, dtype="<u2").tobytes()
    assert routes == Routes(experts=expected, layers=2, top_k=2)


def test_a_request_that_wants_no_experts_gets_none(machine: Machine) -> None:
    assert complete(record_routes=True, routes=False).routes is None


def test_the_engine_asks_for_none_by_default(machine: Machine) -> None:
    assert complete().routes is None
    assert not hasattr(machine.llms[0].arguments, "enable_return_routed_experts")


@pytest.mark.parametrize("record_routes", [True, False])
def test_servers_are_started_so_that_they_return_experts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, record_routes: bool
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets vLLM's variables
    plan = ServerPlan(
        module="m",
        model=str(model_folder("bundled:shop")),
        tokenizer=None,
        dtype="float32",
        max_context=64,
        seed=0,
        engine=plain(VllmServerSettings()),
        servers={"tensor_parallel_size": 1, "args": {}},
        rank=0,
        adapters=2,
        weights=None,
        record_routes=record_routes,
    )
    flags = server_flags(plan, 80)
    assert ("--enable-return-routed-experts" in flags) is record_routes
    assert "--enable-prefix-caching" in flags  # without which vLLM refuses the flag


def test_a_version_without_experts_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(model: str, dtype: str, **others: object) -> SimpleNamespace:
        if "enable_return_routed_experts" in others:
            raise TypeError("unexpected keyword argument 'enable_return_routed_experts'")
        return SimpleNamespace(model=model, dtype=dtype, **others)

    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", arguments)
    with pytest.raises(EngineError, match="vLLM installed here does not return"):
        complete(record_routes=True)
