"""The `python` and `bash` tools: what the model reads, and how sandboxes live and end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import parts
import psutil
import pytest
from sandbox_kit import calls, each_backend, reply, usable

import agenttrain
from agenttrain.data.bundled import code
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.settings.components import code_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.sandbox import outside_process
from agenttrain.tools.sandbox.config import SandboxSettings
from agenttrain.tools.sandbox.pool import Pool, usable_backend
from agenttrain.tools.sandbox.seccomp import program
from agenttrain.tools.sandbox.session import Output
from agenttrain.tools.sandbox.tool import interpreter
from agenttrain.tools.tool import FunctionTool
from agenttrain.types import StopReason, Task, ToolCall, ToolContext, ToolFailure, ToolUnavailable


def children() -> set[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[set[psutil.Process]]:
    """No test leaves a process behind; those that were there before are not its own."""
    before = children()
    yield before
    assert children() - before == set()


TARGET = "agenttrain.tools.sandbox.tool.interpreter"


@each_backend()
def test_python_keeps_its_variables_and_shows_the_last_value(backend: str) -> None:
    replies = calls(
        backend,
        "x = 6\nprint('hello')\nx * 7",
        "x += 1\nx",
        "None",
        "_ + x",
        "def f():\n  return x",
    )
    assert replies == ["hello\n42", "7", "(no output)", "14", "(no output)"]


@each_backend()
def test_an_exception_is_a_short_traceback(backend: str) -> None:
    first, syntax, deep = calls(
        backend,
        "def half(n):\n    return n / 0\nprint('before')\nhalf(4)",
        "x = = 1",
        "def f(n):\n    return f(n + 1)\nf(0)",
    )
    assert first.splitlines()[:2] == ["Error: before", "Traceback (most recent call last):"]
    assert first.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert 'File "<call 1>", line 2, in half' in first
    assert "repl.py" not in first + syntax + deep
    assert syntax.splitlines()[-1] == "SyntaxError: invalid syntax"
    assert len(deep.splitlines()) < 30


@each_backend()
def test_bash_keeps_folder_and_variables(backend: str) -> None:
    replies = calls(
        backend,
        ("bash", "mkdir -p a && cd a && N=3 && f() { echo f$1; }"),
        ("bash", "pwd; echo $N; f 2"),
        ("bash", "cat; false"),
        ("bash", 'echo \'a b\' | tr a "\'"; echo "\n"; (exit 4)'),
        ("bash", "if"),
        ("bash", "exit 3"),
        ("bash", "ls; echo N=$N"),
    )
    assert replies[:3] == ["(no output)", "/work/a\n3\nf2", "[exit status 1]"]
    assert replies[3] == "' b\n[exit status 4]"
    assert "syntax error" in replies[4]
    assert replies[5] == (
        "Error: [the shell exited with status 3; its variables are lost, files are kept]"
    )
    assert replies[6] == "a\nN="


@each_backend()
def test_what_bash_code_defines_or_switches_on_does_not_lose_the_session(backend: str) -> None:
    shadows = "builtin command eval exec printf set shopt trap unset"
    steps = [
        ("N=3; printf() { echo mine $1; }; eval() { echo evil; }", "(no output)"),
        ("printf x; eval y", "mine x\nevil"),
        (f'for f in {shadows}; do . /dev/stdin <<<"$f() {{ echo $f; }}"; done', "(no output)"),
        ("unset N; set -e; echo $N", "unset\nset\n3"),
        (f"\\builtin unset -f {shadows}; echo $N", "3"),
        ("shopt -s expand_aliases; alias eval=exit printf=exit builtin=exit ll=pwd", "(no output)"),
        ("ll; eval 3", "Error: [the shell exited with status 3; its variables are lost, files are"),
        ("N=4; set -euvx; echo a", "++ echo a\na"),
        ("false", "[exit status 1]"),
        ("echo [$unknown]; IFS=1; set -f; false", "[]\n[exit status 1]"),
        ("IFS=; exec 0<&- 9>&-; trap 'echo bye' EXIT RETURN; set -o posix", "(no output)"),
        ("if", "bash: eval: "),
        ('echo "open', "bash: eval: "),
        ("set -a; B=1; break; return", "bash: "),
        ("env | grep -c agenttrain; unset -v PATH BASH_VERSION", "0"),
        ("trap 'N=5' DEBUG ERR; false", "[exit status 1]"),
        ("echo $N", "5"),
        ("set -e; false; echo not this", "Error: bye\n[the shell exited with status 1; its variab"),
        ("echo [$N]", "[]"),
    ]
    replies = calls(backend, *[("bash", command) for command, _ in steps])
    for (command, expected), said in zip(steps, replies, strict=True):
        shown = said.replace("/work\n", "").replace("/bin/", "")
        assert shown.startswith(expected), (command, said)


@each_backend()
def test_both_share_a_folder_and_outputs_come_in_order(backend: str) -> None:
    code = """
import os, subprocess, sys
print("one")
print("two", file=sys.stderr)
subprocess.run(["echo", "three"])
os.write(1, b"four \\xff\\n")
open("note.txt", "w").write("from python")
"""
    replies = calls(backend, code, ("bash", "cat note.txt"))
    assert replies == ["one\ntwo\nthree\nfour \ufffd\n11", "from python"]


@each_backend()
def test_a_call_that_takes_too_long_costs_the_state(backend: str) -> None:
    replies = calls(
        backend, "x = 1", "print('on')\nwhile True: pass", "'x' in globals()", call_s=0.5
    )
    assert replies[1] == (
        "Error: on\n[the code ran longer than 0.5 s. The session is ended: its variables, files "
        "and processes are lost]"
    )
    assert replies[2] == "False"


@each_backend()
def test_packages_can_be_imported(backend: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("ANSWER = 42\n")
    with pytest.raises(ValueError, match=r"^packages=.*: the sandbox's user may not read it"):
        calls(backend, "1", packages=str(tmp_path))
    tmp_path.chmod(0o755)
    found, written = calls(
        backend,
        "import mine; mine.ANSWER",
        f"open({str(tmp_path / 'x')!r}, 'w')",
        packages=str(tmp_path),
    )
    assert found == "42"
    assert written.endswith(f"OSError: [Errno 30] Read-only file system: '{tmp_path / 'x'}'")


@each_backend()
def test_code_that_is_no_text_for_a_machine(backend: str) -> None:
    replies = calls(backend, "x = 'a\0b'", "#" * 60_000, "print('\ud800' == '?', '✓')")
    assert replies[0] == "Error: the code holds a NUL character"
    assert replies[1] == "Error: the code has 60000 characters, at most 50000 are run"
    assert replies[2].endswith("✓") or "surrogates" in replies[2]


def test_output_is_cut_in_the_middle() -> None:
    output = Output(4)
    for letter in "abcdefghij":
        output.add(letter.encode())
    assert output.text() == "ab… [6 characters left out] …ij"
    # 40 bytes in all: 16 kept at either end, so 8 are gone before the characters are counted.
    output = Output(4)
    output.add(b"0123456789" * 4)
    assert output.text() == "01… [36 characters left out] …89"
    output = Output(4)
    output.add("ä".encode()[:1])
    assert output.text() == "\ufffd"


def test_the_filter_is_made_of_whole_instructions() -> None:
    for machine in ("x86_64", "aarch64"):
        lines = program(machine)
        assert {len(line) for line in lines} == {8}
        # Every jump lands on an instruction.
        for position, line in enumerate(lines):
            if line[0] & 7 == 5:  # BPF_JMP
                assert position + 1 + max(line[2], line[3]) < len(lines)
    with pytest.raises(ValueError):
        program("riscv64")


# --- life and death -----------------------------------------------------------------------------


def in_pool(run: Any, **limits: Any) -> Any:
    """Run ``run(pool)`` and leave nothing behind."""
    name = usable("required")

    async def body() -> Any:
        pool = Pool(SandboxSettings(sandbox=name, **limits), name)
        try:
            return await run(pool)
        finally:
            for rollout in [f"r{n}" for n in range(64)]:
                await pool.release(rollout)

    return asyncio.run(body())


def test_rollouts_have_a_session_each() -> None:
    async def run(pool: Pool) -> list[str]:
        await asyncio.gather(*(reply(pool, f"r{n}", "python", f"x = {n}") for n in range(12)))
        return await asyncio.gather(*(reply(pool, f"r{n}", "python", "x") for n in range(12)))

    assert in_pool(run) == [str(n) for n in range(12)]


def test_calls_of_a_rollout_at_once_run_in_order() -> None:
    async def run(pool: Pool) -> list[str]:
        codes = ["x = [1]", "x.append(2); x", "import os; os._exit(1)", "6 * 7"]
        return await asyncio.gather(*(reply(pool, "r0", "python", code) for code in codes))

    replies = in_pool(run)
    assert replies[:2] == ["(no output)", "[1, 2]"]
    assert "exited with status 1" in replies[2]
    assert replies[3] == "42"


def test_calls_that_wait_find_a_new_sandbox_after_one_that_was_ended() -> None:
    async def run(pool: Pool) -> list[str]:
        codes = ["while True: pass", "6 * 7"]
        return await asyncio.gather(*(reply(pool, "r0", "python", code) for code in codes))

    replies = in_pool(run, call_s=0.5)
    assert "longer than 0.5 s" in replies[0]
    assert replies[1] == "42"


def test_a_cancelled_call_ends_its_sandbox_and_the_next_one_says_so() -> None:
    async def run(pool: Pool) -> list[str]:
        await pool.call("r0", "python", "x = 1")
        task = asyncio.create_task(pool.call("r0", "python", "while True: pass"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [await reply(pool, "r0", "python", "'x' in globals()") for _ in range(2)]

    first, second = in_pool(run)
    assert first == (
        "[The call before took too long. The session is ended: its variables, files and processes "
        "are lost]\nFalse"
    )
    assert second == "False"


def test_a_rollout_that_is_over_ends_its_call_and_no_other() -> None:
    async def run(pool: Pool) -> list[Any]:
        await asyncio.gather(*(pool.call(f"r{n}", "python", "1") for n in range(4)))
        stopped = asyncio.create_task(pool.call("r0", "python", "while True: pass"))
        await asyncio.sleep(0.1)
        others = [
            asyncio.create_task(pool.call(f"r{n}", "python", "import time; time.sleep(0.3); 7"))
            for n in range(1, 8)  # four of them start anew, on the numbers of closed files
        ]
        await pool.release("r0")
        return [
            await asyncio.gather(stopped, return_exceptions=True),
            *await asyncio.gather(*others),
        ]

    (stopped,), *others = in_pool(run, call_s=5.0)
    assert isinstance(stopped, ToolUnavailable)
    assert others == ["7"] * 7


def test_a_sandbox_that_dies_by_itself_is_nobodys_fault(
    nothing_is_left: set[psutil.Process],
) -> None:
    async def run(pool: Pool) -> str:
        await pool.call("r0", "python", "x = 1")
        # The first process before its interpreters, of whose ends it would still tell.
        for process in sorted(children() - nothing_is_left, key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess):  # it died with the first
                process.kill()
        with pytest.raises(ToolUnavailable, match="the sandbox is broken"):
            await pool.call("r0", "python", "x")
        return await pool.call("r0", "python", "'x' in globals()")

    found = in_pool(run)
    # A retry must not pretend that the session is still there.
    assert found.startswith("[The sandbox broke down. The session is ended: its variables")
    assert found.endswith("\nFalse")


def test_sandboxes_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    name = usable("required")
    script = f"""
import asyncio, os, psutil
from agenttrain.tools.sandbox.pool import Pool
from agenttrain.tools.sandbox.config import SandboxSettings
async def main():
    pool = Pool(SandboxSettings(), {name!r})
    await pool.call("r", "bash", "setsid sleep 1000 >/dev/null 2>&1 &")
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    left = []
    for pid in ended.stdout.split():
        with suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(int(pid)))
    assert psutil.wait_procs(left, timeout=20)[1] == []


# --- as tools -----------------------------------------------------------------------------------


def context(rollout_id: str = "r") -> ToolContext:
    return ToolContext(
        rollout_id=rollout_id, task=Task(task_id="t", messages=()), turn=0, call_id="c"
    )


def test_both_tools_share_a_rollouts_sandbox() -> None:
    usable("required")

    async def run() -> list[object]:
        python, bash = (
            FunctionTool(interpreter("python")),
            FunctionTool(interpreter("bash", call_s=3.0)),
        )
        assert python.schema["function"]["parameters"]["required"] == ["code"]
        assert list(bash.schema["function"]["parameters"]["properties"]) == ["command"]
        replies = [
            await python({"code": "open('x', 'w').write('one')"}, context()),
            await bash({"command": "cat x"}, context()),
        ]
        await python.release("r")
        replies.append(await bash({"command": "ls | wc -l"}, context()))
        await python.close()
        replies.append(await bash({"command": "echo still"}, context()))
        await bash.close()
        return replies

    assert asyncio.run(run()) == ["3", "one", "0", "still"]


def test_the_toolbox_gives_up_on_a_call_and_the_run_goes_on() -> None:
    usable("required")
    tools = {"python": {"_target_": TARGET, "language": "python", "timeout_s": 0.6}}

    async def run() -> list[tuple[str, Any]]:
        toolbox = build_toolbox(tools)
        found = []
        for text in ("while True: pass", "6 * 7"):
            call = ToolCall(id="c", name="python", arguments={"code": text})
            (result,) = await toolbox.execute([call], lambda call: context())
            found.append((result.content, result.error))
        await toolbox.release("r")
        await toolbox.aclose()
        return found

    (first, error), (second, none) = asyncio.run(run())
    assert (error, none) == ("timeout", None)
    assert "0.6" in first
    assert second.startswith("[The call before took too long.") and second.endswith("\n42")


def test_a_scripted_agent_solves_a_code_task_with_it(
    nothing_is_left: set[psutil.Process],
) -> None:
    usable("required")
    row = {
        "prompt": "What is the sum of the primes from 2 to below 50?",
        "code": "sum(n for n in range(2, 50) if all(n % d for d in range(2, n)))",
    }
    tools = {
        "python": {"_target_": TARGET, "language": "python"},
        "final_answer": {"_target_": "agenttrain.tools.builtin.final_answer.final_answer"},
    }

    async def run() -> Any:
        toolbox = build_toolbox(tools, ["final_answer"])
        answers = parts.script(
            parts.call("python", '{"code": "' + row["code"] + '"}'),
            parts.call("final_answer", '{"answer": "328"}'),
        )
        rollout = await run_rollout(
            RolloutRequest(
                task=Task(task_id="t", messages=({"role": "user", "content": row["prompt"]},)),
                sampling=Sampling(seed=0),
            ),
            RolloutContext(
                engine=ScriptedEngine(answers, encode=parts.ids),
                chat=parts.chat(),
                toolbox=toolbox,
                limits=parts.LIMITS,
            ),
        )
        # The loop has released the rollout: nothing waits for the run's end.
        assert children() - nothing_is_left == set()
        await toolbox.aclose()
        return rollout

    rollout = asyncio.run(run())
    assert rollout.stop_reason is StopReason.stop_tool
    assert [result.content for result in rollout.tool_results] == ["328", "ok"]


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"language": "pyhton"}, "language='pyhton': expected one of: python, bash (did you mean"),
        ({"sandbox": "bubblewrap"}, "sandbox=bubblewrap: expected one of: required, bwrap"),
        ({"memory_mb": 16}, "memory_mb=16: must be at least 64"),
        ({"disk_mb": 600}, "disk_mb=600: more than memory_mb=512"),
        ({"processes": True}, "processes=true: expected a whole number"),
        ({"processes": "many"}, "processes=many: expected a whole number"),
        ({"processes": 3}, "processes=3: must be at least 4"),
        ({"call_s": 0}, "call_s=0: must be more than 0"),
        ({"call_s": "long"}, "call_s=long: expected a number"),
        ({"call_s": 20}, "call_s=20: not below tools.python.timeout_s=10"),
        ({"timeout_s": 4}, "call_s=8: not below tools.python.timeout_s=4"),
        ({"packages": "/no/such"}, "packages=/no/such: there is no such folder"),
    ],
)
def test_settings_that_cannot_work(given: dict[str, Any], message: str) -> None:
    config = RunConfig(tools={"python": {"_target_": TARGET, "language": "python", **given}})
    (problem,) = code_problems(config, ["tools"])
    assert problem.startswith(f"tools.python.{message}")


def test_every_setting_can_be_given() -> None:
    ours = [field.name for field in fields(SandboxSettings)]
    assert list(signature(interpreter).parameters) == ["language", *ours]


def test_without_namespaces_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no bwrap there
    usable_backend.cache_clear()
    try:
        with pytest.raises(
            ValueError,
            match=r"^sandbox=bwrap: no sandbox .*bwrap is not installed.*sandbox=none runs",
        ):
            interpreter("python", sandbox="bwrap")
    finally:
        usable_backend.cache_clear()


def test_none_says_that_it_is_no_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    interpreter("python", sandbox="none")
    assert "without a sandbox, as this user, with its files and the network" in (
        capsys.readouterr().err
    )


def test_without_a_sandbox_limits_hold_and_little_else() -> None:
    async def run() -> list[str]:
        pool = Pool(SandboxSettings(sandbox="none", call_s=2.0), "none")
        codes = ["x = bytearray(2 << 30)", "import os; os.getuid()", "while True: pass", "6 * 7"]
        replies = [await reply(pool, "r", "python", code) for code in codes]
        folder = await reply(pool, "r", "bash", "pwd")
        assert os.path.isdir(folder)
        await pool.release("r")
        assert not os.path.exists(folder)
        return replies

    replies = asyncio.run(run())
    assert replies[0].endswith("MemoryError")
    assert replies[1] == str(os.getuid())
    assert "longer than 2 s" in replies[2]
    assert replies[3] == "42"


# --- the code task ------------------------------------------------------------------------------


def test_a_sandbox_that_cannot_be_started_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        pool = Pool(SandboxSettings(sandbox="none"), "none")
        with pytest.raises(ToolUnavailable, match="No such file"):
            await pool.call("r", "python", "1")
        await pool.release("r")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(outside_process, "base_python", lambda: str(tmp_path / "python"))
    asyncio.run(fail())
    assert list(tmp_path.iterdir()) == []


def test_rows_of_the_code_task() -> None:
    rows = [code.row("test", index, 0) for index in range(300)]
    assert {row["family"] for row in rows} == {family.name for family in code.FAMILIES}
    assert rows == [code.row("test", index, 0) for index in range(300)]
    train = {code.row("train", index, 0)["messages"][0]["content"] for index in range(300)}
    assert not train & {row["messages"][0]["content"] for row in rows}
    answers = {family.name: family.answer for family in code.FAMILIES}
    assert answers["primes"](2, 12) == 2 + 3 + 5 + 7 + 11
    assert answers["digits"](4, 5) == 1  # 3**5 = 243
    # 14, 28 and 42 are divisible by 7; of the 7 multiples of 6 up to 45, 42 is.
    assert answers["multiples"](6, 45) == 6
    assert answers["reverse"](6, 7) == code.word(6, 7)[::-1]
    assert answers["sorted"](6, 7) == "".join(sorted(code.word(6, 7)))
    with pytest.raises(ValueError, match=r"^split='tets': must be one of train, tune, test"):
        code.row("tets", 0, 0)


def test_failures_are_the_models_and_not_the_runs() -> None:
    async def run(pool: Pool) -> None:
        with pytest.raises(ToolFailure):
            await pool.call("r0", "python", "1 / 0")

    in_pool(run)


@pytest.mark.slow
def test_the_code_agent_runs_with_its_sandbox(tmp_path: Path) -> None:
    usable("required")
    short = ("debug=tiny", "tracker=none", "eval.questions=0", "hydra.run.dir=mine")
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", "experiment=code", *short],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "mine/summary.json").read_text())["steps"] == 2
    lines = (tmp_path / "mine/rollouts/step-000002.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["task_id"].startswith("code/train/0/")


def test_sandboxes_need_the_standard_library_alone() -> None:
    # `-S` leaves site-packages out: what runs sandboxes as another user finds no packages there
    code = "import agenttrain.tools.sandbox.pool"
    root = str(Path(agenttrain.__file__).parents[1])
    path = {"PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
