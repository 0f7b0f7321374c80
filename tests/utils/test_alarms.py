"""Alarms of users' functions: found out in threads, kept apart in the main thread."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from typing import Any

import pytest
from parts import TASK, call, rollout, toolbox

from agenttrain.environments.environment import Instance
from agenttrain.environments.user import SimulatedUser
from agenttrain.rewards.builtin.math_verify import MathVerify
from agenttrain.utils.alarms import alarms_kept_apart, may_set_alarms
from agenttrain.utils.threads import DaemonThreads, attempt, attempt_with_alarms


class TooLate(Exception):
    """The time is over."""


def limited(work: Any, seconds: float) -> Any:
    """Return the result of `work`, within a time limit by an alarm, as math-verify does."""

    def handler(number: int, frame: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def swallowing(seconds: float = 5.0) -> float:
    try:
        return float(limited(lambda: 1, seconds))
    except Exception:
        return 0.0


def forever() -> None:
    while True:
        pass


def in_thread(function: Any) -> Any:
    return asyncio.run(DaemonThreads().run(function))


def test_an_alarm_in_a_thread_is_found_out_though_its_error_is_swallowed():
    outcome = in_thread(swallowing)
    assert (outcome.value, outcome.alarm) == (0.0, True)
    assert in_thread(lambda: attempt(swallowing)).alarm  # an attempt within an attempt
    assert not in_thread(lambda: 1.0).alarm


def test_an_alarm_without_a_handler_in_a_thread_does_not_end_the_process():
    outcome = in_thread(functools.partial(signal.setitimer, signal.ITIMER_REAL, 0.01))
    assert isinstance(outcome.error, ValueError)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert left == 0 or left > 1  # pytest-timeout's


def test_handlers_of_other_signals_and_other_threads_are_python_s_affair():
    def handles() -> str:
        try:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        except ValueError as error:
            return str(error)
        return ""

    outcome = in_thread(handles)
    assert "main thread" in str(outcome.value)
    assert not outcome.alarm
    texts: list[float] = []
    thread = threading.Thread(target=lambda: texts.append(swallowing()))
    thread.start()
    thread.join()
    assert texts == [0.0]


def test_in_the_main_thread_alarms_end_what_takes_too_long():
    assert attempt_with_alarms(swallowing).value == 1.0
    assert isinstance(attempt_with_alarms(lambda: limited(forever, 0.02)).error, TooLate)
    with pytest.raises(RuntimeError):
        raise in_thread(lambda: attempt_with_alarms(swallowing)).error


def test_an_alarm_that_was_pending_before_is_pending_afterwards():
    def forgets() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(500)

    before = signal.getsignal(signal.SIGALRM)
    with alarms_kept_apart():  # of pytest-timeout, if there is one
        signal.setitimer(signal.ITIMER_REAL, 1000.0)
        with alarms_kept_apart():
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
            forgets()
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    assert signal.getsignal(signal.SIGALRM) is before


class Careful:
    """An object that is called, and limits its time in a method."""

    def __call__(self, rollout: Any) -> float:
        return self.score()

    def score(self) -> float:
        return swallowing()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (limited, "limited"),
        (swallowing, "limited"),  # calls it
        (functools.partial(swallowing, seconds=1.0), "limited"),
        (Careful(), "limited"),
        (forever, None),
        (MathVerify(), None),  # in a process of its own
    ],
)
def test_code_that_sets_alarms_is_found_without_a_call(function: Any, name: str | None) -> None:
    found = may_set_alarms(function)
    assert (found and found.rpartition(".")[2]) == name


def test_math_verify_sets_alarms():
    import math_verify

    def reward(rollout: Any) -> bool:
        return math_verify.verify(math_verify.parse("$4$"), math_verify.parse("$4$"))

    assert may_set_alarms(reward) == "math_verify.utils.timeout"


def look() -> str:
    """Look around."""
    return f"{swallowing():g} lamp"


def call_tool() -> object:
    done = rollout(call("look", "{}"), "ok", tools=toolbox(look))
    return done.tool_results[0].content


def call_environment() -> object:
    instance = Instance("environment maze", 10)
    return asyncio.run(instance.call(look))


def ask_user() -> object:
    user = SimulatedUser(lambda task, spoken, seed: look())
    return asyncio.run(user.reply(TASK, [], replies=0, seed=0))


@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        (call_tool, "tools.look.isolation=process"),
        (call_environment, "environment maze"),
        (ask_user, "user: "),
    ],
)
def test_tools_environments_and_users_warn(use: Any, remedy: str) -> None:
    with pytest.warns(RuntimeWarning, match=remedy):
        assert use() == "0 lamp"
