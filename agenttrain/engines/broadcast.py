"""Weights by a broadcast: the trainer sends them to all servers at once, from its GPU to theirs.

During a sync the trainer talks to the servers itself, because only the sender notices that a
broadcast hangs. The fleet, which may be in another process, knows which servers answer and which
may sample. A sync of two servers, the second of which dies in it::

    trainer                            fleet
    assemble(7)                 -->
                                <--    Audience: servers 0 and 1, their addresses and workers
    the broadcast breaks
    server 1 is lost            -->    kills it; no server has the weights: False
    assemble(7)                 -->
                                <--    Audience: server 0
    broadcast
    server 0 has the weights    -->    its weights are checked, and it serves: True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from agenttrain.training.config import WeightSyncMode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUFFER_BYTES = 1 << 28
"""Bytes of packed weights that are sent at once: servers have little memory beside their caches."""


class WeightForm(NamedTuple):
    """Name, number format and shape of a weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@runtime_checkable
class Regathered(Protocol):
    """Weights that can be gathered again if their first broadcast has failed."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather all weights, from the first on. All processes do so together."""

    def forms(self) -> list[WeightForm]:
        """Return the form of each weight, in the order of the iteration, without gathering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A server that gets weights in a broadcast."""

    number: int
    boot: int
    """Number of its start: a server that was started again is another receiver."""
    url: str
    token: str = field(repr=False)
    workers: int
    """Its processes with a GPU, each of which is a rank of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """The servers that get a version of the weights together."""

    version: int
    receivers: tuple[Receiver, ...]
    mode: WeightSyncMode
    """Treatment of requests in flight."""
    pause_s: float
    """Longest time that a pause waits for requests in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Result of a broadcast for one server."""

    number: int
    """Number of the server."""
    boot: int
    """Number of the server's start that took part, as in `Receiver`."""
    problem: str | None = None
    """Reason why the server has to be started again. None: it has the weights."""
    paused_s: float = 0.0
    """Seconds for which the server did not sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastResult:
    """Result of a broadcast. A server without a receipt is in the next audience."""

    version: int
    receipts: tuple[Receipt, ...]


@runtime_checkable
class Broadcasts(Protocol):
    """A `Separate` engine whose copies take new weights from a broadcast.

    Used if the policy is in another process, with `assemble` and `settle` instead of `update`.
    """

    async def assemble(self, version: int) -> Audience:
        """Stop sampling, and return the servers that answer. Waits until there is one."""

    async def settle(self, result: BroadcastResult) -> bool:
        """Record which servers have the weights. Return False if none has: send them again."""


class WeightSender(Protocol):
    """The trainer's end of broadcasts, in its first process."""

    async def pause(self, audience: Audience) -> None:
        """Have the servers end or hold their requests. Servers that fail are left out."""

    async def send(self, weights: Regathered) -> BroadcastResult:
        """Send the weights to the paused servers.

        All weights are gathered once, even after a failure: the other processes take part in
        every gather and would wait for this one. Raises the error of a gather.
        """

    async def aclose(self) -> None:
        """Leave the group of this process and the servers' workers."""
