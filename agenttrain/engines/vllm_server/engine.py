"""`VllmServerEngine`: vLLM servers in processes of their own, driven over HTTP.

The trainer's process has no vLLM in it: a server that dies takes neither the run nor another
server along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agenttrain.engines.base import EngineError, refuse_images
from agenttrain.engines.config import Sampling
from agenttrain.engines.vllm_server.fleet import Fleet
from agenttrain.engines.vllm_server.local import LocalServers, NodeServers, OutsideServers
from agenttrain.engines.weight_files import BadWeights, WeightFiles, WeightWriter
from agenttrain.types import Completion

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class VllmServerEngine:
    """An `Engine` over a `Fleet`, with weights of its own that `update` replaces on all servers."""

    def __init__(
        self,
        fleet: Fleet,
        servers: LocalServers | NodeServers | OutsideServers,
        writer: WeightWriter,
        *,
        max_context: int,
        dtype: torch.dtype,
        quantized: bool = False,
        grammars: bool = False,
    ) -> None:
        self.fleet = fleet
        self.max_context = max_context
        self.dtype = dtype
        self.quantized = quantized
        self.takes_adapters = writer.alpha is not None
        self._grammars = grammars
        self._servers: LocalServers | NodeServers | OutsideServers | None = servers
        self._writer = writer

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Implement `Engine.generate`; the turns of a session go to one server while it lives.

        Raises EngineError for a request that vLLM refuses, ImagesRefused, and FleetLost once no
        server is left. A `parent` changes nothing: vLLM gives out no seats.
        """
        refuse_images(self, images, session)
        room = self.max_context - len(token_ids)
        if not token_ids or room < 1:
            raise EngineError(
                f"token_ids: {len(token_ids)} ids leave no room in max_context={self.max_context}, "
                "or are none. Shorten the prompt, or raise engine.max_context."
            )
        if sampling.grammar is not None and not self._grammars:
            raise EngineError(
                "sampling.grammar: the servers were started without a tokenizer, which grammars "
                "need."
            )
        budget = min(sampling.max_tokens, room)
        return await self.fleet.generate(
            token_ids, replace(sampling, max_tokens=budget), session=session
        )

    async def release(self, session: str) -> None:
        """End a session; adapters that no session uses go at the next update.

        A server's prefix cache evicts what was not used for the longest.
        """
        self.fleet.release(session)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights to files and have every server load them.

        A server that fails is killed and gets them once it has started again. Nothing is sampled
        until `verify` has passed. Raises EngineError for weights that differ in name or form from
        those before, or that cannot be written, and FleetLost.
        """
        try:
            files = await asyncio.to_thread(self._writer.write, weights, version)
        except (BadWeights, OSError) as error:
            raise EngineError(
                f"weight update {version}: {error}; the files of the weights are in "
                f"{self._writer.folder} (weight_sync.folder)"
            ) from error
        await self.load(files)

    @property
    def writer(self) -> WeightWriter:
        """Implement `ReadsFiles.writer`."""
        return self._writer

    async def load(self, files: WeightFiles) -> None:
        """Implement `ReadsFiles.load`."""
        await self.fleet.load(files)

    async def verify(
        self, token_ids: Sequence[int], problem: Callable[[Sequence[float]], str | None]
    ) -> list[float]:
        """Implement `Replicated.verify`."""
        return await self.fleet.verify(token_ids, problem)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of every id after the first, at temperature 1."""
        return await self.fleet.score(token_ids)

    async def sleep(self) -> None:
        """Do nothing: servers have devices of their own."""

    def server_of(self, session: str) -> int | None:
        """Implement `Placed.server_of`."""
        return self.fleet.server_of(session)

    def metrics(self) -> dict[str, float]:
        """Implement `Metered.metrics`."""
        return self.fleet.metrics()

    async def aclose(self) -> None:
        """End the servers; calls still waiting fail. A second time does nothing."""
        servers, self._servers = self._servers, None
        if servers is not None:
            try:
                await self.fleet.aclose()
            finally:
                await asyncio.to_thread(servers.end)
