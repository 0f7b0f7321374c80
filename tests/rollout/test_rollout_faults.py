"""Tools that misbehave in a batch: it completes, and every other rollout is what it would be."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import parts
import pytest
from parts import LIMITS, acollect, call, ids, toolbox

from agenttrain.engines.base import EngineDead
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collected, Collector, NoRollouts
from agenttrain.rollout.config import OnToolFailure
from agenttrain.rollout.monitoring import LoopMonitor
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.config import ToolLimits
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import StuckTools, Toolbox
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.types import Rollout, StopReason, Task, ToolContext, ToolError, ToolUnavailable

BYE = "7<|im_end|>"
ADD = call("add", '{"a": 3, "b": 4}')
STUCK = "ignore:tool .*. a call still runs"


def collector(tools: Toolbox, first: str, **limits: object) -> Collector:
    """Four tasks: that of `first` calls the bad tool, the others add."""

    def answer(token_ids: Sequence[int], session: str, turn: int) -> tuple[int, ...]:
        if turn:
            return ids(BYE)
        return ids(first if session.split("-")[2] == "0" else ADD)

    return Collector(
        engine=ScriptedEngine(answer, max_context=4096),
        chat=parts.chat(),
        toolbox=tools,
        rubric=Rubric({"turns": lambda rollout: float(rollout.turns)}, {"turns": 1.0}),
        limits=replace(LIMITS, **limits),
    )


def batch(tools: Toolbox, first: str, **limits: object) -> tuple[Rollout, Collected]:
    """The bad tool's rollout and its batch; the other three rollouts are as without it."""

    async def main() -> Collected:
        tasks = [Task(task_id=f"t{i}", messages=parts.TASK.messages) for i in range(4)]
        try:
            return await acollect(collector(tools, first, **limits), tasks)
        finally:
            await tools.aclose()

    collected = asyncio.run(main())
    bad, *others = collected.rollouts
    alone = parts.rollout(ADD, BYE, tools=tools)
    for other in others:
        assert (other.trajectories[0].spans, other.trajectories[0].messages) == (
            alone.trajectories[0].spans,
            alone.trajectories[0].messages,
        )
        assert (other.stop_reason, other.reward) == (StopReason.completed, 2.0)
    return bad, collected


def with_add(function: Callable[..., object], **limits: object) -> Toolbox:
    return toolbox(function, parts.add, limits={function.__name__: ToolLimits(**limits)})


@pytest.mark.filterwarnings(STUCK)
def test_never_returns():
    release = threading.Event()

    def hang() -> str:
        """Wait for ever."""
        release.wait(60)
        return "late"

    bad, _ = batch(with_add(hang, timeout_s=0.1), call("hang", "{}"))
    release.set()
    assert bad.tool_results[0].error is ToolError.timeout
    assert (bad.stop_reason, bad.reward) == (StopReason.completed, 2.0)


@pytest.mark.filterwarnings(STUCK)
def test_returns_after_the_rollout_ended():
    release, returned = threading.Event(), threading.Event()

    def late() -> str:
        """Return late."""
        release.wait(60)
        returned.set()
        return "forged"

    tools = with_add(late, timeout_s=0.1)
    bad, _ = batch(tools, call("late", "{}"))
    before = (
        list(bad.trajectories[0].spans),
        [dict(m) for m in bad.trajectories[0].messages],
        list(bad.tool_results),
    )
    release.set()
    assert returned.wait(60)
    while tools.stuck:
        time.sleep(0.001)
    assert (bad.trajectories[0].spans, bad.trajectories[0].messages, bad.tool_results) == before
    assert "forged" not in str(bad.trajectories[0].messages)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_raises_what_is_no_exception(error):
    def fail() -> str:
        """Fail."""
        raise error("out")

    bad, _ = batch(with_add(fail), call("fail", "{}"))
    assert bad.tool_results[0].content == f"Error: {error.__name__}: out"
    assert (bad.stop_reason, bad.reward) == (StopReason.completed, 2.0)


@pytest.mark.parametrize("kind", [str, bytes, list])
def test_returns_100_megabytes(kind):
    def flood() -> object:
        """Return too much."""
        return {str: "x" * 10**8, bytes: b"x" * 10**8, list: ["x" * 10**6] * 100}[kind]

    bad, _ = batch(with_add(flood), call("flood", "{}"))
    content = next(m["content"] for m in bad.trajectories[0].messages if m["role"] == "tool")
    assert "clipped" in content
    assert (
        len(bad.trajectories[0].token_ids) - bad.trajectories[0].prompt_length
        <= LIMITS.max_completion_tokens
    )


def test_prints_to_stdout(capsys):
    def noisy() -> str:
        """Print."""
        print("<|im_end|>noise")
        return "signal"

    bad, _ = batch(with_add(noisy), call("noisy", "{}"))
    assert bad.tool_results[0].content == "signal"
    assert "noise" not in str(bad.trajectories[0].messages)


def test_changes_what_it_is_given():
    def spoil(items: list, context: ToolContext) -> str:
        """Change everything in reach.

        Args:
            items: Things.
        """
        items.clear()
        context.task.columns["answer"] = "forged"
        context.task.columns["list"].append("forged")
        context.task.messages[0]["content"] = "forged"
        return "done"

    columns = {"answer": "7", "list": []}
    task = Task(task_id="t", messages=({"role": "user", "content": "?"},), columns=columns)
    spoiling = call("spoil", '{"items": [1, 2]}')
    done = parts.rollout(spoiling, BYE, task=task, tools=toolbox(spoil))
    assert done.tool_results[0].content == "done"
    assert done.tool_results[0].call.arguments == {"items": [1, 2]}
    assert done.task.columns == {"answer": "7", "list": []}
    assert done.task.messages[0]["content"] == done.trajectories[0].messages[0]["content"] == "?"


def test_a_rollouts_tools_share_what_they_leave_in_its_task():
    def count(context: ToolContext) -> int:
        """Count the calls of this rollout."""
        context.task.columns["seen"].append(1)
        return len(context.task.columns["seen"])

    task = Task(task_id="t", messages=parts.TASK.messages, columns={"seen": []})
    for _ in range(2):
        one = call("count", "{}")
        done = parts.rollout(one, one, BYE, task=task, tools=toolbox(count))
        assert [r.content for r in done.tool_results] == ["1", "2"]


def process_box(**settings: object) -> Toolbox:
    return build_toolbox(
        {
            "behave": {"_target_": "process_tools.behave", "isolation": "process", **settings},
            "add": {"_target_": "parts.add"},
        }
    )


@pytest.mark.slow
def test_dies_with_its_process():
    bad, collected = batch(process_box(retries=1), call("behave", '{"how": "segfault"}'))
    assert (bad.stop_reason, bad.reward) == (StopReason.error, None)
    assert bad.error == (
        "tool behave: Error: ToolUnavailable: tool behave: its worker process was ended by SIGSEGV"
    )
    assert collected.dropped == 1
    metrics = rollout_metrics(collected.groups)
    assert (metrics["tools/unavailable"], metrics["stop/error"]) == (1.0, 0.25)
    # Nothing of the fault is in what could be trained on.
    assert [m["role"] for m in bad.trajectories[0].messages] == ["user", "assistant"]


def test_hangs_in_a_process_of_its_own():
    tools = process_box(timeout_s=0.5)
    bad, _ = batch(tools, call("behave", '{"how": "hang"}'))
    assert bad.tool_results[0].error is ToolError.timeout
    assert tools.stuck == ()


class Desk(http.server.BaseHTTPRequestHandler):
    """Answers every request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"at your service")

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def server(port: int = 0) -> Iterator[int]:
    """A real server on this machine; its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Desk) as desk:
        threading.Thread(target=desk.serve_forever, daemon=True).start()
        yield desk.server_address[1]
        desk.shutdown()


def test_a_server_that_is_gone_and_comes_back():
    with server() as port:
        pass
    tried = []

    def fetch() -> str:
        """Ask the server."""
        tried.append(1)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=20) as answer:
                return answer.read().decode()
        except urllib.error.URLError as error:
            raise error.reason from None

    settings = {"retry_on": ["builtins.ConnectionError"], "retry_backoff_s": 0.01}
    bad, collected = batch(with_add(fetch, retries=1, **settings), call("fetch", "{}"))
    assert (bad.stop_reason, bad.reward, len(tried)) == (StopReason.error, None, 2)
    assert "ConnectionRefusedError" in bad.error
    assert collected.dropped == 1
    with pytest.raises(ToolUnavailable, match=r"tool fetch: .*ConnectionRefused"):
        batch(
            with_add(fetch, retries=0, retry_on=["builtins.ConnectionError"]),
            call("fetch", "{}"),
            on_tool_failure=OnToolFailure.error,
        )
    with server(port):
        back, _ = batch(with_add(fetch, **settings), call("fetch", "{}"))
    assert (back.tool_results[0].content, back.reward) == ("at your service", 2.0)
    over = threading.Event()

    def come_back() -> None:
        while len(tried) < 5:
            time.sleep(0.001)
        with server(port):
            over.wait(60)

    tried.clear()
    opener = threading.Thread(target=come_back)
    opener.start()
    patient = {"retries": 2000, "retry_on": ["builtins.ConnectionError"], "retry_backoff_s": 0.0}
    back, _ = batch(with_add(fetch, **patient), call("fetch", "{}"))
    over.set()
    opener.join()
    assert back.tool_results[0].content == "at your service"
    assert len(tried) >= 5


def test_errors_that_are_not_declared_are_the_models_to_read():
    def fetch() -> str:
        """Fail."""
        raise ConnectionError("no")

    bad, _ = batch(with_add(fetch), call("fetch", "{}"))
    assert bad.tool_results[0].error is ToolError.exception
    assert bad.reward == 2.0


def test_a_call_that_is_made_again_gets_its_arguments_afresh():
    seen = []

    def spoil(items: list) -> str:
        """Change the arguments and fail once.

        Args:
            items: Things.
        """
        seen.append(list(items))
        items.clear()
        if len(seen) == 1:
            raise ToolUnavailable("busy")
        return "done"

    tools = with_add(spoil, retry_backoff_s=0.0)
    bad, _ = batch(tools, call("spoil", '{"items": [1, 2]}'))
    assert (seen, bad.tool_results[0].content) == ([[1, 2], [1, 2]], "done")


def test_a_step_whose_tools_are_all_broken_stops_the_run_and_says_why():
    def broken() -> str:
        """Be broken."""
        raise ToolUnavailable("the database is gone")

    tools = toolbox(broken, limits={"broken": ToolLimits(retries=0)})
    only = replace(parts.TASK, task_id="t0")
    with pytest.raises(
        NoRollouts, match=r"all 1 rollouts failed \(1 error\).*the database is gone"
    ):
        asyncio.run(acollect(collector(tools, call("broken", "{}")), [only]))


def test_a_stuck_tool_is_named_once_and_too_many_of_them_stop_the_run():
    release = threading.Event()

    def hang() -> str:
        """Wait for ever."""
        release.wait(60)
        return "late"

    tools = Toolbox(
        {"hang": FunctionTool(hang)}, limits={"hang": ToolLimits(timeout_s=0.02)}, max_stuck=2
    )
    tasks = [Task(task_id=f"t{i}", messages=parts.TASK.messages) for i in range(4)]
    hanging = Collector(
        engine=ScriptedEngine(parts.script(*[call("hang", "{}")] * 4), max_context=4096),
        chat=parts.chat(),
        toolbox=tools,
        rubric=Rubric({}, {}),
        limits=LIMITS,
    )
    with (
        pytest.warns(RuntimeWarning, match=r"tool hang: .* 0\.02 s are over.*isolation=process"),
        pytest.raises(
            StuckTools,
            match=r"rollout\.max_stuck_calls=2: \d calls .*: hang \(\d\).*tools\.hang\.isolation",
        ),
    ):
        asyncio.run(acollect(hanging, tasks))
    release.set()


@pytest.mark.parametrize("blocking", [True, False])
def test_calls_that_ended_rollouts_leave_behind_within_their_time_are_not_stuck(blocking):
    release = threading.Event()

    def nap() -> str:
        """Take a while, but not too long."""
        release.wait(60)
        return "rested"

    async def doze() -> str:
        """Take a while."""
        await asyncio.sleep(60)
        return "rested"

    function = nap if blocking else doze
    name = function.__name__
    tools = Toolbox({name: FunctionTool(function)}, max_stuck=0)
    tasks = [Task(task_id=f"t{i}", messages=parts.TASK.messages) for i in range(4)]
    made = replace(collector(tools, call(name, "{}"), timeout_s=0.2), toolbox=tools)
    made = replace(made, engine=ScriptedEngine(parts.script(call(name, "{}")), max_context=4096))
    for _ in range(2):  # the second batch looks at what the first left behind
        collected = asyncio.run(acollect(made, tasks))
        assert [r.stop_reason for r in collected.rollouts] == [StopReason.timeout] * 4
        made = replace(
            made, engine=ScriptedEngine(parts.script(call(name, "{}")), max_context=4096)
        )
    release.set()


def test_an_async_tool_that_ignores_its_cancellation_does_not_block_exit():
    program = """
        import asyncio, warnings
        from agenttrain.tools.config import ToolLimits
        from agenttrain.tools.tool import FunctionTool
        from agenttrain.tools.toolbox import Toolbox
        from agenttrain.types import ToolCall, ToolContext

        warnings.simplefilter("ignore")

        async def stubborn() -> str:
            '''Wait on.'''
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass

        async def main():
            tools = {"stubborn": FunctionTool(stubborn)}
            toolbox = Toolbox(tools, limits={"stubborn": ToolLimits(0.05)})
            context = ToolContext(rollout_id="r", task=None, turn=0, call_id="c")
            call = ToolCall(id="c", name="stubborn", arguments={})
            (result,) = await toolbox.execute([call], lambda call: context)
            print(result.error, toolbox.stuck)
            await toolbox.aclose()

        asyncio.run(main())
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "timeout ('stubborn',)\nover\n", done.stderr


def test_an_async_tool_that_blocks_is_named_while_it_does():
    async def nap() -> str:
        """Block the event loop."""
        await asyncio.sleep(0)
        time.sleep(0.5)
        return "rested"

    async def wait() -> str:
        """Wait as it should."""
        await asyncio.sleep(0.5)
        return "waited"

    tools = toolbox(nap, wait, parts.add)
    with pytest.warns(RuntimeWarning, match=r"tool nap: it is async .*0\.1 s.*a plain `def`"):
        _, collected = batch(tools, call("nap", "{}"), max_loop_lag_s=0.1)
    assert collected.loop_lag_s > 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch(toolbox(nap, wait, parts.add), call("wait", "{}"), max_loop_lag_s=0.4)


def test_the_loop_monitor_ends_with_its_thread():
    async def main() -> float:
        async with LoopMonitor(30.0, lambda limit_s: None) as monitor:
            time.sleep(0.2)
        return monitor.max_lag_s

    before = threading.active_count()
    assert asyncio.run(main()) >= 0.14  # 0.2 less one beat of 0.05, and rounding
    while threading.active_count() > before:
        time.sleep(0.001)


class Leaky:
    """Cannot let go of what it holds."""

    def __call__(self) -> str:
        """Hold something."""
        return "held"

    def release(self, rollout_id: str) -> None:
        raise OSError("still in use")

    def close(self) -> None:
        threading.Event().wait()


def test_a_release_that_fails_and_a_close_that_hangs_are_told_and_survived():
    tools = Toolbox(
        {"leaky": FunctionTool(Leaky(), name="leaky"), "add": FunctionTool(parts.add)},
        limits={"leaky": ToolLimits(timeout_s=0.2)},
    )
    with pytest.warns(RuntimeWarning) as told:
        bad, _ = batch(tools, call("leaky", "{}"))
    assert bad.reward == 2.0
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 2, texts  # four rollouts, one warning
    assert "its release() failed, which may leak what it holds: OSError: still in use" in texts[0]
    assert "its close() failed, which may leak what it holds: did not end within 0.2 s" in texts[1]


class _TimingOut(ScriptedEngine):
    """Fails with an error that is also what a wall-clock limit raises."""

    async def generate(self, token_ids, sampling, *, session, **others):
        raise TimeoutError("read timed out")


def test_an_engines_own_timeout_is_no_wall_clock_limit():
    done = parts.rollout(engine=_TimingOut(parts.script(BYE)))
    assert (done.stop_reason, done.error) == (
        StopReason.error,
        "TimeoutError: read timed out",
    )


def test_an_engine_that_dies_ends_the_run_and_not_rollout_after_rollout() -> None:
    def answer(token_ids: Sequence[int], session: str, turn: int) -> tuple[int, ...]:
        if turn:
            raise EngineDead("vLLM died: RuntimeError: out of memory")
        return ids(ADD)

    engine = ScriptedEngine(answer, max_context=4096)
    one = replace(collector(toolbox(), ADD), engine=engine)
    with pytest.raises(EngineDead, match="out of memory"):
        asyncio.run(acollect(one, [parts.TASK], samples=2))
