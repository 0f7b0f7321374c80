"""Rewards that limit their time by an alarm get what they get in the main thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from reward_cases import made

from agenttrain.rewards.function import FunctionScorer, RewardError
from agenttrain.rewards.rubric import Rubric
from agenttrain.types import Rollout


class Late(Exception):
    """The alarm has rung."""


def ring(number: int, frame: object) -> None:
    raise Late


def with_alarm(value: float) -> float:
    """Return `value`; 0 where the alarm cannot be set, and -1 if it rings: for a negative value."""
    try:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.02 if value < 0 else 5)
        try:
            while value < 0:
                pass
            return value
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    except Late:
        return -1.0
    except Exception:
        return 0.0


def alone(rollout: Rollout, number: float) -> float:
    return with_alarm(number)


def trl(completions: Sequence[Any], number: Sequence[float], **columns: Any) -> list[float]:
    return [with_alarm(value) for value in number]


@pytest.mark.parametrize("function", [alone, trl])
@pytest.mark.parametrize("concurrency", [None, 3])
def test_a_swallowed_error_is_no_reward(function: Callable[..., Any], concurrency: Any) -> None:
    rows = [made("", number=number) for number in (1.0, 2.0, -5.0, 4.0)]
    scorer = FunctionScorer("it", function, timeout_s=30, concurrency=concurrency)
    rubric = Rubric({"it": scorer})
    with pytest.warns(RuntimeWarning, match=r"reward\.it: .* reward=\[math_verify\]") as warned:
        asyncio.run(rubric.score(rows))
    assert [row.reward for row in rows] == [1.0, 2.0, -1.0, 4.0]
    assert len(warned) == 1
    asyncio.run(rubric.score(rows))  # warns no more
    assert [row.reward for row in rows] == [1.0, 2.0, -1.0, 4.0]
    (text,) = rubric.alarms()
    assert text.startswith("reward.it: ")


def test_where_the_event_loop_is_in_another_thread_the_run_stops():
    problems: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(Rubric({"it": FunctionScorer("it", alone)}).score([made("", number=1.0)]))
        except RewardError as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    with pytest.warns(RuntimeWarning):
        thread.start()
        thread.join()
    (error,) = problems
    assert "reward=[math_verify]" in str(error)


def test_code_that_may_set_an_alarm_is_named_before_a_run():
    (text,) = Rubric({"it": alone, "plain": lambda rollout: 1.0}).alarms()
    assert text.startswith("reward.it: ")
    assert text.endswith("with_alarm)")
