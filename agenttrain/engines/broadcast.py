"""Weights by a broadcast: the trainer sends them to all servers at once, from its GPU to theirs.

The trainer has the weights and speaks with the servers during a sync, as it alone notices that a
broadcast hangs. The fleet, maybe in another process, knows the servers: who is there, and who may
sample. A sync of two servers, the second of which dies in it::

    trainer                            fleet
    assemble(7)                 -->
                                <--    Audience: servers 0 and 1, their addresses and workers
    the broadcast breaks
    server 1 is lost            -->    kills it; nobody has the weights: False
    assemble(7)                 -->
                                <--    Audience: server 0
    broadcast
    server 0 has the weights    -->    it is compared, and serves: True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from agenttrain.training.config import WeightSyncMode

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightForm(NamedTuple):
    """Name, number format and shape of a weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@runtime_checkable
class Regathered(Protocol):
    """Weights that can be gathered again, where the first broadcast of them has failed."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather all weights, from the first on; all processes do so together."""
        ...

    def forms(self) -> list[WeightForm]:
        """Return the form of each weight in the order of the iteration, and gather none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A server that is to get weights."""

    number: int
    boot: int
    """Its start: a server that was started again is another receiver."""
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
    """Longest time for these to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Result of a broadcast for one server."""

    number: int
    boot: int
    problem: str | None = None
    """Reason why it has to be started again; None: it has the weights."""
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastResult:
    """Result of a broadcast. A server without a receipt is in the next audience."""

    version: int
    receipts: tuple[Receipt, ...]


@runtime_checkable
class Broadcasts(Protocol):
    """A `Separate` engine whose copies take new weights from a broadcast.

    For weights of another process: `assemble` and `settle` take the place of `update`.
    """

    async def assemble(self, version: int) -> Audience:
        """Stop sampling from the servers that answer, and return them; wait until there is one."""
        ...

    async def settle(self, result: BroadcastResult) -> bool:
        """Record who has the weights; return False if nobody has: they have to be sent again."""
        ...


class WeightSender(Protocol):
    """The trainer's end of broadcasts, in its first process."""

    async def pause(self, audience: Audience) -> None:
        """Have the servers end or hold their requests; those that fail are left out."""
        ...

    async def send(self, weights: Regathered) -> BroadcastResult:
        """Send the weights to the paused servers.

        They are gathered once from the first to the last, whatever happens, as other processes
        gather along. Raises the error of a gather.
        """
        ...

    async def aclose(self) -> None:
        """Leave the group."""
        ...
