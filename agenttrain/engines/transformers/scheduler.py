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
    token_ids: np.ndarray
    """[T] int64, the ids to continue; with images, their keys stand at placeholders."""
    sampling: Sampling
    budget: int
    """Most tokens to sample, at least 1."""
    noise: list[float]
    """[budget] Uniforms in [0, 1), one for each token."""
    deliver: Callable[[Completion | EngineError], None]
    parent: str | None = None
    """Session that waits for this one."""
    report: Callable[[int], None] | None = None
    """Called with each token as it is sampled."""
    layout: Layout | None = None
    """Positions and images; None: it has no images."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
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
        # `versions` are runs of (version, tokens): extend the last run, or begin one.
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
    """An admitted session and its share of the cache."""

    session: str
    order: int
    """Position among the expected sessions; 0 outside deterministic mode."""
    row: int | None = None
    """Row in the cache."""
    history: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[T] All ids of the session, as of its last join or completion."""
    cached: int = 0
    """Number of ids of `history` that are in the KV cache."""
    mixed: bool = False
    """Part of its KV cache was computed by older weights."""
    request: Generation | None = None
    due: int | None = None
    """Deterministic mode: the step at which the session has to call again."""
    prompt: bytes = b""
    """Ids with which its cache began."""
    source: Seat | None = None
    """Seat from whose row the cache of the first `shared` ids is copied, before the prefill pass
    of the next step."""
    shared: int = 0
    """Number of ids that its prompt has in common with the source's. 0: no source."""
    wave: int = 0
    """Number of the prefill pass in that step. Passes before it complete the source's row."""
    stops: list[int] = field(default_factory=list)
    """Numbers of ids at which its prefill pauses, in order: others copy the row there. Empty if
    they can copy it later, because rows can be cut."""

    @property
    def pending(self) -> int:
        """Number of ids that the model has not seen: 1 while the seat decodes."""
        sampled = len(self.request.sampled) if self.request else 0
        return len(self.history) + sampled - self.cached

    def next_ids(self) -> np.ndarray:
        """Return the pending ids up to the next stop, [pending or less]."""
        assert self.request is not None
        sampled = self.request.sampled
        if self.cached >= len(self.history):  # it decodes: the cache also holds sampled ids
            return np.array(sampled[self.cached - len(self.history) :])
        stop = next((stop for stop in self.stops if stop > self.cached), None)
        if stop is not None:
            return self.history[self.cached : stop]
        return np.concatenate([self.history[self.cached :], np.array(sampled, dtype=np.int64)])


@dataclass(slots=True, eq=False)
class Ticket:
    """An expected session in deterministic mode, until it is released.

    It stays in the queue of expected sessions even if it is released before its turn to join.
    """

    session: str
    order: int
    released: bool = False


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
        """In deterministic mode a session is due `rejoin_steps` steps after its last completion.

        With `copies_exactly` a row can be copied only with all of its ids. So it is where rows hold
        the states of recurrent layers, or a window.
        """
        self.copies_exactly = copies_exactly
        self.max_rows = max_rows
        self.rejoin_steps = rejoin_steps
        self.share_prefix = share_prefix
        self.clock = 0
        """Number of the current step."""
        self.evictions = 0
        self.draining = False
        """True: no request joins until all active ones have ended."""
        self.active: list[Seat] = []
        """The batch, in the order of its rows."""
        self.seats: dict[str, Seat] = {}
        """All admitted sessions, least recently used first."""
        self._waiting: dict[str, Generation] = {}
        """Requests that have not joined the batch, by the session in whose seat they will sit."""
        self._joining: list[Seat] = []
        """Seats that join the batch in this step, and have to be prefilled."""
        self._leaving: list[Seat] = []
        """Seats of released sessions, whose rows are free from their due step on."""
        self._expected: deque[Ticket] = deque()
        """Expected sessions that have no seat yet, in the order in which they join."""
        self._tickets: dict[str, Ticket] = {}
        """All expected sessions that have not been released."""
        self._hosts: dict[str, str] = {}
        """Session with a parent -> the expected session in whose seat it sits."""
        self._expected_count = 0

    @property
    def deterministic(self) -> bool:
        """True while an expected session has not been released."""
        return bool(self._tickets)

    def requests(self) -> Iterator[Generation]:
        """Yield all requests that have not ended."""
        yield from self._waiting.values()
        yield from (s.request for s in self.seats.values() if s.request is not None)

    def expect(self, sessions: Iterable[str]) -> None:
        """Expect these sessions, in this order, and free the rows of other idle ones."""
        # Idle seats without a due step are sessions of before, which nobody expects.
        for seat in [s for s in self.seats.values() if s.request is None and s.due is None]:
            self._drop(seat)
        for session in sessions:
            self._expected_count += 1
            ticket = Ticket(session, self._expected_count)
            if session not in self._tickets:
                self._tickets[session] = ticket
                if session not in self.seats:  # else it need not wait for a row
                    self._expected.append(ticket)

    def add(self, request: Generation) -> None:
        """Queue a request. Raises EngineError for a busy or unexpected session."""
        session = request.session
        # A guest sits in the seat of its oldest ancestor that is expected.
        if request.parent is not None:
            root = self._hosts.get(request.parent, request.parent)
            if root in self._tickets:
                self._hosts[session] = root
        host = self._hosts.get(session, session)
        seat = self.seats.get(host)
        blocking = self._waiting.get(host) or (seat and seat.request)
        if blocking:
            where = "" if host == session else f" in the seat of session {host!r}"
            raise EngineError(
                f"session={session!r}{where}: the last generate() of session "
                f"{blocking.session!r} has not ended. Await it, or use another session."
            )
        if self.deterministic and host not in self._tickets:
            raise EngineError(
                f"session={host!r}: not among the sessions given to expect(). Expect it before "
                "it calls generate(), or set rollout.deterministic=false."
            )
        self._waiting[host] = request

    def release(self, session: str) -> Generation | None:
        """End a session; return its request if it has one. Unknown sessions are ignored.

        In deterministic mode the row of an idle session becomes free only at the step at which it
        was due, whenever the release arrives. A guest, a session with a parent, sits in its host's
        seat. When it leaves, the host is due at once.
        """
        if (host := self._hosts.pop(session, None)) is not None:
            return self._release_guest(session, host)
        # Its guests have no seat from now on.
        self._hosts = {guest: host for guest, host in self._hosts.items() if host != session}
        request = self._waiting.pop(session, None)
        seat = self.seats.get(session)
        if seat is not None:
            request = seat.request or request
            if seat.due is not None:
                self._leaving.append(seat)
            self._drop(seat)
        self._void_ticket(session)
        return request

    def _release_guest(self, session: str, host: str) -> Generation | None:
        """End a guest, which sits in the seat of `host`. Return its request if it has one."""
        waiting = self._waiting.get(host)
        if waiting is not None and waiting.session == session:
            return self._waiting.pop(host)
        seat = self.seats.get(host)
        request = seat.request if seat is not None else None
        if seat is None or request is None or request.session != session:
            return None  # the guest's last request has ended
        if seat in self.active:
            self._remove(seat)
        # Not to be continued: the cache may hold sampled ids, which `history` does not have.
        seat.cached = 0
        seat.request, seat.due = None, self.clock
        return request

    def _drop(self, seat: Seat) -> None:
        """Take a seat, its row and its ticket away from its session."""
        if seat in self.active:
            self._remove(seat)
        if seat in self._joining:
            self._joining.remove(seat)
        del self.seats[seat.session]
        self._void_ticket(seat.session)

    def _void_ticket(self, session: str) -> None:
        """Stop expecting a session; the last one ends deterministic mode."""
        ticket = self._tickets.pop(session, None)
        if ticket is not None:
            ticket.released = True
            if not self._tickets:
                # Now, and not at the next step: that may come after the next `expect`.
                self._leaving.clear()
                self._expected.clear()

    def _remove(self, seat: Seat) -> None:
        """Take a seat out of the batch."""
        # The last seat fills the gap: one row moves in the cache instead of all behind it.
        last = self.active.pop()
        if last is not seat:
            self.active[self.active.index(seat)] = last

    def finish(self, seat: Seat) -> Generation:
        """End a seat's completion and return its request. The session's cache stays."""
        self._remove(seat)
        request = seat.request
        assert request is not None
        seat.history = np.concatenate([seat.history, np.array(request.sampled, dtype=np.int64)])
        seat.request = None
        # To the end: seats are in the order of their last use.
        self.seats[seat.session] = self.seats.pop(seat.session)
        if seat.session in self._tickets:
            seat.due = self.clock + self.rejoin_steps
        elif self.deterministic:  # it began before `expect`
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
        # pauses come first, so that those still to be fed are consecutive. Then by length:
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
        """Find rows from which new sessions copy the KV cache of a common prefix.

        Sets each joining seat's `source`, the number of `shared` ids, and its `wave`: the number of
        the prefill pass that feeds it, after the passes that its source needs. `leaders` are seats
        of different prompts, with which each new prompt is compared.

        Example: prompts A A B B with the same system message, in an empty cache. The first A is fed
        whole (wave 0). The first B copies the system message from it, and the second A copies all
        but its last id (wave 1). The second B copies from the first B (wave 2).
        """
        # Not from idle sessions in deterministic mode: when they leave depends on arrival times.
        # Nor from rows that older weights have computed in part (`mixed`).
        may_be_idle = not self.deterministic
        cached = [
            seat
            for seat in self.seats.values()
            if seat.cached and not seat.mixed and (may_be_idle or seat.request is not None)
        ]
        firsts: dict[bytes, Seat] = {}
        """Prompt -> the seat from which seats with the same prompt copy."""
        if not self.copies_exactly:  # else `_longest_beginning` chooses among the cached rows
            # `cached` is in the order of use. Of several seats with one prompt the dict keeps the
            # least recently used one, which comes last in the reversed list.
            firsts = {seat.prompt: seat for seat in reversed(cached)}
        # A seat of each prompt, beginning with the prompt whose last use is the longest ago.
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
            if seat.shared < LEAST_SHARED:
                seat.source, seat.shared = None, 0
                if first is seat and len(leaders) < MAX_LEADERS:
                    leaders.append(seat)
            elif seat.source is not None and not seat.source.cached:  # it joins in this step too
                seat.wave = seat.source.wave + 1
        if self.copies_exactly:
            self._add_stops()

    def _find_best_source(
        self, seat: Seat, cached: Sequence[Seat], leaders: Sequence[Seat]
    ) -> tuple[Seat | None, int]:
        """Return the seat whose row shares the most ids with a new prompt, and their number.

        `cached` are the seats with a row to copy from. `leaders` are seats of different prompts,
        some of which are only fed in this step.
        """
        source: Seat | None = None
        most_shared = 0
        if self.copies_exactly:
            # A row that is complete can only be copied with all of its ids.
            source = _longest_beginning(seat, cached)
            most_shared = source.cached if source else 0
        for leader in leaders:
            # A leader that joins in this step has nothing cached yet, but will have.
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
        """Admit expected sessions. Return False if one that is due has not called yet.

        Then the engine has to wait, so that the batch is the same in every run.
        """
        while True:
            # Rejoin sessions that are due, and free the rows of those that left.
            self._leaving = [s for s in self._leaving if s.due is not None and s.due > self.clock]
            due = [s for s in self.seats.values() if s.due is not None and s.due <= self.clock]
            for seat in due:
                if seat.session in self._waiting:
                    self._join(seat.session)
            if any(seat.request is None for seat in due):
                return False
            # Admit further expected sessions while there are rows.
            while self._expected and len(self.seats) + len(self._leaving) < self.max_rows:
                ticket = self._expected[0]
                if not ticket.released:
                    if ticket.session not in self._waiting:
                        return False
                    self._join(ticket.session)
                self._expected.popleft()
            if self.active or self._joining:
                return True
            # No seat decodes: go on to the step at which the next session is due, or a row is free.
            idle = [*self.seats.values(), *self._leaving]
            self.clock = min(seat.due for seat in idle if seat.due is not None)

    def _join(self, session: str) -> None:
        """Move a session's waiting request to its seat, which is made if it has none."""
        seat = self.seats.get(session)
        if seat is None:
            ticket = self._tickets.get(session)
            seat = Seat(session=session, order=ticket.order if ticket else 0)
            self.seats[session] = seat
        request = self._waiting.pop(session)
        ids, cached = request.token_ids, seat.cached
        # At least one id must be new: the next token is sampled from the logits after a fed id.
        extends_cache = cached < len(ids) and np.array_equal(seat.history[:cached], ids[:cached])
        if not extends_cache:
            seat.cached = 0
        seat.history, seat.request, seat.due = ids, request, None
        self._joining.append(seat)
