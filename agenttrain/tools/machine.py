"""`python` and `bash` on a rollout's machine, made of its `exec` alone.

The machine may be a container here or a cloud back end's: what lasts between calls lies in a file
of the machine (the shell's variables) or in a process of it (the interpreter's).
"""

from __future__ import annotations

import json
from pathlib import Path

from agenttrain.tools.sandbox import repl
from agenttrain.tools.sandbox.config import SandboxSettings
from agenttrain.tools.sandbox.session import Output, check_code, join_lines
from agenttrain.types import (
    CommandResult,
    RolloutMachine,
    ToolContext,
    ToolFailure,
    ToolUnavailable,
)

STATE = "/tmp/.agenttrain"
"""Beginning of the names of files that hold what lasts between calls."""
SHELL = f"""
s={STATE}-sh
[ -f "$s" ] && . "$s"
save() {{
  {{ export -p; [ -n "$BASH_VERSION" ] && declare -f; printf 'cd -- "$PWD" 2>/dev/null\\n'; }} \\
    >"$s.new" 2>/dev/null && mv "$s.new" "$s"
}}
trap save EXIT
set -a
eval "$1" </dev/null
"""
"""Runs the code $1 with the variables, functions and folder of the last call, and saves them. With
`set -a` every variable that is set is exported, so that all of them are saved."""
CHOOSE = (
    'if command -v bash >/dev/null 2>&1; then exec bash -c "$1" bash "$2"; '
    'else exec sh -c "$1" sh "$2"; fi'
)
"""Runs the script $1 with the argument $2, in bash if the machine has it, else in sh."""
CLIENT = f"""
import array, json, os, socket, sys
request = json.load(sys.stdin)
path = "{STATE}-py-%d" % os.getuid()

def connect():
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return client

def serve(listener):
    module = {{"__name__": "agenttrain_repl"}}
    exec(compile(request["repl"], "<repl>", "exec"), module)
    import builtins, threading
    sys.argv, sys.path[0:1] = [""], [""]
    for stream in (sys.stdout, sys.stderr):  # in the order of the output of subprocesses
        stream.reconfigure(write_through=True, errors="backslashreplace")
    namespace, number = {{"__name__": "__main__", "__builtins__": builtins}}, 0
    own = os.getpid()
    while True:
        connection, _ = listener.accept()
        data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        files = array.array("i", ancillary[0][2])
        while not data.endswith(b"\\n"):
            data += connection.recv(1 << 20)
        for file, stream in zip(files, (1, 2)):
            os.dup2(file, stream)
            os.close(file)
        def watch():
            if not connection.recv(1):  # the call was ended
                os._exit(1)
        threading.Thread(target=watch, daemon=True).start()
        number += 1
        failed = module["_run_call"](json.loads(data), "<call %d>" % number, namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                pass
        if os.getpid() != own:
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        os.close(null)
        connection.sendall(b"%d" % failed)

client = None
try:
    client = connect()
except OSError:
    pass
if client is None:
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            serve(listener)
        finally:
            os._exit(1)
    os.wait()
    client = connect()
client.sendmsg(
    [(json.dumps(request["code"]) + "\\n").encode()],
    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))],
)
answer = client.recv(1)
if answer:
    client.sendall(b"x")  # the call was not ended
sys.exit({{b"": 3, b"0": 0}}.get(answer, 2))
"""
"""Sends the code to the interpreter, a process of the machine that the first call starts."""
FAILED, ENDED, MISSING = 2, 3, 127
"""Exit statuses of CLIENT: the code raised, or the interpreter ended during the call. 127 is the
status of a command that the machine does not have."""


def machine_of(context: ToolContext) -> RolloutMachine:
    """Return the rollout's machine. Raises ToolUnavailable if it has none."""
    if context.machine is None:
        raise ToolUnavailable(f"tool {context.tool}: the rollout has no container")
    return context.machine


async def run_bash(machine: RolloutMachine, code: str, settings: SandboxSettings) -> str:
    """Run shell code; return what the model reads. Raises ToolFailure and ToolUnavailable."""
    check_code(code)
    # CHOOSE runs the script SHELL with the code as its $1, in bash where the machine has it.
    result, text = await _run(machine, ["sh", "-c", CHOOSE, "sh", SHELL, code], settings)
    if result.timed_out:
        raise ToolFailure(
            join_lines(
                text,
                f"[the command ran longer than {settings.call_s:g} s and was ended; its changes of "
                "variables and folder are lost]",
            )
        )
    if result.code:
        return join_lines(text, f"[exit status {result.code}]")
    return text or "(no output)"


async def run_python(machine: RolloutMachine, code: str, settings: SandboxSettings) -> str:
    """Run Python code in the machine's interpreter, whose variables last for the rollout."""
    check_code(code)
    # CLIENT passes the code on to the interpreter, and starts it with our `repl.py` if need be.
    request = {"code": code, "repl": Path(repl.__file__).read_text(encoding="utf-8")}
    command = ["python3", "-c", CLIENT]
    result, text = await _run(machine, command, settings, json.dumps(request).encode())
    lost = "the interpreter ended; its variables are lost, files are kept"
    if result.timed_out:
        raise ToolFailure(
            join_lines(text, f"[the code ran longer than {settings.call_s:g} s; {lost}]")
        )
    if result.code == MISSING:
        raise ToolUnavailable("tool python: the image has no python3")
    if result.code == FAILED:  # the code raised, and has printed its traceback
        raise ToolFailure(text)
    if result.code:
        raise ToolFailure(join_lines(text, f"[{lost}]"))
    return text or "(no output)"


async def _run(
    machine: RolloutMachine, command: list[str], settings: SandboxSettings, stdin: bytes = b""
) -> tuple[CommandResult, str]:
    """Run a command; return its result, and its output as the model reads it."""
    output = Output(settings.max_chars)
    # `output` gets everything that is printed, so the result need not hold it too: max_bytes=1.
    result = await machine.exec(
        command, timeout_s=settings.call_s, stdin=stdin, max_bytes=1, on_output=output.add
    )
    return result, output.text()
