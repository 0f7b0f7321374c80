"""Batches of sessions that decode together: who joins, leaves, waits or is evicted.

No tensors and no threads. An admitted session has a `Seat` until it is released. A seat with a
request is active: it gets a token at every step.

In deterministic mode (`expect`) every decision depends on the tokens alone, never on arrival times.
A session that finished at step t is due at step t + rejoin_steps. From then on `ready` returns
False until the session has called again or been released. A session with a `parent` gets no seat:
it sits in that of the expected session at the root, which is due again once its guest has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.vision import Layout
from agenttrain.types import Completion, Finish, Routes
from agenttrain.utils.arrays import common_prefix


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One call of `generate`, with the tokens sampled for it so far."""

    session: str
    """Trajectory that the call continues."""
    token_ids: np.ndarray
    """[T] int64, the ids to continue. An image's key (`image_key`) stands in place of its
    placeholders' ids, so that the cache tells images apart."""
    sampling: Sampling
    budget: int
    """Most tokens to sample, at least 1."""
    noise: list[float]
    """[budget] Uniforms in [0, 1), one for each token."""
    deliver: Callable[[Completion | EngineError], None]
    """Called once, with the completion or the error that ends the request."""
    parent: str | None = None
    """Session that waits for this one, e.g. of the agent that called this sub-agent."""
    report: Callable[[int], None] | None = None
    """Called with each token as it is sampled."""
    layout: Layout | None = None
    """Positions and images; None: it has no images."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version of the weights, number of tokens sampled with it), in order: [(3, 10), (4, 2)]."""
    routes: list[Routes] = field(default_factory=list)
    """Routes of each token, if they are recorded."""

    def append(
        self, token: int, logprob: float, version: int, routes: Routes | None = None
    ) -> Finish | None:
        """Append a sampled token. Return why the completion ends with it, or None if it goes on."""
        self.sampled.append(token)
        if routes is not None:
            self.routes.append(routes)
        if self.report is not None:
            self.report(token)
        self.logprobs.append(logprob)
        extends = bool(self.versions) and self.versions[-1][0] == version
        count = self.versions.pop()[1] if extends else 0
        self.versions.append((version, count + 1))
        if token in self.sampling.stop_token_ids:
            return Finish.stop
        if self.sampling.ends is not None and self.sampling.ends(token):  # the caller wants no more
            return Finish.abort
        return Finish.length if len(self.sampled) == self.budget else None

    def completion(self, finish: Finish) -> Completion:
        """Return the sampled tokens as a completion that ended by `finish`."""
        return Completion(
            token_ids=tuple(self.sampled),
            logprobs=tuple(self.logprobs),
            finish=finish,
            versions=tuple(self.versions),
            routes=Routes.join(self.routes) if self.routes else None,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """An admitted session's place in the engine, which it keeps between its requests.

    A seat has a row of the KV cache. A new seat may copy the beginning of its row from a `source`,
    whose ids begin alike. The seats that join in one step are prefilled in waves 0, 1, …: a source
    that joins in the same step is in an earlier wave. If rows can only be copied whole, the source
    pauses its prefill at `stops`, where its row holds exactly the ids that are copied.
    """

    session: str
    order: int
    """Position among the expected sessions, from 1; 0 outside deterministic mode."""
    row: int | None = None
    """Row in the cache. None: not arranged yet."""
    history: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[T] All ids of the session: those of its last request and, once that has ended, the ids
    that were sampled for it."""
    cached: int = 0
    """Number of ids in the KV cache: the first ones of `history`, then those sampled since."""
    mixed: bool = False
    """Part of its KV cache was computed by older weights."""
    request: Generation | None = None
    """Request that it decodes. None: the seat is idle."""
    due_step: int | None = None
    """Deterministic mode: the step at which the idle session has to have called again."""
    prompt: bytes = b""
    """Ids with which its cache began."""
    source: Seat | None = None
    """Seat from whose row the first `shared` ids are still to be copied."""
    shared: int = 0
    """Number of ids that are copied from the source. 0: none."""
    wave: int = 0
    """Wave of prefill of the step in which it joins."""
    stops: list[int] = field(default_factory=list)
    """Numbers of ids, ascending. Empty if rows can be cut: then they can be copied later too."""

    @property
    def pending(self) -> int:
        """Number of ids still to be fed: 1 while the seat decodes, the id sampled last."""
        sampled = len(self.request.sampled) if self.request else 0
        return len(self.history) + sampled - self.cached

    def next_ids(self) -> np.ndarray:
        """Return the ids of the next pass: the pending ones, or those up to the next of `stops`."""
        assert self.request is not None
        sampled = self.request.sampled
        if self.cached >= len(self.history):  # it decodes: the cache also holds sampled ids
            return np.array(sampled[self.cached - len(self.history) :])
        stop = next((stop for stop in self.stops if stop > self.cached), None)
        if stop is not None:
            return self.history[self.cached : stop]
        # There are sampled ids too if an update dropped the cache in the middle of a completion.
        return np.concatenate([self.history[self.cached :], np.array(sampled, dtype=np.int64)])


@dataclass(slots=True, eq=False)
class ExpectedSession:
    """A session that was announced by `expect`, and has not been released.

    The engine waits for its call of `generate` when it is its turn to join the batch.
    """

    session: str
    order: int
    """Position among all sessions given to `expect`, from 1. Of sessions that join in one step, the
    lower one comes first."""
    is_released: bool = False
    """True: it has ended. If it is still in the queue, its turn is skipped."""


LEAST_SHARED = 16
"""Shortest common prefix in ids that is worth a copy and a later pass."""
MAX_LEADERS = 4
"""Most rows with which a new prompt is compared: the prompts of a run have few beginnings."""


def _longest_beginning(seat: Seat, cached: Iterable[Seat]) -> Seat | None:
    """Return the idle seat whose cached ids are the longest beginning of a new seat's, or None.

    Used where rows can only be copied with all of their ids.
    """
    fitting = (
        candidate
        for candidate in cached
        if candidate.request is None
        and candidate.cached < len(seat.history)
        and np.array_equal(candidate.history[: candidate.cached], seat.history[: candidate.cached])
    )
    return max(fitting, key=lambda candidate: candidate.cached, default=None)


class Scheduler:
    """Forms the batch of each decode step.

    The decode thread calls `add` for a request, `ready` before each step, `finish` for a seat whose
    completion has ended, and `release` for a session that has ended. A seat is a session's place in
    the engine, with a row of the KV cache, which it keeps between the session's requests. A session
    with a `parent` is a guest: it sits in the seat of its oldest expected ancestor, the host.

    In deterministic mode `expect` names the sessions of a batch in order: who joins at which step
    then depends on that order alone, never on the time at which a request arrives.
    """

    def __init__(
        self,
        max_rows: int,
        rejoin_steps: int,
        share_prefix: bool = True,
        copies_exactly: bool = False,
    ) -> None:
        """At most `max_rows` sessions have a seat, and with it a row of the cache.

        In deterministic mode the engine waits `rejoin_steps` steps after a session's completion for
        its next request. With `share_prefix` new sessions copy the cache of a common beginning from
        other rows. With `copies_exactly` a row can only be copied with all of its ids: those of
        recurrent layers or of a window cannot be cut.
        """
        self.copies_exactly = copies_exactly
        self.max_rows = max_rows
        self.rejoin_steps = rejoin_steps
        self.share_prefix = share_prefix
        self.step = 0
        """Number of the current decode step. The worker counts it up."""
        self.evictions = 0
        """Idle sessions that lost their seat to a waiting one."""
        self.draining = False
        """True: no request joins until all active ones have ended. The worker sets it."""
        self.active: list[Seat] = []
        """The batch: seats with a request, in the order of their rows."""
        self.seats: dict[str, Seat] = {}
        """All admitted sessions, least recently used first."""
        self._waiting: dict[str, Generation] = {}
        """Requests that have not joined the batch, by the session in whose seat they will sit."""
        self._joining: list[Seat] = []
        """Seats that join the batch in this step, and have to be prefilled."""
        self._expected: dict[str, ExpectedSession] = {}
        """All expected sessions that have not been released."""
        self._expected_count = 0
        """Sessions expected so far."""
        self._join_queue: deque[ExpectedSession] = deque()
        """Expected sessions that have no seat yet, in the order in which they join."""
        self._leaving: list[Seat] = []
        """Seats of sessions that were released while they were idle. Their rows stay taken until
        their due steps: the time of a release must not change who joins."""
        self._hosts: dict[str, str] = {}
        """Guest (a session with a parent) -> the expected session in whose seat it sits."""

    @property
    def deterministic(self) -> bool:
        """True while an expected session has not been released."""
        return bool(self._expected)

    def requests(self) -> Iterator[Generation]:
        """Yield all requests that have not ended."""
        yield from self._waiting.values()
        yield from (s.request for s in self.seats.values() if s.request is not None)

    def expect(self, sessions: Iterable[str]) -> None:
        """Wait for a call of each of these sessions: they join the batch in this order.

        Idle sessions from before deterministic mode lose their rows.
        """
        for seat in [s for s in self.seats.values() if s.request is None and s.due_step is None]:
            self._drop(seat)
        for session in sessions:
            if session in self._expected:
                continue
            self._expected_count += 1
            expected = ExpectedSession(session, order=self._expected_count)
            self._expected[session] = expected
            if session not in self.seats:  # a session that has a seat need not queue for a row
                self._join_queue.append(expected)

    def add(self, request: Generation) -> None:
        """Queue a request until its session has a seat.

        A guest, whose parent is expected or a guest itself, shares the seat of the expected session
        at the root, its host. Other sessions are their own host. Raises EngineError if the host's
        seat is busy, or if the host is not expected in deterministic mode.
        """
        session = request.session
        if request.parent is not None:
            host_of_parent = self._hosts.get(request.parent, request.parent)
            if host_of_parent in self._expected:
                self._hosts[session] = host_of_parent
        host = self._hosts.get(session, session)
        seat = self.seats.get(host)
        blocking = self._waiting.get(host) or (seat and seat.request)
        if blocking:
            where = "" if host == session else f" in the seat of session {host!r}"
            raise EngineError(
                f"session={session!r}{where}: the last generate() of session "
                f"{blocking.session!r} has not ended. Await it, or use another session."
            )
        if self.deterministic and host not in self._expected:
            raise EngineError(
                f"session={host!r}: not among the sessions given to expect(). Expect it before "
                "it calls generate(), or set rollout.deterministic=false."
            )
        self._waiting[host] = request

    def release(self, session: str) -> Generation | None:
        """End a session; return its request that has not ended, or None if there is none.

        Unknown sessions are ignored. A guest only leaves the seat of its host, the expected session
        whose seat it shares, and the host is due at once. In deterministic mode the row of an idle
        session becomes free at the step at which it was due, whenever the release arrives.
        """
        if (host := self._hosts.pop(session, None)) is not None:
            return self._release_guest(session, host)
        # Its guests have no seat from now on.
        self._hosts = {guest: host for guest, host in self._hosts.items() if host != session}
        request = self._waiting.pop(session, None)
        seat = self.seats.get(session)
        if seat is not None:
            request = seat.request or request  # at most one: the next call waits for the last one
            if seat.due_step is not None:
                self._leaving.append(seat)
            self._drop(seat)
        self._stop_expecting(session)
        return request

    def _release_guest(self, session: str, host: str) -> Generation | None:
        """End a guest's session. Return its request that has not ended, or None.

        A guest is a sub-agent. It has no seat, and samples in that of its `host`, the expected
        session of its rollout. The host waits for its guest, and may call again from now on.
        """
        waiting = self._waiting.get(host)
        if waiting is not None and waiting.session == session:
            return self._waiting.pop(host)
        seat = self.seats.get(host)
        request = seat.request if seat is not None else None
        if seat is None or request is None or request.session != session:
            return None  # the guest's last request has ended
        if seat in self.active:
            self._remove(seat)
        seat.request = None
        # No request can go on with this cache: it may hold ids that were sampled for the guest, and
        # `history`, with which new ids are compared, lacks those of an unfinished request.
        seat.cached = 0
        seat.due_step = self.step  # the batch waits for the host's next call at once
        return request

    def _drop(self, seat: Seat) -> None:
        """Take the seat and its row away from a session, which is not expected from now on."""
        if seat in self.active:
            self._remove(seat)
        if seat in self._joining:
            self._joining.remove(seat)
        del self.seats[seat.session]
        self._stop_expecting(seat.session)

    def _stop_expecting(self, session: str) -> None:
        """Stop waiting for calls of a session. After the last one deterministic mode is over."""
        expected = self._expected.pop(session, None)
        if expected is not None:
            expected.is_released = True
            if not self._expected:
                # Free the rows that released sessions hold until their due steps, and drop turns
                # that were to be skipped. Not at the next step: before it another `expect` may
                # come, whose sessions would wait for them.
                self._leaving.clear()
                self._join_queue.clear()

    def _remove(self, seat: Seat) -> None:
        """Take a seat out of the batch."""
        # The last seat fills the gap: one row moves in the cache instead of all behind it.
        last = self.active.pop()
        if last is not seat:
            self.active[self.active.index(seat)] = last

    def finish(self, seat: Seat) -> Generation:
        """End a seat's completion and return its request. The session's cache stays.

        In deterministic mode the batch waits for the session's next call after `rejoin_steps` more
        steps: so the call joins at the same step in every run, however long the tools take.
        """
        self._remove(seat)
        request = seat.request
        assert request is not None
        seat.history = np.concatenate([seat.history, np.array(request.sampled, dtype=np.int64)])
        seat.request = None
        # To the end: seats are in the order of their last use.
        self.seats[seat.session] = self.seats.pop(seat.session)
        if seat.session in self._expected:
            seat.due_step = self.step + self.rejoin_steps
        elif self.deterministic:
            # Its request began before `expect`, which did not name it: its next call will fail.
            self._drop(seat)
        return request

    def invalidate(self, *, keeps_cache: bool = False) -> None:
        """Drop the KV cache of old weights, or with `keeps_cache` mark it as mixed."""
        for seat in self.seats.values():
            if keeps_cache:
                seat.mixed = seat.cached > 0
            else:
                seat.cached = 0

    def ready(self) -> bool:
        """Admit the sessions that may join. Return True if the batch can do a step.

        If not, nothing is to be done until the next call or release.
        """
        if self.draining:
            return bool(self.active)
        if self.deterministic:
            if not self._admit_expected():
                return False
        else:
            for session in list(self._waiting):
                if session not in self.seats and len(self.seats) >= self.max_rows:
                    # All rows are taken: evict the idle session that was used least recently.
                    idle = [s for s in self.seats.values() if s.request is None]
                    seat = next((s for s in idle if s.session not in self._waiting), None)
                    if seat is None:
                        continue
                    self._drop(seat)
                    self.evictions += 1
                self._join(session)
        if not (self.active or self._joining):
            return False
        if self._joining and self.share_prefix:
            self._share_prefixes()
        # By wave: a later one copies what earlier ones have fed. In a wave the rows with the most
        # stops come first, so that those still to be fed are consecutive. Then by length:
        # neighbours share a prefill pass with little padding.
        self.active += sorted(
            self._joining,
            key=lambda seat: (
                seat.wave,
                -len(seat.stops),
                seat.pending - seat.shared,
                seat.order,
            ),
        )
        self._joining.clear()
        return True

    def _share_prefixes(self) -> None:
        """Choose the row from which each new session copies the KV cache of a common beginning.

        Sets each joining seat's `source`, the number of `shared` ids, and its `wave`. A seat is fed
        in wave 0 if it copies nothing, or copies a row that is in the cache already. If its source
        joins in this step too, it is fed one wave after the source.

        Example: prompts A A B B with the same system message, in an empty cache. The first A is fed
        whole (wave 0). The first B copies the system message from it, and the second A copies all
        but its last id (wave 1). The second B copies from the first B (wave 2).
        """
        cached = self._seats_to_copy()
        firsts: dict[bytes, Seat] = {}
        """Prompt -> the seat from which seats with the same prompt copy."""
        if not self.copies_exactly:  # else `_find_best_source` chooses among the cached rows
            # Any of several seats with one prompt would do: the least recently used one, first in
            # `cached`, is written last here.
            firsts = {seat.prompt: seat for seat in reversed(cached)}
        # A few seats of different prompts, with which each new prompt is compared. First the prompt
        # whose last use is the longest ago.
        leaders = [*reversed(firsts.values())][:MAX_LEADERS]
        for seat in self._joining:
            seat.source, seat.shared, seat.wave, seat.stops = None, 0, 0, []
        for seat in sorted(self._joining, key=lambda seat: seat.order):
            if seat.cached:  # it goes on with its own cache
                continue
            seat.mixed = False
            seat.prompt = seat.history.tobytes()
            # If no other seat has this prompt, this one is the first: a source for later ones.
            first = firsts.setdefault(seat.prompt, seat)
            if first is not seat:
                seat.source, seat.shared = first, len(seat.history) - 1
            else:
                seat.source, seat.shared = self._find_best_source(seat, cached, leaders)
            if seat.shared < LEAST_SHARED:  # not worth a copy: fed whole
                seat.source, seat.shared = None, 0
                if first is seat and len(leaders) < MAX_LEADERS:
                    leaders.append(seat)
            elif seat.source is not None and not seat.source.cached:  # it joins in this step too
                seat.wave = seat.source.wave + 1
        if self.copies_exactly:
            self._add_stops()

    def _seats_to_copy(self) -> list[Seat]:
        """Return the seats whose cached rows other sessions may copy, least recently used first.

        Not idle ones in deterministic mode: when they leave depends on arrival times. Nor rows that
        older weights have computed in part (`mixed`).
        """
        may_be_idle = not self.deterministic
        return [
            seat
            for seat in self.seats.values()
            if seat.cached and not seat.mixed and (may_be_idle or seat.request is not None)
        ]

    def _find_best_source(
        self, seat: Seat, cached: Sequence[Seat], leaders: Sequence[Seat]
    ) -> tuple[Seat | None, int]:
        """Return the seat from which a new prompt can copy the most ids, and their number.

        `leaders` are a few seats of different prompts: the beginning of their rows can be copied.
        With `copies_exactly` they all join in this step, and can pause where the common beginning
        ends. The rows of `cached` are complete by then, and can only be copied whole.
        """
        source: Seat | None = None
        most_shared = 0
        if self.copies_exactly:
            source = _longest_beginning(seat, cached)
            most_shared = source.cached if source else 0
        for leader in leaders:
            # A leader that joins in this step has nothing cached yet, but will have all of its ids.
            cached_ids = leader.history[: leader.cached or None]
            # The last id is always fed: the first token is sampled from its logits.
            shared = common_prefix(cached_ids, seat.history[:-1])
            if shared > most_shared:
                source, most_shared = leader, shared
        return source, most_shared

    def _add_stops(self) -> None:
        """Let seats that are fed in this step pause where others copy their rows."""
        for seat in self._joining:
            source = seat.source
            if source is not None and source.cached == 0 and seat.shared > source.shared:
                source.stops = sorted({*source.stops, seat.shared})

    def _admit_expected(self) -> bool:
        """Let the expected sessions whose turn it is join. Return False if one has not called yet.

        Then the engine has to wait, so that the batch is the same in every run.
        """
        while self._rejoin_due() and self._admit_from_queue():
            if self.active or self._joining:
                return True
            # No seat decodes: go on to the step at which the next session is due, or a row is free.
            idle = [*self.seats.values(), *self._leaving]
            self.step = min(seat.due_step for seat in idle if seat.due_step is not None)
        return False

    def _rejoin_due(self) -> bool:
        """Let the idle sessions that are due join. Return False if one has not called yet."""
        due_seats = [
            seat
            for seat in self.seats.values()
            if seat.due_step is not None and seat.due_step <= self.step
        ]
        for seat in due_seats:
            if seat.session in self._waiting:
                self._join(seat.session)
        return all(seat.request is not None for seat in due_seats)

    def _admit_from_queue(self) -> bool:
        """Give free rows to the next expected sessions. Return False if one has not called yet."""
        self._leaving = [
            seat
            for seat in self._leaving
            if seat.due_step is not None and seat.due_step > self.step
        ]
        while self._join_queue and len(self.seats) + len(self._leaving) < self.max_rows:
            expected = self._join_queue[0]
            if not expected.is_released:
                if expected.session not in self._waiting:
                    return False
                self._join(expected.session)
            self._join_queue.popleft()
        return True

    def _join(self, session: str) -> None:
        """Move a session's waiting request to its seat, which is made if it has none.

        The seat keeps its cache if the new ids extend the cached ones.
        """
        seat = self.seats.get(session)
        if seat is None:
            expected = self._expected.get(session)
            seat = Seat(session=session, order=expected.order if expected else 0)
            self.seats[session] = seat
        request = self._waiting.pop(session)
        ids, cached = request.token_ids, seat.cached
        # At least one id must be new: the next token is sampled from the logits after a fed id.
        extends_cache = cached < len(ids) and np.array_equal(seat.history[:cached], ids[:cached])
        if not extends_cache:
            seat.cached = 0  # the row is fed from the start
        seat.history, seat.request = ids, request
        seat.due_step = None  # it has called
        self._joining.append(seat)
