"""Tools with isolation=process: killed in time, replaced, and gone with their parent."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import process_tools
import psutil
import pytest

from agenttrain.runtimes.base import MachineSpec
from agenttrain.runtimes.local import LocalRuntime
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.config import Isolation, ToolLimits
from agenttrain.tools.isolation import ProcessTool
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Task, ToolCall, ToolContext, ToolError, ToolResult

TASK = Task(task_id="t", messages=(), columns={"city": "Oslo", "lock": threading.Lock()})
PLAIN = Task(task_id="t", messages=(), columns={"city": "Oslo"})


def box(name: str, **settings: object) -> Toolbox:
    section = {"_target_": f"process_tools.{name}", "isolation": "process", **settings}
    return build_toolbox({name.lower(): section})


async def ask(
    toolbox: Toolbox, *, rollout_id: str = "r", task: Task = PLAIN, **arguments: object
) -> ToolResult:
    call = ToolCall(id="c", name=toolbox.names[0], arguments=arguments)
    context = ToolContext(rollout_id=rollout_id, task=task, turn=0, call_id="c")
    (result,) = await toolbox.execute([call], lambda _: context)
    return result


def session(toolbox: Toolbox, *calls: dict[str, object]) -> list[ToolResult]:
    """The results of calls, one after the other; nothing runs when they are over."""

    async def main() -> list[ToolResult]:
        try:
            return [await ask(toolbox, **call) for call in calls]
        finally:
            await toolbox.aclose()

    mine = set(psutil.Process().children(recursive=True))
    results = asyncio.run(main())
    assert set(psutil.Process().children(recursive=True)) <= mine
    return results


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def marked(marker: str) -> list[psutil.Process]:
    """The living processes whose environment or command line holds a text."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            texts = [*process.cmdline(), *process.environ().values()]
            if marker in " ".join(texts) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def commands(processes: list[psutil.Process]) -> list[list[str]]:
    """The command lines of those that have not ended since they were listed."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            lines.append(process.cmdline())
    return lines


@pytest.fixture
def marker(monkeypatch) -> str:
    """A text in the environment of every process that is started from here on."""
    text = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("PROCESS_TEST_MARKER", text)
    return text


@pytest.mark.parametrize("name", ["add", "async_add"])
def test_calls_sync_and_async_functions(name):
    (result,) = session(box(name), {"a": "1", "b": 2})
    assert (result.content, result.error) == ("3", None)


def test_a_worker_is_another_process_and_is_used_again():
    first, second = session(box("pid"), {}, {})
    assert first.content == second.content != str(os.getpid())


def test_what_a_tool_does_in_a_worker_is_told_to_the_model():
    cases = {
        "raise": ("Error: KeyboardInterrupt: by the tool", ToolError.exception),
        "fail": ("Error: no such table", ToolError.exception),
        "stdin": ("nothing", None),
        "noise": ("quiet", None),
    }
    results = session(box("behave"), *({"how": how} for how in cases))
    assert [(r.content, r.error) for r in results] == list(cases.values())


def test_the_parents_terminal_sees_nothing_of_what_a_worker_prints(capfd):
    session(box("behave"), {"how": "noise"})
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_done_and_huge_results_cross_the_border_cut():
    done, huge = session(box("behave"), {"how": "done"}, {"how": "huge"})
    assert (done.content, done.done) == ("over", True)
    assert huge.content == "x" * 2_000_000 + "… [cut at 2000000 characters]"


def test_a_call_that_hangs_is_killed_with_all_it_started_and_its_worker_replaced(marker):
    async def main() -> None:
        toolbox = box("behave", timeout_s=1.0, retries=0)
        fine = await ask(toolbox, how="fine")
        asked = asyncio.create_task(ask(toolbox, how="child"))
        while not any("sleep(600)" in part for line in commands(marked(marker)) for part in line):
            await asyncio.sleep(0.01)
        first = marked(marker)
        late = await asked
        again = await ask(toolbox, how="fine")
        assert (fine.content, late.error, again.content) == ("fine", ToolError.timeout, "fine")
        assert toolbox.stuck == ()
        wait_for(lambda: not set(first) & set(marked(marker)))
        await toolbox.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "worker process ended with exit code 3; it printed: last words"),
        ("segfault", "worker process was ended by SIGSEGV"),
        ("unavailable", "ToolUnavailable: the server is gone"),
    ],
)
def test_a_worker_that_dies_is_a_fault_of_the_infrastructure(how, words):
    broken, fine = session(box("behave", retries=0), {"how": how}, {"how": "fine"})
    assert broken.error is ToolError.unavailable
    assert words in broken.content
    assert fine.content == "fine"


def test_a_tool_that_forks_answers_once():
    results = session(box("behave"), {"how": "fork"}, {"how": "one"}, {"how": "two"})
    assert [r.content for r in results] == ["once", "one", "two"]


def test_declared_errors_are_retried(tmp_path):
    toolbox = box("flaky", retry_on=["builtins.ConnectionError"], retries=2, retry_backoff_s=0.01)
    file = str(tmp_path / "calls")
    (result,) = session(toolbox, {"file": file, "failures": 2})
    assert (result.content, result.error) == ("3", None)


def test_objects_in_workers_are_told_of_the_end_of_rollouts_and_of_the_run(tmp_path):
    log = tmp_path / "log"

    async def main() -> None:
        toolbox = box("Notebook", log=str(log))
        replies = [await ask(toolbox, rollout_id=rollout) for rollout in ("a", "b", "a")]
        assert [r.content for r in replies] == ["Oslo 1", "Oslo 1", "Oslo 2"]
        await toolbox.release("a")
        await toolbox.release("never called")
        await toolbox.aclose()

    asyncio.run(main())
    # The last line is of the object in this process, which no rollout has used.
    assert log.read_text().splitlines() == ["release a 2", "close 1", "close 0"]


def test_columns_that_cannot_be_sent_are_named(tmp_path):
    async def main() -> ToolResult:
        toolbox = box("Notebook", log=str(tmp_path / "log"), retries=0)
        result = await ask(toolbox, task=TASK)
        await toolbox.aclose()
        return result

    result = asyncio.run(main())
    assert result.error is ToolError.unavailable
    assert "tool notebook: isolation=process cannot send what it needs: cannot pickle" in (
        result.content
    )


@pytest.mark.slow
def test_there_are_at_most_as_many_workers_as_calls_at_once():
    async def main() -> None:
        toolbox = box("slow", concurrency=2)
        results = await asyncio.gather(*(ask(toolbox, seconds=0.01) for _ in range(7)))
        assert [r.content for r in results] == ["done"] * 7
        assert toolbox.tool("slow").workers == 2
        await toolbox.aclose()
        assert toolbox.tool("slow").workers == 0

    asyncio.run(main())


def test_cancelling_a_call_kills_its_worker():
    async def main() -> None:
        toolbox = box("behave")
        call = asyncio.create_task(ask(toolbox, how="hang"))
        while not toolbox.tool("behave").workers:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert toolbox.tool("behave").workers == 0
        await toolbox.aclose()

    mine = set(psutil.Process().children(recursive=True))
    asyncio.run(main())
    wait_for(lambda: set(psutil.Process().children(recursive=True)) <= mine)


def test_a_worker_process_gets_no_machine():
    """A container's connection belongs to the run's event loop, and cannot be sent."""

    async def main() -> None:
        toolbox = box("has_machine", retries=0)
        machine = await LocalRuntime().start(MachineSpec(image="x"))
        machine.lock = threading.Lock()  # as a container's, it cannot be pickled
        call = ToolCall(id="c", name="has_machine", arguments={})
        context = ToolContext(rollout_id="r", task=PLAIN, turn=0, call_id="c", machine=machine)
        (result,) = await toolbox.execute([call], lambda _: context)
        await toolbox.aclose()
        await machine.stop()
        assert (result.error, result.content) == (None, "false")

    asyncio.run(main())


WAYS_OUT = ["start_new_session", "setpgid", "setsid", "double fork", "orphans of orphans"]


@pytest.mark.slow
def test_what_left_the_process_group_ends_with_a_call_that_hangs(marker):
    async def main() -> None:
        # Long enough for all workers to start on a busy machine.
        toolbox = box("leave", timeout_s=10.0, retries=0)
        hanging = [asyncio.create_task(ask(toolbox, way=way, then="hang")) for way in WAYS_OUT]
        while sum("sleep" in line for line in commands(marked(marker))) < len(WAYS_OUT) + 3:
            await asyncio.sleep(0.01)
        late = await asyncio.gather(*hanging)
        assert [result.error for result in late] == [ToolError.timeout] * len(WAYS_OUT)
        wait_for(lambda: marked(marker) == [])
        await toolbox.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("then", ["exit", "return"])
def test_what_left_the_process_group_ends_with_its_worker(then, marker):
    async def main() -> None:
        toolbox = box("leave", retries=0)
        for way in WAYS_OUT:
            await ask(toolbox, way=way, then=then)
            if then == "return":  # a server that one call starts serves the next
                wait_for(lambda: any("sleep" in c for c in commands(marked(marker))))
            else:
                wait_for(lambda: marked(marker) == [])
        await toolbox.aclose()
        assert marked(marker) == []

    asyncio.run(main())


def test_a_worker_whose_keeper_is_killed_ends(marker):
    async def main() -> None:
        toolbox = box("leave", retries=0)
        result = await ask(toolbox, way="none", then="kill parent")
        assert result.error is ToolError.unavailable
        assert "was ended by SIGKILL" in result.content
        wait_for(lambda: marked(marker) == [])
        await toolbox.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["kill", "return"])
def test_workers_end_with_their_parent_even_in_the_middle_of_a_call(end, marker):
    program = f"""
        import asyncio, os, time
        from agenttrain.tools.build import build_toolbox
        from agenttrain.types import Task, ToolCall, ToolContext

        section = {{"_target_": "process_tools.leave", "isolation": "process"}}
        toolbox = build_toolbox({{"leave": section}})
        context = ToolContext(rollout_id="r", task=None, turn=0, call_id="c")

        async def main():
            for way in {[*WAYS_OUT, "none"]!r}:
                arguments = {{"way": way, "then": "hang" if way == "none" else "return"}}
                call = ToolCall(id="c", name="leave", arguments=arguments)
                calls = asyncio.ensure_future(toolbox.execute([call], lambda call: context))
                if way != "none":
                    await calls
            await asyncio.sleep(0.2)
            library = os.fork()  # of a library: it holds the files of its parent for ever
            if library == 0:
                time.sleep(600)
            print(library, flush=True)
            if {end!r} == "kill":
                await asyncio.sleep(600)
            os._exit(0)

        asyncio.run(main())
    """
    path = os.pathsep.join([str(Path(process_tools.__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    library = int(parent.stdout.readline())
    try:
        if end == "kill":
            parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        wait_for(lambda: [process.pid for process in marked(marker)] == [library])
    finally:
        os.kill(library, signal.SIGKILL)


def test_what_cannot_be_moved_to_another_process_is_refused():
    with pytest.raises(ValueError, match=r"own_kind\.isolation=process: Remote is a tool of its"):
        box("own_kind")
    with pytest.raises(ValueError, match=r"tools\.add\.isolation=process: .* runs in this process"):
        Toolbox(
            {"add": FunctionTool(process_tools.add)},
            limits={"add": ToolLimits(isolation=Isolation.process)},
        )


def test_a_worker_that_cannot_build_its_tool_says_why():
    def make() -> FunctionTool:
        return FunctionTool(process_tools.add)

    async def main(make: Callable[[], object]) -> ToolResult:
        limits = ToolLimits(retries=0)
        toolbox = Toolbox({"add": ProcessTool("add", make, limits)}, limits={"add": limits})
        result = await ask(toolbox, a=1, b=2)
        await toolbox.aclose()
        return result

    limits = asyncio.run(main(make))
    assert limits.error is ToolError.unavailable
    assert (
        "isolation=process cannot send what it needs: Can't pickle local object" in (limits.content)
        or "Can't get local object" in limits.content
    )
    here = os.getpid()
    result = asyncio.run(main(functools.partial(process_tools.only_in, here)))
    assert f"cannot be built in a worker: made for process {here}" in result.content
