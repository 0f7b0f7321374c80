"""`ServerEngine`: vLLM servers in processes of their own, driven over HTTP.

A server that dies takes neither the run nor another server along. `VllmServerEngine` sends weights
by files, `BroadcastEngine` from GPU to GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from agenttrain.engines.base import EngineError, refuse_images
from agenttrain.engines.broadcast import Audience, BroadcastResult, Regathered, WeightSender
from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm_server.broadcast_fleet import BroadcastFleet
from agenttrain.engines.vllm_server.fleet import Fleet
from agenttrain.engines.weight_files import BadWeights, WeightFiles, WeightWriter
from agenttrain.types import Completion

if TYPE_CHECKING:
    import torch
    from torch import Tensor


F = TypeVar("F", bound=Fleet)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedForm:
    """Form of the model on the servers."""

    max_context: int
    dtype: torch.dtype
    quantized: bool = False
    grammars: bool = False
    """The servers have a tokenizer, which grammars need."""


class ServerEngine(Generic[F]):
    """An `Engine` over a `Fleet`, without `update`: subclasses send weights in different ways.

    Used in one event loop. `aclose` ends the servers too, by the function `end_servers`.
    """

    def __init__(self, fleet: F, end_servers: Callable[[], None], form: ServedForm) -> None:
        self.fleet = fleet
        self.max_context = form.max_context
        self.dtype = form.dtype
        self.quantized = form.quantized
        self._takes_grammars = form.grammars
        self._end_servers: Callable[[], None] | None = end_servers

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Implement `Engine.generate`. The turns of a session go to one server while it lives.

        Raises EngineError, ImagesRefused, and FleetLost. `parent` is not used: servers decode any
        number of sessions together.
        """
        refuse_images(self, images, session)
        remaining_tokens = self.max_context - len(token_ids)
        if not token_ids or remaining_tokens < 1:
            raise EngineError(
                f"token_ids: {len(token_ids)} ids leave no room in max_context={self.max_context}, "
                "or are none. Shorten the prompt, or raise engine.max_context."
            )
        if sampling.grammar is not None and not self._takes_grammars:
            raise EngineError(
                "sampling.grammar: the servers were started without a tokenizer, which grammars "
                "need."
            )
        budget = min(sampling.max_tokens, remaining_tokens)
        return await self.fleet.generate(
            token_ids, replace(sampling, max_tokens=budget), session=session
        )

    async def release(self, session: str) -> None:
        """End a session. The next update removes adapters that no session uses."""
        self.fleet.release(session)

    async def verify(
        self, token_ids: Sequence[int], find_problem: Callable[[Sequence[float]], str | None]
    ) -> list[float]:
        """Implement `Replicated.verify`: check every server's weights by its scores."""
        return await self.fleet.verify(token_ids, find_problem)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of every id after the first, at temperature 1."""
        return await self.fleet.score(token_ids)

    async def sleep(self) -> None:
        """Do nothing: servers keep their memory."""

    def server_of(self, session: str) -> int | None:
        """Implement `Placed.server_of`."""
        return self.fleet.server_of(session)

    def metrics(self) -> dict[str, float]:
        """Implement `Metered.metrics`."""
        return self.fleet.metrics()

    async def aclose(self) -> None:
        """End the servers. Calls still waiting fail. A second call does nothing."""
        end_servers, self._end_servers = self._end_servers, None
        if end_servers is not None:
            try:
                await self.fleet.aclose()
            finally:
                await asyncio.to_thread(end_servers)


class VllmServerEngine(ServerEngine[Fleet]):
    """Servers that read new weights from files: implements `ReadsFiles`."""

    def __init__(
        self,
        fleet: Fleet,
        end_servers: Callable[[], None],
        form: ServedForm,
        writer: WeightWriter,
        start_servers: Callable[[], None] | None = None,
    ) -> None:
        """Take new weights as adapters alone if `writer` has their `alpha`, else as all weights.

        `end_servers` ends the servers when the engine closes. `form` says how they hold the model.
        `start_servers` starts them at the first `load`; None: they have been started.
        """
        super().__init__(fleet, end_servers, form)
        self._start_servers = start_servers
        self.takes_adapters = writer.alpha is not None
        self.writer = writer

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights to files and have every server load them; `verify` comes next.

        A server that fails gets them once it has started again. Raises EngineError and FleetLost.
        """
        try:
            files = await asyncio.to_thread(self.writer.write, weights, version)
        except (BadWeights, OSError) as error:
            raise EngineError(
                f"weight update {version}: {error}; the files of the weights are in "
                f"{self.writer.folder} (weight_sync.folder)"
            ) from error
        await self.load(files)

    async def load(self, files: WeightFiles) -> None:
        """Implement `ReadsFiles.load`."""
        if self._start_servers is not None:
            self._start_servers()
            self._start_servers = None
        await self.fleet.load(files)


class BroadcastEngine(ServerEngine[BroadcastFleet]):
    """Servers whose weights the trainer broadcasts: implements `Broadcasts`.

    A broadcast has three parts: `assemble` returns the servers that take part, the trainer's
    process sends them the weights, and `settle` takes its result.
    """

    takes_adapters = False

    def __init__(
        self,
        fleet: BroadcastFleet,
        end_servers: Callable[[], None],
        form: ServedForm,
        sender: WeightSender,
    ) -> None:
        """`sender` is only used if the policy is in this process."""
        super().__init__(fleet, end_servers, form)
        self._sender = sender

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Broadcast the weights to all servers that answer, until at least one has got them.

        Servers that have not are started again, or get them with a later broadcast. Raises
        EngineError and FleetLost.
        """
        assert isinstance(weights, Regathered), "a failed broadcast has to begin anew"
        has_arrived = False
        while not has_arrived:  # a broadcast may fail at all of its servers
            audience = await self.assemble(version)  # the servers that take part
            await self._sender.pause(audience)  # they sample nothing until the end of `send`
            result = await self._sender.send(weights)
            has_arrived = await self.settle(result)

    async def assemble(self, version: int) -> Audience:
        """Implement `Broadcasts.assemble`."""
        return await self.fleet.assemble(version)

    async def settle(self, result: BroadcastResult) -> bool:
        """Implement `Broadcasts.settle`."""
        return await self.fleet.settle(result)

    async def aclose(self) -> None:
        """End the servers, and leave the NCCL group that broadcasts used."""
        try:
            await self._sender.aclose()
        finally:
            await super().aclose()
