"""The decode loop: one thread that owns the scheduler, the cache and the model's forward passes.

Other threads only post actions to it; they run between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue

import torch

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import LEAST_TEMPERATURE
from agenttrain.engines.transformers import sampler
from agenttrain.engines.transformers.decoder import Decoder
from agenttrain.engines.transformers.scheduler import Generation, Scheduler, Seat
from agenttrain.utils.threads import use_gpu


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine since it was built."""

    prefilled_tokens: int = 0
    """Ids of prompts, replies and last sampled tokens fed in prefill passes, padding left out."""
    copied_tokens: int = 0
    """Ids whose keys and values were copied from a row with the same beginning."""
    decode_steps: int = 0
    """Batches formed: each gives every active session one token."""
    decoded_tokens: int = 0
    """Tokens sampled."""
    evictions: int = 0
    """Idle sessions that lost their cache to a waiting one."""


class EngineWorker:
    """Steps while there is work, blocks on its inbox while there is none."""

    def __init__(self, decoder: Decoder, scheduler: Scheduler) -> None:
        self.decoder = decoder
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.version = 0
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._when_idle: list[Callable[[], object]] = []
        self._stopped = False
        self._spoilt = False
        self._batch: list[Generation] = []
        self._sees = False
        """The batch has a sequence with images."""
        self._plan = sampler.plan([], decoder.device)

    def post(self, action: Callable[[], object]) -> None:
        """Run `action` in the worker's thread before its next step."""
        self._inbox.put(action)

    def drain(self, action: Callable[[], object]) -> None:
        """Run `action` once the requests that decode have ended; others wait for it.

        Call it in the worker's thread.
        """
        self._when_idle.append(action)
        self.scheduler.draining = True

    def run(self, gpu: int | None) -> None:
        """Work on this GPU until `stop` is posted: the thread's body."""
        use_gpu(gpu)
        while not self._stopped:
            try:
                try:
                    while True:
                        self._inbox.get_nowait()()
                except Empty:
                    pass
                if self._stopped:
                    break
                if self._when_idle and not self.scheduler.active:
                    actions, self._when_idle, self.scheduler.draining = self._when_idle, [], False
                    for action in actions:
                        action()
                if self.scheduler.ready():
                    self._step()
                else:
                    self._inbox.get()()
            except Exception as error:  # any error of the model: its callers must not hang
                self._fail(EngineError(f"a decode step failed: {type(error).__name__}: {error}"))
        self._fail(EngineError("the engine was closed (aclose) while this call waited"))

    def add(self, request: Generation) -> None:
        """Queue a request, or fail it."""
        try:
            self.scheduler.add(request)
        except EngineError as error:
            request.deliver(error)

    def release(self, session: str) -> None:
        """End a session; its call that still waits fails."""
        request = self.scheduler.release(session)
        if request is not None:
            request.deliver(EngineError(f"session={session!r} was released while it generated"))

    def update(
        self, weights: dict[str, torch.Tensor], version: int, *, keeps: bool = False
    ) -> None:
        """Copy the weights in; every cached key and value is stale from now on.

        `keeps`: sessions that have some go on with them.
        """
        state = self.decoder.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                state[name].copy_(tensor)
        self.scheduler.invalidate(keeps=keeps)
        if self.decoder.vision is not None:
            self.decoder.vision.forget()
        self.version = version

    def stop(self) -> None:
        """End `run`."""
        self._stopped = True

    def _fail(self, error: EngineError) -> None:
        requests: list[Generation] = list(self.scheduler.requests())
        for request in requests:
            self.scheduler.release(request.session)
            request.deliver(error)
        self._spoilt = True

    def _step(self) -> None:
        seats = self.scheduler.active
        with self.decoder.evaluating():
            if self._spoilt:
                self.decoder.cache.wipe()
                self.scheduler.invalidate()
                self._spoilt = False
            batch = [_request(seat) for seat in seats]
            if batch != self._batch:
                self._batch = batch
                self.decoder.cache.arrange(seats, self.scheduler.seats.values())
                self._plan = sampler.plan([r.sampling for r in batch], self.decoder.device)
                self._sees = any(request.layout is not None for request in batch)
            # One pass for the seats that decode one id each, more for those with several new ids.
            split = next((i for i, seat in enumerate(seats) if seat.pending > 1), len(seats))
            waves = [list(wave) for _, wave in groupby(seats[split:], key=lambda seat: seat.wave)]
            logits_NV: list[torch.Tensor] = []
            first = 0
            for rows in (seats[:split], *waves):
                if not rows:
                    continue
                if first >= split:
                    self.stats.copied_tokens += self.decoder.cache.copy_prefixes(rows)
                new = [seat.next_ids() for seat in rows]
                starts = [seat.cached for seat in rows]
                layouts = [_request(seat).layout for seat in rows] if self._sees else ()
                if first < split:
                    logits_NV.append(self.decoder.forward(first, new, starts, layouts))
                else:
                    logits_NV.append(self.decoder.prefill(first, new, starts, layouts))
                    self.stats.prefilled_tokens += sum(map(len, new))
                for seat, ids in zip(rows, new, strict=True):
                    seat.cached += len(ids)
                first += len(rows)
            uniforms = [request.noise[len(request.sampled)] for request in self._batch]
            logits = torch.cat(logits_NV) if len(logits_NV) > 1 else logits_NV[0]
            del logits_NV  # not beside the sampler's own copies
            sampled, logprobs = sampler.sample(logits, self._plan, uniforms)
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += len(seats)
        self.stats.evictions = self.scheduler.evictions
        # A copy: seats that finish leave the scheduler's list.
        outcomes = zip(list(seats), sampled.tolist(), logprobs.tolist(), strict=True)
        for seat, token, logprob in outcomes:
            if not math.isfinite(logprob):
                self._end_broken(seat, logprob)
                continue
            request = _request(seat)
            finish = request.append(token, logprob, self.version)
            if finish is not None:
                self.scheduler.finish(seat)
                request.deliver(request.completion(finish))
        self.scheduler.clock += 1

    def _end_broken(self, seat: Seat, logprob: float) -> None:
        """End a session whose logprobs are not finite, with the likely cause."""
        request = _request(seat)
        self.scheduler.release(seat.session)
        self._spoilt = True
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


def _request(seat: Seat) -> Generation:
    assert seat.request is not None
    return seat.request
