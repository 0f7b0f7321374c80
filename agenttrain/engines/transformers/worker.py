"""The decode loop: one thread that owns the scheduler, the cache and the model's forward passes.

Other threads only post actions to it. An action runs between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue

import numpy as np
import torch

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import LEAST_TEMPERATURE
from agenttrain.engines.transformers import sampler
from agenttrain.engines.transformers.decoder import Decoder
from agenttrain.engines.transformers.scheduler import Generation, Scheduler, Seat
from agenttrain.engines.vision import Layout
from agenttrain.types import Routes
from agenttrain.utils.threads import use_gpu

CLOSED = "the engine was closed (aclose) while this call waited"


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine since it was built."""

    prefilled_tokens: int = 0
    """Ids of prompts, replies and last sampled tokens fed in prefill passes, padding left out."""
    copied_tokens: int = 0
    """Ids whose KV cache was copied from a row with the same prefix."""
    decode_steps: int = 0
    """Steps, each of which gives every active session one token."""
    decoded_tokens: int = 0
    """Sampled tokens."""
    evictions: int = 0
    """Idle sessions that lost their row to a waiting session."""


class EngineWorker:
    """The decode thread: `run` is its body, which steps while there is work, and else waits.

    Other threads call `post` alone. All other methods are called by posted actions, or by `run`.
    Each step gives the scheduler's active seats one token. A seat is a session's place in the
    batch, and seat i is in row i of the cache. Seats that have just joined are prefilled in waves:
    a wave copies prefixes from the rows that earlier waves have fed.
    """

    def __init__(self, decoder: Decoder, scheduler: Scheduler) -> None:
        self.decoder = decoder
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.version = 0
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._when_idle: list[Callable[[], object]] = []
        """Actions that wait until no request decodes."""
        self._stopped = False
        self._is_corrupt = False
        """The cache may hold numbers that are not finite: wipe it before the next step."""
        self._batch: list[Generation] = []
        """Requests of the last step, in the order of their rows. While they stay the same, so do
        the rows and the settings."""
        self._has_images = False
        """The batch has a sequence with images."""
        self._tensors = sampler.make_tensors([], decoder.device)
        """Sampling settings of the batch."""

    def post(self, action: Callable[[], object]) -> None:
        """Run `action` in the worker's thread before its next step."""
        self._inbox.put(action)

    def drain(self, action: Callable[[], object]) -> None:
        """Run `action` in the worker's thread once the requests that decode have ended."""
        self._when_idle.append(action)
        self.scheduler.draining = True

    def run(self, gpu: int | None) -> None:
        """Work on this GPU until `stop` is posted: the thread's body."""
        use_gpu(gpu)  # a new thread begins on GPU 0, whatever its parent's
        while not self._stopped:
            try:
                self._run_actions()
                if self._stopped:
                    break
                if self.scheduler.ready():
                    self._step()
                else:
                    self._inbox.get()()  # nothing to decode: wait for an action, and run it
            except Exception as error:  # any error of the model: its callers must not hang
                self._fail(EngineError(f"a decode step failed: {type(error).__name__}: {error}"))
        self._fail(EngineError(CLOSED))

    def _run_actions(self) -> None:
        """Run the posted actions. If no request decodes, run those of `drain` too."""
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass
        # After `stop` they are dropped.
        if self._when_idle and not self.scheduler.active and not self._stopped:
            actions, self._when_idle = self._when_idle, []
            self.scheduler.draining = False  # requests may join again
            for action in actions:
                action()

    def add(self, request: Generation) -> None:
        """Queue a request, or deliver the scheduler's error to its caller."""
        try:
            self.scheduler.add(request)
        except EngineError as error:
            request.deliver(error)

    def release(self, session: str) -> None:
        """End a session. A call of it that still waits fails."""
        request = self.scheduler.release(session)
        if request is not None:
            request.deliver(EngineError(f"session={session!r} was released while it generated"))

    def update(
        self, weights: dict[str, torch.Tensor], version: int, *, keeps_cache: bool = False
    ) -> None:
        """Copy the weights in, and drop the cache of the old ones.

        With `keeps_cache` sequences in flight go on with it, and no other sequence copies it.
        """
        state = self.decoder.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                state[name].copy_(tensor)
        self.scheduler.invalidate(keeps_cache=keeps_cache)
        if self.decoder.vision is not None:
            self.decoder.vision.forget()  # features of images, if the tower is trained
        self.version = version

    def stop(self) -> None:
        self._stopped = True

    def _fail(self, error: EngineError) -> None:
        """End all requests with an error."""
        requests: list[Generation] = list(self.scheduler.requests())
        for request in requests:
            self.scheduler.release(request.session)
            request.deliver(error)
        self._is_corrupt = True  # the failed step may have written a part

    def _step(self) -> None:
        """Sample one token for every active session, and deliver the completions that end."""
        seats = self.scheduler.active
        with self.decoder.evaluating():
            self._prepare(seats)  # sets `_batch`, the seats' requests, and `_tensors`
            logits_NV = self._feed(seats)
            # A request has a random number for each token that it may sample.
            uniforms = [request.noise[len(request.sampled)] for request in self._batch]
            sampled, logprobs = sampler.sample(logits_NV, self._tensors, uniforms)
        routes: Sequence[Routes | None] = [None] * len(seats)
        if self.decoder.recorder is not None and self.decoder.batch_needs_routes:
            routes = self.decoder.recorder.last(len(seats))  # a seat's row is its index
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += len(seats)
        self.stats.evictions = self.scheduler.evictions
        # A copy: seats that finish leave the scheduler's list.
        outcomes = zip(list(seats), sampled.tolist(), logprobs.tolist(), routes, strict=True)
        for seat, token, logprob, token_routes in outcomes:
            if not math.isfinite(logprob):
                self._fail_seat(seat, logprob)
                continue
            request = _request_of(seat)
            needed_routes = token_routes if request.sampling.routes else None
            finish = request.append(token, logprob, self.version, needed_routes)
            if finish is not None:
                self.scheduler.finish(seat)
                request.deliver(request.completion(finish))
        self.scheduler.step += 1  # sessions of deterministic mode are due at a number of a step

    def _prepare(self, seats: Sequence[Seat]) -> None:
        """Wipe a corrupt cache. If the batch has changed, arrange its rows and settings anew.

        `seats` are those of the batch: seat i gets row i.
        """
        if self._is_corrupt:
            self.decoder.cache.wipe()
            self.scheduler.invalidate()  # all rows are fed anew
            self._is_corrupt = False
        batch = [_request_of(seat) for seat in seats]
        if batch != self._batch:
            self._batch = batch
            self.decoder.cache.arrange(seats, self.scheduler.seats.values())
            self._tensors = sampler.make_tensors([r.sampling for r in batch], self.decoder.device)
            self._has_images = any(request.layout is not None for request in batch)
            self.decoder.batch_needs_routes = any(request.sampling.routes for request in batch)

    def _feed(self, seats: Sequence[Seat]) -> torch.Tensor:
        """Feed the pending ids of all seats, and return the logits after the last one, [N, V].

        One pass is for the seats that decode one id each. Then the others are prefilled in waves,
        which the scheduler has chosen: seats of a wave may copy the prefixes that earlier waves
        have fed.
        """
        # `Scheduler.ready` has put the seats that decode first, each with one pending id. The
        # others follow in order of waves.
        decoding = next((i for i, seat in enumerate(seats) if seat.pending > 1), len(seats))
        logits_NV: list[torch.Tensor] = []
        if decoding:
            logits_NV.append(self._feed_rows(0, seats[:decoding], self.decoder.forward))
        first = decoding  # row of the wave's first seat
        waves = [list(wave) for _, wave in groupby(seats[decoding:], key=lambda seat: seat.wave)]
        for wave in waves:
            logits_NV.append(self._prefill(first, wave, waiting=seats[first:]))
            first += len(wave)
        return torch.cat(logits_NV) if len(logits_NV) > 1 else logits_NV[0]

    def _prefill(self, first: int, rows: Sequence[Seat], waiting: Sequence[Seat]) -> torch.Tensor:
        """Feed the pending ids of one wave of seats, and return the logits after their last ids.

        A wave is a set of seats that are prefilled together: `rows`, from cache row `first` on.
        `waiting` are the seats of this wave and of later ones, which may copy prefixes.

        If rows can only be copied whole, a seat's prefill pauses at its `stops`, numbers of ids at
        which other seats copy its row. Example: P has 30 ids, and Q of the next wave shares the
        first 20. One pass feeds 20 ids of P, Q copies them, and another pass feeds the rest of P.
        """
        self._copy_prefixes(waiting)
        for seat in rows:
            # A seat that has not copied its prefix by now is fed all of its ids: its source was
            # wiped, or holds more than the prefix and cannot be cut.
            seat.source = None
            seat.wave = 0  # it has had its turn
        self.stats.prefilled_tokens += sum(seat.pending for seat in rows)
        logits_NV: torch.Tensor | None = None
        while rows:
            part_NV = self._feed_rows(first, rows, self.decoder.prefill)
            # A seat that pauses is fed in several passes: the logits of its last one stay.
            if logits_NV is None:
                logits_NV = part_NV
            else:
                logits_NV[: len(rows)] = part_NV
            self._copy_prefixes(waiting)
            # Seats with more stops come first. So those that go on are the first of the rows, and
            # begin at `first` again.
            fed, rows = rows, [seat for seat in rows if seat.pending]
            completed = fed[len(rows) :]
            for seat in completed:
                seat.stops = []
        assert logits_NV is not None
        return logits_NV

    def _copy_prefixes(self, seats: Sequence[Seat]) -> None:
        self.stats.copied_tokens += self.decoder.cache.copy_prefixes(seats)

    def _feed_rows(self, first: int, seats: Sequence[Seat], feed: Feed) -> torch.Tensor:
        """Feed the next ids of consecutive rows, and return the logits after each row's last one.

        `first` is the row of the first seat. `feed` is the decoder's method for this kind of pass.
        """
        new_ids = [seat.next_ids() for seat in seats]
        starts = [seat.cached for seat in seats]
        layouts = [_request_of(seat).layout for seat in seats] if self._has_images else ()
        logits_NV = feed(first, new_ids, starts, layouts)
        for seat, ids in zip(seats, new_ids, strict=True):
            seat.cached += len(ids)
        return logits_NV

    def _fail_seat(self, seat: Seat, logprob: float) -> None:
        """End a session whose logprob is not finite. The error names the likely cause."""
        request = _request_of(seat)
        self.scheduler.release(seat.session)
        # Its row of the cache may hold such numbers too, and the next session gets that row. The
        # cache is wiped before the next step.
        self._is_corrupt = True
        temperature = request.sampling.temperature
        cause = (
            f"logits divided by so little overflow; take {LEAST_TEMPERATURE:g} or more, or 0"
            if 0 < temperature < LEAST_TEMPERATURE
            else "the model's logits are NaN or infinite there; look at its weights and model.dtype"
        )
        request.deliver(
            EngineError(
                f"session={seat.session!r}: the logprob of token {len(request.sampled)} is not "
                f"finite ({logprob}) at temperature {temperature:g}: {cause}"
            )
        )


Feed = Callable[[int, Sequence[np.ndarray], Sequence[int], Sequence[Layout | None]], torch.Tensor]
"""`Decoder.forward` or `Decoder.prefill`."""


def _request_of(seat: Seat) -> Generation:
    assert seat.request is not None
    return seat.request
