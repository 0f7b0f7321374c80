"""vLLM's weight transfer backend "nccl" for several servers: the trainer's end. Never run on GPUs.

vLLM's own trainer engine makes the group and broadcasts packed tensors, but to one server. This
module adds what a fleet needs. `FanOut` presents the whole fleet to vLLM's sender as one client.
`NcclSender` gives up a group that hangs. Ranks, with servers of 2, 1 and 4 GPUs::

    rank      0         1  2       3         4  5  6  7        world_size = 1 + 2 + 1 + 4
              trainer   server 0   server 1  server 2          rank_offset = 1, 3, 4

A worker of vLLM 0.32 cannot leave a broadcast whose peer has died. So after a failed broadcast, a
server that does not answer soon is started again. A server that does gets all weights once more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from agenttrain.engines.base import EngineError
from agenttrain.engines.broadcast import (
    BUFFER_BYTES,
    Audience,
    BroadcastResult,
    Receipt,
    Receiver,
    Regathered,
)
from agenttrain.engines.vllm_server.client import ServerClient, ServerFailed
from agenttrain.utils.threads import DaemonThreads

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "nccl"
BROADCAST_S = 300.0
"""Longest time of a broadcast. The other processes, which take part in gathering, give up after
600 s."""
GRACE_S = 10.0
"""Seconds in which a server has to answer after a broadcast has failed."""


class Transfer(Protocol):
    """The part of vLLM's `TrainerWeightTransferEngine` that is used here."""

    client: Any
    """A `VLLMWeightSyncClient`."""
    source: Any
    """A `WeightSource`."""

    def send_weights(self) -> None:
        """Do a whole update: start, update beside the broadcast, finish."""

    def shutdown(self) -> None:
        """Abort any broadcast in the group, and leave the group."""


Join = Callable[[str, int, int, "FanOut", "OnePass"], Transfer]
"""Makes a group, by address and port of this process and the number of ranks."""
Call = Callable[[Receiver, ServerClient], Coroutine[Any, Any, None]]
"""A call of one server."""


def join_group(address: str, port: int, ranks: int, client: FanOut, source: OnePass) -> Transfer:
    """Make an NCCL group of this process, its rank 0, and the servers' workers.

    They meet at `address`:`port` of this machine, and are `ranks` together. vLLM then calls the
    servers through `client`, and reads the weights to send from `source`.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(
        master_address=address,
        master_port=port,
        world_size=ranks,
        packed_buffer_size_bytes=BUFFER_BYTES,
        rank=0,
    )
    transfer: Transfer = WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=source
    )
    return transfer


class GaveUp(Exception):
    """The broadcast was given up: another thread gathers the remaining weights."""


class OnePass:
    """One pass over the weights, for vLLM's sender: a `WeightSource`.

    All training processes gather each weight together, so the pass has to be completed whatever
    happens. The sender's thread iterates over the weights and broadcasts each. If a broadcast hangs
    or fails, another thread calls `finish`, which gathers the remaining weights.
    """

    def __init__(self, weights: Regathered) -> None:
        self._forms = weights.forms()
        """Name, number format and shape of each weight."""
        self._iterator = iter(weights)
        self._lock = Lock()
        """Held while a weight is gathered, and not while it is broadcast: the two threads never
        gather at once, and a broadcast that hangs does not block `finish`."""
        self.given_up = False
        """True: the broadcast has failed, and the sender's thread must gather no further weight."""
        self.error: BaseException | None = None
        """Exception raised while gathering a weight for the broadcast, or None."""

    def metadata(self) -> list[Any]:
        """Return the weights' forms, which have the fields of vLLM's `ParamMeta`."""
        return [*self._forms]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights one by one, on the device of the group, for the sender's thread.

        Raises GaveUp once the broadcast was given up (`given_up`): then another thread gathers the
        remaining weights, by `finish`. An exception of a gather is kept in `error` too.
        """
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        while True:
            with self._lock:
                if self.given_up:
                    raise GaveUp
                try:
                    name, tensor = next(self._iterator)
                except StopIteration:
                    return
                except BaseException as error:
                    self.error = error
                    raise
            yield name, tensor.to(device)

    def finish(self) -> None:
        """Gather the remaining weights: the other processes wait for this one in every gather."""
        self.given_up = True
        with self._lock:
            for _ in self._iterator:
                pass


class FanOut:
    """Presents all servers of an audience to vLLM as one `VLLMWeightSyncClient`.

    `NcclSender` makes one for each broadcast, and calls `pause` before it and `result` after it.
    vLLM calls the four synchronous methods from its threads in between. The calls to the servers
    run in the event loop. Each method raises ServerFailed as soon as one server fails.

    The servers get fewer from stage to stage: those of the audience, `_paused`, `_received` (all
    weights), `_loaded` (they sample with them). A server between the last two can still be saved by
    `finish_or_abandon`.
    """

    def __init__(self, audience: Audience) -> None:
        self.version = audience.version
        self.receivers = audience.receivers
        """Servers that the next call goes to."""
        self.failures: dict[Receiver, ServerFailed] = {}
        """Servers with a call that has failed, and its error."""
        self.failed = asyncio.Event()
        """Set when a call of a server fails in the broadcast, which ends the broadcast."""
        self._audience = audience
        self._loop = asyncio.get_running_loop()
        self._clients = {
            receiver: ServerClient(
                receiver.url, receiver.token, timeout_s=audience.pause_s, keep=False
            )
            for receiver in audience.receivers
        }
        self._calls: dict[asyncio.Task[None], Receiver] = {}
        """Every call so far, and its server."""
        self._paused: tuple[Receiver, ...] = ()
        """Servers that were paused, and are in the broadcast."""
        self._received: set[Receiver] = set()
        """Servers whose workers have received all weights."""
        self._loaded: set[Receiver] = set()
        """Servers that sample with them."""

    async def pause(self, unfinished: set[Receiver]) -> None:
        """Pause the servers of the audience before the broadcast, and leave out those that fail.

        `unfinished` servers have not finished their last update, because it failed: end it too.
        """
        mode = self._audience.mode
        with suppress(ServerFailed):
            await self._call_all(
                lambda receiver, client: client.pause(mode, close=receiver in unfinished), wait=True
            )
        self.receivers = self._paused = tuple(
            receiver for receiver in self.receivers if receiver not in self.failures
        )
        # Calls that failed above have set it. Without their servers the broadcast can go on.
        self.failed.clear()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all workers join the group, those of each server from its rank offset on."""
        # This process is rank 0. With 2, 1 and 4 workers the servers begin at ranks 1, 3 and 4.
        offsets = accumulate((receiver.workers for receiver in self.receivers), initial=1)
        # Not strict: the last offset, the number of all ranks, has no server.
        offset_of = dict(zip(self.receivers, offsets, strict=False))
        self._run(
            lambda receiver, client: client.join({**init_info, "rank_offset": offset_of[receiver]})
        )

    def start_weight_update(self) -> None:
        self._run(lambda _, client: client.start_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have all workers receive the broadcast."""
        self._run(lambda _, client: client.update_weights(update_info), self._received)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the models, label them with the version, and let them sample."""
        self._run(lambda _, client: client.finish_update(self.version), self._loaded)

    def _run(self, call: Call, succeeded: set[Receiver] | None = None) -> None:
        """Call all servers and wait, in a thread other than the event loop's."""
        asyncio.run_coroutine_threadsafe(self._call_all(call, succeeded), self._loop).result()

    async def _call_all(
        self, call: Call, succeeded: set[Receiver] | None = None, *, wait: bool = False
    ) -> None:
        """Call all servers at once, and add those that answer to `succeeded`.

        Raises ServerFailed at the first failure, or with `wait` once all have answered. Without
        `wait` the other calls go on then: `finish_or_abandon` or `aclose` ends them.
        """

        async def call_one(receiver: Receiver) -> None:
            """Call one server, and record its failure or its success."""
            try:
                await call(receiver, self._clients[receiver])
            except ServerFailed as error:
                self.failures[receiver] = error
                self.failed.set()  # `NcclSender._broadcast` waits for it
                raise
            if succeeded is not None:
                succeeded.add(receiver)

        calls = {asyncio.create_task(call_one(receiver)): receiver for receiver in self.receivers}
        self._calls |= calls  # with the servers, for the calls that do not end
        when = asyncio.ALL_COMPLETED if wait else asyncio.FIRST_EXCEPTION
        if calls:
            await asyncio.wait(calls, return_when=when)
        for task in calls:
            if task.done():
                task.result()

    async def finish_or_abandon(self) -> None:
        """After a failed broadcast, let the servers sample that have received all weights.

        Before that, each call that still runs is finished, or abandoned after `GRACE_S`: its server
        counts as failed. `result` says what is done with all other servers: those without all
        weights are tried again, and failed ones are started again.
        """
        if calls := [task for task in self._calls if not task.done()]:
            await asyncio.wait(calls, timeout=GRACE_S)
        for task in calls:
            if not task.done():
                task.cancel()
                text = f"it did not leave a broadcast that had failed within {GRACE_S:g} s"
                self.failures[self._calls[task]] = ServerFailed(text)
        # They have all weights, and only have to be told to sample with them.
        not_loaded = self._received - self._loaded
        self.receivers = tuple(not_loaded - self.failures.keys())  # that the next calls go to
        with suppress(ServerFailed, TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._call_all(
                    lambda _, client: client.finish_update(self.version), self._loaded, wait=True
                )

    def result(self, unfinished: set[Receiver]) -> tuple[BroadcastResult, set[Receiver]]:
        """Return the broadcast's result, and the servers to try again, which get no receipt.

        Tried again are paused servers without the weights that are not to blame: another server has
        failed. So are those that answered with an error, but only once: not if they are among
        `unfinished`, whose last update failed too. All others get a receipt: they have the weights,
        or have to be started again.
        """
        receipts, retried = [], set()
        for receiver in self._audience.receivers:
            failure = self.failures.get(receiver)
            # With a status: the server answered with an error, and did not hang or die.
            has_answered = failure is not None and failure.status is not None
            may_retry = failure is None or (has_answered and receiver not in unfinished)
            if receiver in self._paused and receiver not in self._loaded and may_retry:
                retried.add(receiver)
                continue
            receipts.append(
                Receipt(
                    number=receiver.number,
                    boot=receiver.boot,
                    problem=None if failure is None else str(failure),
                    paused_s=self._clients[receiver].paused_s,
                )
            )
        return BroadcastResult(version=self.version, receipts=tuple(receipts)), retried

    async def aclose(self) -> None:
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()


class NcclSender:
    """Implements `WeightSender`. A group is kept as long as the servers are the same.

    The trainer calls `pause` and then `send` at each weight sync. The group is made and used in a
    helper thread, on the caller's GPU. A thread that hangs is abandoned.
    """

    def __init__(self, join: Join = join_group) -> None:
        """`join` makes a group; tests give another one."""
        self._join = join
        self._threads = DaemonThreads()
        self._lock = Lock()
        """Guards `_transfer`, which a thread may set while the group is given up."""
        self._transfer: Transfer | None = None
        self._members: Sequence[Receiver] = ()
        """Servers of the group."""
        self._unfinished: set[Receiver] = set()
        """Servers that answer, but whose last update has failed."""
        self._fan_out: FanOut | None = None
        """The servers that `pause` has paused, until `send`."""

    async def pause(self, audience: Audience) -> None:
        self._fan_out = FanOut(audience)
        await self._fan_out.pause(self._unfinished)

    async def send(self, weights: Regathered) -> BroadcastResult:
        """Implement `WeightSender.send`. Raises EngineError for a failure of this process."""
        fan_out, self._fan_out = self._fan_out, None
        assert fan_out is not None, "the servers have to be paused before weights are sent"
        source = OnePass(weights)
        try:
            if fan_out.receivers:
                await self._broadcast(fan_out, source)
        finally:
            # All training processes gather each weight together: after a failure too, this one has
            # to gather those that are left.
            outcome = await self._threads.run(source.finish)
            await fan_out.aclose()
        if (error := source.error or outcome.error) is not None:
            raise error
        # Servers to try again. The next `pause` closes the update that they have not finished.
        result, self._unfinished = fan_out.result(self._unfinished)
        return result

    async def _broadcast(self, fan_out: FanOut, source: OnePass) -> None:
        """Send the weights in another thread, and wait for its end or for the first failure.

        A broadcast fails in four ways: a call of a server fails, the thread raises an error, a
        weight cannot be gathered (`source.error`), or all takes longer than `BROADCAST_S`. Then
        `_give_up` does what is left to do. Raises its errors.
        """
        # Its result is the thread's outcome, whose `error` is what `_send_in_thread` raised.
        work = asyncio.create_task(self._threads.run(lambda: self._send_in_thread(fan_out, source)))
        failed = asyncio.create_task(fan_out.failed.wait())
        try:
            await asyncio.wait(
                (work, failed), timeout=BROADCAST_S, return_when=asyncio.FIRST_COMPLETED
            )
            error: BaseException | None = None
            if work.done():
                error = work.result().error
                if error is None:
                    return
                if source.error is None:
                    # NCCL raises if a server has died, and does not say which one. A call to that
                    # server fails soon too: wait for it.
                    await asyncio.wait((failed,), timeout=GRACE_S)
            await self._give_up(fan_out, source, error)
        finally:
            work.cancel()
            failed.cancel()

    async def _give_up(self, fan_out: FanOut, source: OnePass, error: BaseException | None) -> None:
        """Leave the group of a failed broadcast, and save the servers that can go on.

        `error` is what the broadcast's thread raised. None: the thread is still running. If it
        hangs it is left behind: its group is shut down, and it gathers nothing more.

        Raises EngineError if this process failed, and no server did. An error while gathering is
        left in `source.error`, for `send` to raise.
        """
        source.given_up = True  # the thread of the broadcast gathers no further weights
        await self._threads.run(self._leave)  # the group, which ends calls of its workers
        if source.error is not None:
            return
        if error is not None and not fan_out.failed.is_set():
            raise EngineError(f"weight update {fan_out.version}: {error}") from error
        await fan_out.finish_or_abandon()

    def _send_in_thread(self, fan_out: FanOut, source: OnePass) -> None:
        """Send the weights, in a new group unless the last one has the same servers.

        Runs in a thread of `_broadcast`. Meanwhile `_give_up` may set `source.given_up`, and shut
        the group down by `_leave`.
        """
        transfer = self._transfer
        if transfer is None or self._members != fan_out.receivers:
            self._leave()
            address = address_towards([receiver.url for receiver in fan_out.receivers])
            with socket.create_server((address, 0)) as free_port:
                port: int = free_port.getsockname()[1]
            # Closed, because the join itself listens on the port.
            ranks = 1 + sum(receiver.workers for receiver in fan_out.receivers)
            transfer = self._join(address, port, ranks, fan_out, source)
            # If the broadcast was given up during the join, `_leave` did not know this group. Only
            # this thread can shut it down then. `_leave` takes the lock too: so either it comes
            # later and finds the group, or this thread sees that the broadcast was given up.
            with self._lock:
                was_given_up = source.given_up
                if not was_given_up:
                    self._transfer, self._members = transfer, fan_out.receivers
            if was_given_up:
                transfer.shutdown()
                raise GaveUp
        # A group that is used again still has the client and the weights of its last broadcast.
        transfer.client, transfer.source = fan_out, source
        transfer.send_weights()

    def _leave(self) -> None:
        with self._lock:
            transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.shutdown()

    async def aclose(self) -> None:
        fan_out, self._fan_out = self._fan_out, None
        if fan_out is not None:  # `send` has not followed `pause`
            await fan_out.aclose()
        await self._threads.run(self._leave)
        self._threads.close()


def address_towards(urls: Sequence[str]) -> str:
    """Return the address at which the servers at `urls` can reach this machine.

    It is 127.0.0.1 if all of them are on this machine. For servers at 127.0.0.1 and 10.0.0.5 it is
    the address from which packets to 10.0.0.5 leave.
    """
    addresses = []
    for url in urls:
        host, kind = urlsplit(url).hostname, socket.SOCK_DGRAM
        family, *_, target = socket.getaddrinfo(host, 9, type=kind)[0]  # any port does
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # chooses a route, and sends nothing
            addresses.append(str(probe.getsockname()[0]))
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])
