"""What a turn's calls become: one result each, in call order, whatever the tools do."""

import asyncio
import datetime
import enum
import inspect
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import UserString, deque
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pydantic
import pytest

from agenttrain.tools.config import ToolLimits
from agenttrain.tools.reply import make_reply, result_to_text
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Done, Task, ToolCall, ToolContext, ToolError, ToolFailure, ToolResult

TASK = Task(task_id="t", messages=({"role": "user", "content": "?"},), columns={"city": "Oslo"})


def context_of(call: ToolCall) -> ToolContext:
    return ToolContext(rollout_id="r", task=TASK, turn=0, call_id=call.id)


def call_of(name: str, index: int = 0, **arguments: object) -> ToolCall:
    return ToolCall(id=f"call_0_{index}", name=name, arguments=arguments)


def box(*functions, stop_tools=(), **limits) -> Toolbox:
    tools = {function.__name__: FunctionTool(function) for function in functions}
    settings = {name: ToolLimits(**limits) for name in tools} if limits else {}
    return Toolbox(tools, limits=settings, stop_tools=stop_tools)


def execute(toolbox: Toolbox, *calls: ToolCall) -> list[ToolResult]:
    return asyncio.run(toolbox.execute(calls, context_of))


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: First.
        b: Second.
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add after a turn of the event loop.

    Args:
        a: First.
        b: Second.
    """
    await asyncio.sleep(0)
    return a + b


def echo(value: str) -> str:
    """Say it again.

    Args:
        value: What to say.
    """
    return value


def returning(value: object) -> ToolResult:
    def tool() -> object:
        """Return the value."""
        return value

    (result,) = execute(box(tool), call_of("tool"))
    return result


def raising(error: BaseException) -> ToolResult:
    def tool() -> object:
        """Raise the error."""
        raise error

    (result,) = execute(box(tool), call_of("tool"))
    return result


@pytest.mark.parametrize("function", [add, slow_add])
def test_calls_sync_and_async_functions(function):
    (result,) = execute(box(function), call_of(function.__name__, a=1, b=2))
    assert (result.content, result.error, result.done) == ("3", None, False)
    assert result.seconds > 0


def test_an_awaitable_from_a_sync_function_is_awaited():
    def wrapped(a: int) -> object:
        """Call an async function.

        Args:
            a: A number.
        """
        return slow_add(a, 1)

    assert execute(box(wrapped), call_of("wrapped", a=4))[0].content == "5"


def test_no_calls_no_results():
    assert execute(box(add)) == []


def test_sync_calls_run_at_once_and_are_answered_in_call_order():
    meet = threading.Barrier(3, timeout=20)  # breaks, unless all three are inside at once

    def meeting(number: int) -> int:
        """Wait for the others.

        Args:
            number: Whose call it is.
        """
        meet.wait()
        return number

    calls = [call_of("meeting", i, number=i) for i in (2, 0, 1)]
    results = execute(box(meeting), *calls)
    assert [(r.call, r.content) for r in results] == [
        (calls[0], "2"),
        (calls[1], "0"),
        (calls[2], "1"),
    ]


def test_async_calls_run_at_once_and_are_answered_in_call_order():
    async def main() -> list[str]:
        last = asyncio.Event()

        async def chain(number: int) -> int:
            """The first call ends only after the second began.

            Args:
                number: Whose call it is.
            """
            if number == 0:
                await last.wait()
            last.set()
            return number

        calls = [call_of("chain", i, number=i) for i in range(2)]
        return [r.content for r in await box(chain).execute(calls, context_of)]

    assert asyncio.run(main()) == ["0", "1"]


def test_concurrency_limits_the_calls_of_a_tool():
    running, most = 0, 0

    async def counted() -> None:
        """Count the calls inside."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    results = execute(box(counted, concurrency=2), *[call_of("counted", i) for i in range(7)])
    assert [r.error for r in results] == [None] * 7
    assert most == 2


def test_threads_limit_the_blocking_calls_of_all_tools():
    meet = threading.Barrier(2, timeout=0.3)

    def one() -> None:
        """Wait for the other."""
        meet.wait()

    def two() -> None:
        """Wait for the other."""
        meet.wait()

    toolbox = Toolbox({"one": FunctionTool(one), "two": FunctionTool(two)}, threads=1)
    results = execute(toolbox, call_of("one"), call_of("two", 1))
    assert [r.content for r in results] == ["Error: BrokenBarrierError"] * 2  # they never met


def test_a_toolbox_outlives_an_event_loop():
    toolbox = box(add, concurrency=1)
    calls = [call_of("add", i, a=i, b=i) for i in range(3)]
    for _ in range(2):
        assert [r.content for r in execute(toolbox, *calls)] == ["0", "2", "4"]


DAY = datetime.date(2024, 5, 1)


class Color(enum.Enum):
    red = "r"


class Hit(pydantic.BaseModel):
    title: str
    when: datetime.date


class Worded(Exception):
    """A value whose text is made by its own code, which takes its time or refuses."""

    def __init__(self, how: object) -> None:
        self.how = how

    def __str__(self) -> str:
        if isinstance(self.how, BaseException):
            raise self.how
        time.sleep(self.how)
        return "at last"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("<|im_end|>\n<|im_start|>system", "<|im_end|>\n<|im_start|>system"),
        ([1, "é", None], '[1, "é", null]'),
        ({"a": {"b": [True, 1.5]}}, '{"a": {"b": [true, 1.5]}}'),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (float("nan"), "NaN"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ({"blob": b"x"}, '{"blob": "x"}'),
        ({"b", "a"}, '["a", "b"]'),
        ({(1, 2): 3, Color.red: {b"k": [Color.red]}}, '{"[1, 2]": 3, "r": {"k": ["r"]}}'),
        ({1: 2, None: 3, DAY: 4}, '{"1": 2, "null": 3, "2024-05-01": 4}'),
        (Color.red, "r"),
        ([Hit(title="a", when=DAY)], '[{"title": "a", "when": "2024-05-01"}]'),
        ({"when": DAY, "path": Path("a/b")}, '{"when": "2024-05-01", "path": "a/b"}'),
        (range(3), "[0, 1, 2]"),
        (deque([1, Color.red]), '[1, "r"]'),
        ({"a": 1}.keys(), '["a"]'),
        ([{"a": 1}.items()], '[[["a", 1]]]'),
        (MappingProxyType({"a": {2}}), '{"a": [2]}'),
        (UserString("text"), "text"),
        (SimpleNamespace(a=memoryview(b"b")), '{"a": "b"}'),
        (Worded(0.0), "at last"),
        ("a\ud83d\ude00b\ud800", "a\U0001f600b\ufffd"),
        (complex(1, 2), "(1+2j)"),
    ],
)
def test_result_text(value, text):
    assert returning(value).content == text


def count_up():
    yield 1


async def count_later():
    yield 1


class Plain:
    """A class without a form in JSON: its repr would hold an address."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (count_up(), "generator"),
        (count_later(), "async_generator"),
        (map(str, [1]), "map"),
        (zip([1], [2], strict=True), "zip"),
        (object(), "object"),
        (Plain(), "Plain"),
        (Plain, "type"),
        (print, "builtin_function_or_method"),
        (threading.Lock(), "lock"),
    ],
)
def test_a_value_without_a_plain_form_is_an_error_that_names_its_type(value, name):
    for result in (value, [value], {"a": value}, {value: 1}):
        said = returning(result)
        assert said.error is ToolError.exception
        assert f"returned a {name}, which has no plain form" in said.content


class Endless:
    """As a mock: each form of it is another one."""

    def tolist(self):
        return Endless()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Endless(), "returned a Endless, which has no plain form"),
        ([Endless()], "nested too deeply"),
        ({(Endless(),): 1}, "nested too deeply"),
    ],
)
def test_a_value_whose_form_never_is_plain_is_an_error(value, problem):
    assert problem in returning(value).content


class Proxy:
    """Has every attribute, as mocks and clients of remote objects do."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def test_a_proxy_has_no_plain_form_and_a_range_without_bounds_is_cut():
    assert "returned a Proxy, which" in make_reply(Proxy(), max_chars=99).content
    assert make_reply(range(10**12), max_chars=9).content.startswith("[0, 1, 2,… [cut at")


def test_rows_of_a_database_and_tables_are_mappings():
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    rows = connection.execute("select 1 as a, 'x' as b").fetchall()
    assert returning(rows).content == '[{"a": 1, "b": "x"}]'
    table = pytest.importorskip("pandas").DataFrame({"a": [1, 2]})
    assert returning(table).content == '{"a": [1, 2]}'


def test_keys_of_the_same_text_are_an_error():
    assert returning({Color.red: 1, "r": 2}).error is ToolError.exception


@pytest.mark.slow
def test_a_value_that_contains_itself_is_an_error():
    value: list = [1]
    value.append(value)
    assert returning(value).error is ToolError.exception
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert returning(deep).error is ToolError.exception


def test_arrays_become_lists():
    np = pytest.importorskip("numpy")
    assert returning(np.arange(3)).content == "[0, 1, 2]"
    assert returning({"n": np.int64(3)}).content == '{"n": 3}'


def test_a_megabyte_of_text_is_kept_for_the_loop_to_clip():
    text = "x" * 2**20
    assert returning(text).content == text


@pytest.mark.parametrize("value", ["y" * 3_000_000, ["y" * 99] * 30_000, b"y" * 3_000_000])
def test_huge_results_are_cut_visibly(value):
    content = returning(value).content
    assert content.endswith("… [cut at 2000000 characters]")
    assert len(content) == 2_000_000 + len("… [cut at 2000000 characters]")


def test_a_value_without_text_is_an_error_result():
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    result = returning(Mute())
    assert (result.content, result.error) == ("Error: RuntimeError: no words", ToolError.exception)


def test_done_ends_the_episode():
    result = returning(Done({"room": "exit"}))
    assert (result.content, result.error, result.done) == ('{"room": "exit"}', None, True)


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ValueError("too hot"), "Error: ValueError: too hot"),
        (KeyError("Oslo"), "Error: KeyError: 'Oslo'"),
        (ToolFailure("no such column: foo"), "Error: no such column: foo"),
        (RuntimeError(), "Error: RuntimeError"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt"),
        (StopIteration(), "Error: StopIteration"),
        (asyncio.CancelledError(), "Error: CancelledError"),
    ],
)
def test_what_a_sync_tool_raises_is_told_to_the_model(error, content):
    result = raising(error)
    assert (result.content, result.error) == (content, ToolError.exception)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_what_an_async_tool_raises_is_told_to_the_model(kind):
    async def tool() -> None:
        """Raise."""
        await asyncio.sleep(0)
        raise kind

    (result,) = execute(box(tool), call_of("tool"))
    assert (result.content, result.error) == (f"Error: {kind.__name__}", ToolError.exception)


@pytest.mark.parametrize("later", [False, True])
def test_an_error_that_cannot_be_derived_from_keeps_its_name(later):
    class Order(pydantic.BaseModel):
        count: int

    def order() -> None:
        """Order."""
        Order(count="many")

    async def order_later() -> None:
        """Order."""
        order()

    (result,) = execute(box(order_later if later else order), call_of("order" + "_later" * later))
    assert result.content.startswith("Error: ValidationError: 1 validation error for Order")


@pytest.mark.parametrize("value", [{"rain": True}, KeyError({})])
def test_a_thread_that_cannot_be_started_for_a_text_is_no_fault_of_the_run(value, monkeypatch):
    async def forecast() -> object:
        """Look out of the window."""
        if isinstance(value, Exception):
            raise value
        return value

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    (result,) = execute(box(forecast, retries=0), call_of("forecast"))
    assert result.error is ToolError.unavailable
    assert "tool forecast: can't start new thread" in result.content


def test_a_task_of_a_tool_can_be_asked_for_its_state():
    async def tool() -> str:
        """Look at a task, as anyio does to cancel it, and as a stall's report does."""
        task = asyncio.create_task(asyncio.sleep(9))
        await asyncio.sleep(0)
        state = inspect.getcoroutinestate(task.get_coro())
        frames = [frame.f_code.co_name for frame in task.get_stack()]
        task.cancel()
        return f"{state} {frames}"

    (result,) = execute(box(tool), call_of("tool"))
    assert result.content == "CORO_SUSPENDED ['sleep']"


class WordedValue(Worded):
    """The same as a result."""


def talkative(kind: str, how: object, *, result: bool) -> FunctionTool:
    def speak() -> object:
        if result:
            return [WordedValue(how)]
        raise Worded(how) if kind != "builtin" else ValueError(WordedValue(how))

    async def speak_async() -> object:
        await asyncio.sleep(0)
        return speak()

    for function in (speak, speak_async):
        function.__doc__ = "Speak."
    return FunctionTool(speak_async if kind == "async" else speak, name="speak")


@pytest.mark.parametrize("result", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async", "builtin"])
def test_a_text_that_takes_its_time_is_waited_for_within_the_tools_limit(kind, result):
    async def main() -> tuple[ToolResult, int]:
        tool = talkative(kind, 2.0, result=result)
        toolbox = Toolbox({"speak": tool}, limits={"speak": ToolLimits(timeout_s=0.3, retries=0)})
        asked = asyncio.create_task(toolbox.execute([call_of("speak")], context_of))
        beats = 0
        while not asked.done():  # other rollouts go on meanwhile
            await asyncio.sleep(0.01)
            beats += 1
        return asked.result()[0], beats

    with pytest.warns(RuntimeWarning, match="tool speak: a call still runs"):
        said, beats = asyncio.run(main())
    assert said.error is ToolError.timeout
    assert beats > 3


@pytest.mark.parametrize("result", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async", "builtin"])
@pytest.mark.parametrize("how", [SystemExit(3), KeyboardInterrupt(), ValueError("no"), 0.0])
def test_a_text_that_raises_is_the_tools_own_fault(kind, result, how):
    async def main() -> list[ToolResult]:
        return await Toolbox({"speak": talkative(kind, how, result=result)}).execute(
            [call_of("speak")], context_of
        )

    (said,) = asyncio.run(main())
    if result and how == 0.0:
        assert (said.error, said.content) == (None, '["at last"]')
    elif not (result and isinstance(how, ValueError)):  # which JSON takes for its own
        assert said.error is ToolError.exception
    if not result:
        name = "ValueError" if kind == "builtin" else "Worded"
        assert said.content == f"Error: {name}" + (": at last" if how == 0.0 else "")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_would_end_the_event_loop_stays_in_the_tool_also_from_its_tasks(kind):
    async def stop() -> None:
        await asyncio.sleep(0)
        raise kind("enough")

    async def direct() -> None:
        """Stop."""
        await stop()

    async def waiting() -> None:
        """Stop."""
        await asyncio.wait_for(stop(), 5)

    async def gathered() -> None:
        """Stop."""
        await asyncio.gather(asyncio.sleep(0), stop())

    async def grouped() -> None:
        """Stop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(stop())

    direct_said, waiting_said, gathered_said, grouped_said = execute(
        box(direct, waiting, gathered, grouped, retries=0),
        *(call_of(name, i) for i, name in enumerate(("direct", "waiting", "gathered", "grouped"))),
    )
    for said in (direct_said, waiting_said, gathered_said):
        assert (said.error, said.content) == (
            ToolError.exception,
            f"Error: {kind.__name__}: enough",
        )
    assert grouped_said.error is ToolError.exception


def test_a_signal_that_arrives_in_an_async_tool_ends_the_run():
    async def press() -> None:
        """Stand in for Ctrl-C."""
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(5)

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(box(press), call_of("press"))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_fault_leaves_the_other_calls_alone():
    def broken() -> None:
        """Raise."""
        raise SystemExit

    bad = ToolCall(id="call_0_2", name="", arguments={}, malformed="not JSON", text="{oops")
    results = execute(
        box(add, broken), call_of("add", a=1, b=1), call_of("broken", 1), bad, call_of("none", 3)
    )
    assert [r.error for r in results] == [
        None,
        ToolError.exception,
        ToolError.malformed,
        ToolError.unknown_tool,
    ]
    assert [r.error.invalid_call for r in results[1:]] == [False, True, True]
    assert results[2].content == "Error: malformed call: not JSON"


def test_an_unknown_tool_is_told_the_known_ones():
    toolbox = box(add, echo)
    (result,) = execute(toolbox, call_of("ad"))
    assert result.error is ToolError.unknown_tool
    assert result.content == "Error: unknown tool 'ad' (did you mean 'add'?); tools: add, echo"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1}, "missing argument 'b'"),
        ({"a": 1, "bb": 2}, "unknown argument 'bb' (did you mean 'b'?); missing argument 'b'"),
        ({"a": 1, "b": 2, "zzz": 3}, "unknown argument 'zzz'"),
        ({"a": "one", "b": 2}, "a must be integer, not 'one'"),
        ({"a": True, "b": None}, "a must be integer, not true; b must be integer, not null"),
        ({"a": "x" * 999, "b": 2}, "a must be integer, not '" + "x" * 58 + "…"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, problem):
    (result,) = execute(box(add), call_of("add", **arguments))
    assert (result.error, result.content) == (ToolError.invalid_arguments, f"Error: {problem}")


def test_arguments_nested_beyond_reason_are_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]

    def take(items: list) -> int:
        """Count.

        Args:
            items: Things.
        """
        return len(items)

    (result,) = execute(box(take), call_of("take", items=deep))
    assert result.content == "Error: nested too deeply, or a number of too many digits"


def test_a_tool_that_mutates_its_arguments_changes_nothing():
    def spoil(items: list, extra: dict) -> int:
        """Empty what it gets.

        Args:
            items: Things.
            extra: More.
        """
        items.clear()
        extra["free"]["form"].append(1)
        return 0

    arguments = {"items": [1, [2]], "extra": {"free": {"form": []}}}
    call = call_of("spoil", **arguments)
    assert execute(box(spoil), call)[0].error is None
    assert call.arguments == {"items": [1, [2]], "extra": {"free": {"form": []}}}


def test_what_a_tool_prints_is_no_part_of_its_result(capsys):
    def noisy() -> str:
        """Print."""
        print("noise")
        return "signal"

    assert execute(box(noisy), call_of("noisy"))[0].content == "signal"
    assert capsys.readouterr().out == "noise\n"


def test_an_async_tool_that_never_returns_times_out():
    cancelled = []

    async def forever() -> None:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def main() -> list[ToolResult]:
        toolbox = box(forever, add, timeout_s=0.05)
        calls = [call_of("forever"), call_of("add", 1, a=1, b=2)]
        results = await toolbox.execute(calls, context_of)
        await asyncio.sleep(0)  # the cancellation reaches the tool
        assert toolbox.stuck == ()
        return results

    stuck, fine = asyncio.run(main())
    assert (stuck.content, stuck.error) == ("Error: timed out after 0.05 s", ToolError.timeout)
    assert fine.content == "3"
    assert cancelled == [True]


@pytest.mark.filterwarnings("ignore:tool .*. a call still runs")
def test_an_async_tool_that_ignores_its_cancellation_is_left_behind():
    async def main() -> None:
        release = asyncio.Event()

        async def stubborn() -> str:
            """Wait on."""
            while not release.is_set():
                with suppress(asyncio.CancelledError):
                    await release.wait()
            return "late"

        toolbox = box(stubborn, timeout_s=0.05)
        (result,) = await toolbox.execute([call_of("stubborn")], context_of)
        assert result.error is ToolError.timeout
        assert toolbox.stuck == ("stubborn",)
        release.set()
        while toolbox.stuck:
            await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:tool .*. a call still runs")
def test_a_stuck_thread_is_counted_replaced_and_its_late_result_discarded():
    release = threading.Event()

    def stuck(wait: bool) -> str:
        """Wait or not.

        Args:
            wait: Whether to.
        """
        if wait:
            release.wait(20)
            return "late"
        return "fresh"

    async def main() -> list[str]:
        tools = {"stuck": FunctionTool(stuck)}
        # One place only: an abandoned call must give it back.
        limits = {"stuck": ToolLimits(timeout_s=0.1, concurrency=1)}
        toolbox = Toolbox(tools, limits=limits, threads=1)
        (first,) = await toolbox.execute([call_of("stuck", wait=True)], context_of)
        assert first.error is ToolError.timeout
        assert toolbox.stuck == ("stuck",)
        (second,) = await toolbox.execute([call_of("stuck", wait=False)], context_of)
        release.set()
        while toolbox.stuck:
            await asyncio.sleep(0.001)
        (third,) = await toolbox.execute([call_of("stuck", wait=False)], context_of)
        return [first.content, second.content, third.content]

    assert asyncio.run(main()) == ["Error: timed out after 0.1 s", "fresh", "fresh"]


def test_waiting_for_a_place_is_not_the_tools_time():
    async def main() -> list[ToolError | None]:
        gate = asyncio.Event()

        async def first_waits(number: int) -> None:
            """Wait.

            Args:
                number: Whose call it is.
            """
            if number < 2:
                await gate.wait()

        toolbox = box(first_waits, timeout_s=0.1, concurrency=1)
        calls = [call_of("first_waits", i, number=i) for i in range(3)]
        # The last call waits for twice its time limit before its turn comes.
        return [r.error for r in await toolbox.execute(calls, context_of)]

    assert asyncio.run(main()) == [ToolError.timeout, ToolError.timeout, None]


def test_a_thread_that_never_ends_does_not_keep_the_process_alive():
    program = """
        import asyncio, threading
        from agenttrain.tools.config import ToolLimits
        from agenttrain.tools.tool import FunctionTool
        from agenttrain.tools.toolbox import Toolbox
        from agenttrain.types import Task, ToolCall, ToolContext

        def never() -> None:
            '''Wait for ever.'''
            threading.Event().wait()

        async def main():
            toolbox = Toolbox({"never": FunctionTool(never)}, limits={"never": ToolLimits(0.05)})
            context = ToolContext(rollout_id="r", task=None, turn=0, call_id="c")
            call = ToolCall(id="c", name="never", arguments={})
            results = await toolbox.execute([call] * 3, lambda call: context)
            print(*[result.error for result in results], len(toolbox.stuck))
            await toolbox.aclose()

        asyncio.run(main())
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "timeout timeout timeout 3\nover\n", done.stderr
    assert done.returncode == 0


def test_cancelling_the_rollout_cancels_its_calls():
    async def main() -> list[str]:
        events = []
        started = asyncio.Event()

        async def wait() -> None:
            """Wait."""
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                events.append("tool cancelled")
                raise

        rollout = asyncio.create_task(box(wait).execute([call_of("wait")], context_of))
        await started.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        await asyncio.sleep(0)
        return events

    assert asyncio.run(main()) == ["tool cancelled"]


def test_cancelling_the_rollout_abandons_its_threads():
    release, started = threading.Event(), threading.Event()

    def wait() -> None:
        """Wait."""
        started.set()
        release.wait(20)

    async def main() -> None:
        toolbox = box(wait)
        rollout = asyncio.create_task(toolbox.execute([call_of("wait")], context_of))
        while not started.is_set():
            await asyncio.sleep(0.001)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        await asyncio.sleep(0)
        assert toolbox.stuck == ("wait",)
        release.set()

    asyncio.run(main())


def test_the_context_reaches_the_tool():
    def where(context: ToolContext) -> str:
        """Tell the city."""
        return f"{context.task.columns['city']} {context.rollout_id} {context.call_id}"

    assert execute(box(where), call_of("where", 1))[0].content == "Oslo r call_0_1"


def test_schemas_in_the_order_asked_for():
    toolbox = box(add, echo, stop_tools=["echo"])
    assert toolbox.names == ("add", "echo")
    assert toolbox.stop_tools == {"echo"}
    names = [schema["function"]["name"] for schema in toolbox.schemas()]
    assert names == ["add", "echo"]
    assert toolbox.schemas(["echo"]) == [FunctionTool(echo).schema]
    assert toolbox.schemas([]) == []
    with pytest.raises(
        ValueError, match=r"tools: there is no tool 'ech' \(did you mean 'echo'\?\)"
    ):
        toolbox.schemas(["ech"])


def test_settings_of_a_tool_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"stop_tools: there is no tool 'final'"):
        box(add, stop_tools=["final"])
    with pytest.raises(ValueError, match=r"limits: there is no tool 'ad' \(did you mean 'add'\?\)"):
        Toolbox({"add": FunctionTool(add)}, limits={"ad": ToolLimits()})
    with pytest.raises(ValueError, match=r"tools.plus: the tool calls itself 'add'"):
        Toolbox({"plus": FunctionTool(add)})


def test_a_tool_that_is_no_function():
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}

    class Remote:
        def __init__(self) -> None:
            self.name = "remote"
            function = {"name": "remote", "parameters": parameters}
            self.schema = {"type": "function", "function": function}

        async def __call__(self, arguments: dict, context: ToolContext) -> object:
            return [arguments, context.turn]

    (result,) = execute(Toolbox({"remote": Remote()}), call_of("remote", n="3"))
    assert result.content == '[{"n": 3}, 0]'


def test_a_schema_that_is_none_is_refused():
    tool = FunctionTool(add)
    tool.schema["function"]["parameters"]["properties"]["a"] = {"type": "image"}
    with pytest.raises(ValueError, match=r"tools.add: its parameters are not a JSON schema"):
        Toolbox({"add": tool})


def test_aclose_closes_callable_instances():
    class Store:
        closed = False

        def __call__(self, key: str) -> str:
            """Get.

            Args:
                key: What.
            """
            return key

        def close(self) -> None:
            self.closed = True

    store = Store()
    asyncio.run(Toolbox({"store": FunctionTool(store, name="store")}).aclose())
    assert store.closed


@pytest.mark.parametrize(
    "value", [{1: "a", "1": "b"}, [{"x": {None: 1, "null": 2}}], {True: 1, "true": 2}]
)
def test_a_mapping_of_which_two_keys_have_one_text_is_refused(value: object) -> None:
    with pytest.raises(ToolFailure, match="same text"):
        result_to_text(value, max_chars=1000)


def test_a_column_of_a_table_keeps_its_labels() -> None:
    pandas = pytest.importorskip("pandas")
    prices = pandas.Series([3, 4], index=["tea", "milk"])
    assert result_to_text({"prices": prices}, max_chars=99) == '{"prices": {"tea": 3, "milk": 4}}'
    assert result_to_text(pandas.Series([3, 4]), max_chars=99) == "[3, 4]"
    with pytest.raises(ToolFailure, match="stands twice"):
        result_to_text(pandas.Series([3, 4], index=["tea", "tea"]), max_chars=99)
