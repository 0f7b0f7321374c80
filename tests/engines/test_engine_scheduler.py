"""Who decodes at which step: no model, the clock by hand."""

import numpy as np
import pytest

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.scheduler import Generation, Scheduler


def request(session, *ids, parent=None):
    return Generation(
        session=session,
        parent=parent,
        token_ids=np.array(ids or (1, 2)),
        sampling=Sampling(max_tokens=1),
        budget=1,
        noise=[0.5],
        deliver=lambda result: None,
    )


def step(scheduler, *finished):
    """One decode step in which these sessions' completions end; the batch's sessions."""
    assert scheduler.ready()
    batch = [seat.session for seat in scheduler.active]
    for seat in list(scheduler.active):
        seat.cached += len(seat.next_ids())
        seat.request.append(9, -0.5, 0)
        if seat.session in finished:
            scheduler.finish(seat)
    scheduler.step += 1
    return batch


def expecting(*sessions, max_rows=8, rejoin_steps=2, copies_exactly=False):
    scheduler = Scheduler(max_rows, rejoin_steps, copies_exactly=copies_exactly)
    scheduler.expect(sessions)
    return scheduler


def test_nobody_starts_before_the_first_expected_session_was_heard():
    scheduler = expecting("a", "b")
    scheduler.add(request("b"))
    assert not scheduler.ready()
    scheduler.add(request("a"))
    assert step(scheduler) == ["a", "b"]


def test_admission_follows_the_expected_order_and_not_the_arrival():
    scheduler = expecting("a", "b", "c", max_rows=2)
    for session in "cba":
        scheduler.add(request(session))
    assert step(scheduler, "a") == ["a", "b"]
    # a keeps its row while its tools run, so c waits.
    assert step(scheduler) == ["b"]
    scheduler.release("a")
    assert step(scheduler) == ["b", "c"]


def test_a_session_rejoins_at_its_step_and_neither_before_nor_after():
    scheduler = expecting("a", "b", rejoin_steps=2)
    for session in "ab":
        scheduler.add(request(session))
    assert step(scheduler, "a") == ["a", "b"]  # step 0: due at step 2
    scheduler.add(request("a", 1, 2, 9, 5))
    assert step(scheduler) == ["b"]  # step 1, although a is back
    assert step(scheduler, "b") == ["b", "a"]  # step 2; b is due at step 4
    assert step(scheduler) == ["a"]
    assert not scheduler.ready()  # step 4: b is late
    scheduler.add(request("b", 1, 2, 9, 9, 9, 5))
    assert step(scheduler) == ["a", "b"]


def test_an_early_release_frees_its_row_at_the_step_it_is_due():
    scheduler = expecting("a", "b", "c", max_rows=2)
    for session in "abc":
        scheduler.add(request(session))
    step(scheduler, "a")
    scheduler.release("a")
    assert step(scheduler) == ["b"]
    assert step(scheduler) == ["b", "c"]


def test_steps_in_which_all_wait_for_tools_are_skipped():
    scheduler = expecting("a", rejoin_steps=3)
    scheduler.add(request("a"))
    step(scheduler, "a")
    assert not scheduler.ready()
    scheduler.add(request("a", 1, 2, 9, 5))
    assert step(scheduler) == ["a"]
    assert scheduler.step == 4


@pytest.mark.parametrize("early", [True, False])
def test_a_session_released_before_its_first_call_holds_nobody_up(early):
    scheduler = expecting("a", "b")
    if early:
        scheduler.release("a")
    scheduler.add(request("b"))
    if not early:
        assert not scheduler.ready()
        scheduler.release("a")
    assert step(scheduler, "b") == ["b"]
    scheduler.release("b")
    assert not scheduler.ready()
    assert not scheduler.deterministic and scheduler.seats == {}


def test_several_lists_of_expected_sessions_follow_one_another():
    scheduler = expecting("a", max_rows=1)
    scheduler.expect(["b"])
    scheduler.add(request("b"))
    scheduler.add(request("a"))
    assert step(scheduler, "a") == ["a"]
    scheduler.release("a")
    assert step(scheduler) == ["b"]


def test_a_session_that_was_not_expected_is_refused_while_others_are():
    scheduler = expecting("a")
    with pytest.raises(EngineError, match=r"'x'.*rollout\.deterministic=false"):
        scheduler.add(request("x"))
    scheduler.release("a")
    assert not scheduler.ready()
    scheduler.add(request("x"))
    assert step(scheduler) == ["x"]


def test_one_session_cannot_ask_twice_at_once():
    scheduler = Scheduler(8, 2)
    scheduler.add(request("a"))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"'a'.*has not ended"):
            scheduler.add(request("a"))
        scheduler.ready()


def test_a_waiting_session_takes_the_row_of_the_longest_idle_one():
    scheduler = Scheduler(2, 2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    step(scheduler, "b")
    step(scheduler, "a")
    scheduler.add(request("c"))
    assert step(scheduler) == ["c"]
    assert list(scheduler.seats) == ["a", "c"] and scheduler.evictions == 1


def test_with_all_rows_busy_requests_wait_and_a_returning_session_does_not():
    scheduler = Scheduler(2, 2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    step(scheduler, "a")
    scheduler.add(request("a", 1, 2, 9, 5))
    scheduler.add(request("c"))
    assert step(scheduler, "b") == ["b", "a"]
    assert step(scheduler) == ["a", "c"]


def test_only_ids_that_extend_the_cached_ones_keep_the_cache():
    scheduler = Scheduler(2, 2)
    scheduler.add(request("a", 1, 2))
    step(scheduler, "a")
    seat = scheduler.seats["a"]
    assert (list(seat.history), seat.cached) == ([1, 2, 9], 2)
    for ids, pending in (((1, 2, 9, 5), 2), ((1, 7, 9, 5), 4), ((1, 2), 2), ((1, 2, 8), 1)):
        scheduler.add(request("a", *ids))
        seat.history, seat.cached = np.array([1, 2, 9]), 2
        assert scheduler.ready()
        assert seat.pending == pending
        assert list(seat.next_ids()) == list(ids[-pending:])
        scheduler.finish(seat)


SYSTEM = tuple(range(100, 120))  # 20 ids


def test_a_group_is_fed_once_and_groups_share_how_their_prompts_begin():
    scheduler = expecting("a0", "a1", "b0", "b1", "c0")
    a, b = (*SYSTEM, 1, 2, 3), (*SYSTEM, 1, 5)
    for session, ids in (("b1", b), ("a0", a), ("c0", (7, 8)), ("a1", a), ("b0", b)):
        scheduler.add(request(session, *ids))
    assert scheduler.ready()
    shares = {
        seat.session: (seat.wave, seat.source and seat.source.session, seat.shared)
        for seat in scheduler.active
    }
    assert shares == {
        "c0": (0, None, 0),
        "a0": (0, None, 0),
        "a1": (1, "a0", 22),  # all but the last id, whose logits are wanted
        "b0": (1, "a0", 21),  # SYSTEM and the 1
        "b1": (2, "b0", 21),
    }
    assert [seat.session for seat in scheduler.active] == ["c0", "a0", "a1", "b0", "b1"]


def test_a_later_session_shares_with_a_row_that_is_cached():
    scheduler = Scheduler(4, 2)
    scheduler.add(request("a", *SYSTEM, 1))
    step(scheduler, "a")
    scheduler.add(request("same", *SYSTEM, 1))
    scheduler.add(request("begun", *SYSTEM, 4, 5))
    scheduler.add(request("short", *SYSTEM[:15], 6))  # 15 ids are not worth a pass
    assert scheduler.ready()
    shares = {seat.session: (seat.wave, seat.shared) for seat in scheduler.active}
    assert shares == {"same": (0, 20), "begun": (0, 20), "short": (0, 0)}


def test_rows_that_cannot_be_cut_pause_where_others_copy_them():
    scheduler = expecting("a0", "a1", "b0", "b1", "c0", copies_exactly=True)
    a, b = (*SYSTEM, 1, 2, 3), (*SYSTEM, 1, 5)
    for session, ids in (("b1", b), ("a0", a), ("c0", (7, 8)), ("a1", a), ("b0", b)):
        scheduler.add(request(session, *ids))
    assert scheduler.ready()
    shares = {
        seat.session: (seat.wave, seat.source and seat.source.session, seat.shared, seat.stops)
        for seat in scheduler.active
    }
    assert shares == {
        "a0": (0, None, 0, [21, 22]),  # after SYSTEM and the 1, and before its last id
        "c0": (0, None, 0, []),
        "a1": (1, "a0", 22, []),
        "b0": (1, "a0", 21, []),  # it has 22 ids: b1 copies it before it is fed
        "b1": (2, "b0", 21, []),
    }
    # Rows that pause come first in their wave.
    assert [seat.session for seat in scheduler.active] == ["a0", "c0", "a1", "b0", "b1"]
    a0 = scheduler.active[0]
    parts = []
    while a0.pending:
        parts.append(len(a0.next_ids()))
        a0.cached += parts[-1]
    assert parts == [21, 1, 1]


def test_rows_that_cannot_be_cut_are_copied_by_ids_that_extend_them():
    scheduler = Scheduler(6, 2, copies_exactly=True)
    for session, ids in (("a", (*SYSTEM, 1)), ("b", (*SYSTEM, 1, 2, 3))):
        scheduler.add(request(session, *ids))
    step(scheduler, "a", "b")  # both idle, with 21 and 23 ids cached
    scheduler.add(request("same", *SYSTEM, 1))
    scheduler.add(request("longer", *SYSTEM, 1, 2, 3, 4))
    scheduler.add(request("between", *SYSTEM, 1, 2, 4))
    scheduler.add(request("shorter", *SYSTEM, 5))
    assert scheduler.ready()
    sources = {
        seat.session: (seat.source and seat.source.session, seat.shared)
        for seat in scheduler.active
    }
    assert sources == {
        "same": (None, 0),  # no id would be left to feed
        "longer": ("b", 23),
        "between": ("a", 21),
        "shorter": ("same", 20),  # which pauses after SYSTEM
    }


@pytest.mark.parametrize("released", ["before", "after"])
def test_what_is_shared_does_not_depend_on_when_a_release_arrives(released):
    scheduler = expecting("a", "b", "c", max_rows=3)
    scheduler.add(request("a", *SYSTEM, 1))
    scheduler.add(request("b", 7, 8))
    scheduler.add(request("c", 8, 9))
    step(scheduler, "a")  # a is idle until it is due
    scheduler.expect(["d"])
    scheduler.add(request("d", *SYSTEM, 1))
    scheduler.max_rows = 4
    if released == "before":
        scheduler.release("a")
    assert scheduler.ready()
    (d,) = [seat for seat in scheduler.active if seat.session == "d"]
    assert d.source is None


def test_a_session_takes_the_seat_of_the_expected_one_that_waits_for_it():
    scheduler = expecting("a", "b", max_rows=1)
    scheduler.add(request("a", 1, 2))
    scheduler.add(request("b", 5))
    assert step(scheduler, "a") == ["a"]
    # a waits for a/1 and that for a/1/1, in one row; b waits until a is released.
    scheduler.add(request("a/1", 7, parent="a"))
    assert step(scheduler, "a") == ["a"]
    scheduler.add(request("a/1/1", 8, parent="a/1"))
    assert step(scheduler, "a") == ["a"]
    scheduler.release("a/1/1")
    scheduler.add(request("a/1", 7, 9, 3, parent="a"))
    assert step(scheduler, "a") == ["a"]
    scheduler.release("a/1")
    assert not scheduler.ready()
    scheduler.add(request("a", 1, 2, 9, 4))
    assert scheduler.ready()
    (seat,) = scheduler.active
    assert (seat.next_ids().tolist(), seat.order) == ([1, 2, 9, 4], 1)
    scheduler.release("a")
    assert step(scheduler) == ["b"]


def test_a_parent_that_never_called_gives_its_seat_all_the_same():
    scheduler = expecting("a", "b")
    scheduler.add(request("b"))
    scheduler.add(request("a/1", 7, parent="a"))
    assert step(scheduler, "a") == ["a", "b"]


@pytest.mark.parametrize("admitted", [False, True], ids=["waiting", "active"])
def test_a_session_released_amid_its_call_leaves_its_parent_due(admitted):
    scheduler = expecting("a", max_rows=1)
    scheduler.add(request("a", 1, 2))
    step(scheduler, "a")
    scheduler.add(request("a/1", 7, parent="a"))
    if admitted:
        step(scheduler)
    assert scheduler.release("a/1").session == "a/1"
    assert scheduler.release("a/1") is None
    assert not scheduler.ready()
    scheduler.add(request("a", 1, 2, 9, 4))
    assert step(scheduler, "a") == ["a"]
    scheduler.release("a")
    assert not scheduler.deterministic


def test_two_sessions_cannot_sit_in_one_seat_at_once():
    scheduler = expecting("a")
    scheduler.add(request("a"))
    step(scheduler, "a")
    scheduler.add(request("a/1", parent="a"))
    with pytest.raises(EngineError, match=r"'a/2' in the seat of session 'a': .*session 'a/1' has"):
        scheduler.add(request("a/2", parent="a"))


def test_a_parent_that_was_released_gives_no_seat():
    scheduler = expecting("a", "b")
    for session in "ab":
        scheduler.add(request(session))
    step(scheduler, "a")
    scheduler.add(request("a/1", parent="a"))
    scheduler.release("a")
    with pytest.raises(EngineError, match=r"'a/1': not among the sessions given to expect"):
        scheduler.add(request("a/1", parent="a"))


def test_outside_of_deterministic_mode_a_session_takes_the_row_of_its_idle_parent():
    scheduler = Scheduler(1, 2)
    scheduler.add(request("a"))
    assert step(scheduler, "a") == ["a"]
    scheduler.add(request("a/1", 7, parent="a"))
    assert step(scheduler, "a/1") == ["a/1"]
    scheduler.add(request("a", 1, 2, 9))
    assert step(scheduler, "a") == ["a"]
