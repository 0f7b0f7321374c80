"""Requests that are sent again: they get the answer of the first, which is sampled once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agenttrain.chat.wire.normal import Answer
from agenttrain.chat.wire.openai import RequestError


@dataclass(slots=True, eq=False, kw_only=True)
class Delivery:
    """An answer on its way to a client."""

    digest: bytes
    """SHA-256 of the request's path and body."""
    task: asyncio.Task[Answer]
    readers: int = 0
    """Connections that wait for it, or write it."""
    written: int = 0
    """Clients that were sent all of it, and did not reset their connection."""

    @property
    def lost(self) -> bool:
        """True if no client got it, and none is waiting."""
        return not self.written and not self.readers


@dataclass(slots=True)
class Replays:
    """The answers of one rollout, by the key and by the body of their requests.

    A client that lost its connection sends its request again. Such a replay must not be sampled
    again, because the rollout would get a turn that the client never saw.

    A replay has an earlier Idempotency-Key, or says that it is a retry of an equal body, or equals
    a request whose answer no client was sent in full, or, with `joins_in_flight`, equals one in
    flight. Any other request is a new sample.
    """

    joins_in_flight: bool = False
    """`Agents` sets it where a run has to repeat bit for bit. Without it a request that equals one
    in flight is a sample of its own, because an agent may ask for several."""
    _by_key: dict[str, Delivery] = field(default_factory=dict)
    """Idempotency-Key -> delivery."""
    _by_body: dict[bytes, Delivery] = field(default_factory=dict)
    """`Delivery.digest` -> the newest delivery with it, the newest of all last."""
    _running: set[asyncio.Task[Answer]] = field(default_factory=set)
    """Sampling of answers that has not ended; equal requests may have several."""

    def deliver(
        self,
        path: str,
        body: bytes,
        *,
        key: str | None,
        retry: bool,
        sample: Callable[[], Awaitable[Answer]],
    ) -> Delivery:
        """Return the delivery of a request's answer: the earlier one for a replay, else a new one.

        `key` is its Idempotency-Key, `retry` says that the client calls it a retry, and `sample`
        makes a new answer. Raises RequestError for a key that came with another body.
        """
        digest = hashlib.sha256(path.encode() + b"\n" + body).digest()
        if key is not None and key in self._by_key:
            delivery_of_key = self._by_key[key]
            if delivery_of_key.digest != digest:
                raise RequestError(
                    f"Idempotency-Key={key}: was sent with another body; use a new key",
                    code="idempotency_error",
                )
            return delivery_of_key
        delivery = self._find_replayed(digest, is_retry=retry)
        if delivery is None:
            delivery = Delivery(digest=digest, task=asyncio.ensure_future(sample()))
            self._by_body.pop(digest, None)  # so that the new one comes last
            self._by_body[digest] = delivery
            self._running.add(delivery.task)
            delivery.task.add_done_callback(self._running.discard)
            delivery.task.add_done_callback(lambda task: self._forget_failed(delivery))
        if key is not None:
            self._by_key[key] = delivery
        return delivery

    def _find_replayed(self, digest: bytes, *, is_retry: bool) -> Delivery | None:
        """Return the delivery of an equal request that this one repeats; None for a new sample."""
        earlier = self._by_body.get(digest)
        if earlier is None:
            return None
        # Nobody has the answer or waits for it: the client asks again, without saying so.
        answer_was_lost = earlier.lost
        joins = self.joins_in_flight and not earlier.task.done()
        return earlier if is_retry or answer_was_lost or joins else None

    def _forget_failed(self, delivery: Delivery) -> None:
        """Forget a delivery whose answer failed, so that an equal request samples again."""
        if not delivery.task.cancelled() and delivery.task.exception() is None:
            return
        self._by_key = {k: d for k, d in self._by_key.items() if d is not delivery}
        self._by_body = {body: d for body, d in self._by_body.items() if d is not delivery}

    @property
    def lost(self) -> bool:
        """True if the newest answer reached no client."""
        newest = next(reversed(self._by_body.values()), None)
        return newest is not None and newest.lost

    async def aclose(self) -> None:
        """Cancel the sampling of answers that nobody can get any more."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
