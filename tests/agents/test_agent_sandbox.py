"""What an agent's program can do and read in its sandbox, and what it cannot."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.sandbox import check_sandbox, sandbox_command

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None,
    reason="bubblewrap is not installed; apt install bubblewrap, then scripts/test -k sandbox",
)
PROBE = """
import ctypes, errno, json, os, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def outcome(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
def syscall(*arguments):
    return "done" if libc.syscall(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
def read(path):
    kind = os.stat(path).st_mode
    if stat.S_ISSOCK(kind):
        return socket.socket(socket.AF_UNIX).connect(path)
    if stat.S_ISFIFO(kind):
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return os.listdir(path) if stat.S_ISDIR(kind) else open(path).read()
"""
PROBE_CALLS = {"x86_64": {"unshare": 272, "mount": 165}, "aarch64": {"unshare": 97, "mount": 40}}


def settings(*command: str, **more: Any) -> AgentConfig:
    return AgentConfig(name="endpoint", command=list(command), sandbox="bwrap", **more)


def printed(config: AgentConfig) -> Any:
    """The JSON that the program of a sandbox prints."""
    command = [*sandbox_command(config), *config.command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, with a project in it, in which the run is started."""
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "project")
    return home


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def script(text: str) -> str:
    return f"#!{sys.executable}\n{text}"


def test_an_agent_has_no_privileges_and_cannot_change_the_kernel(home: Path) -> None:
    core = Path("/proc/sys/kernel/core_pattern")
    before = core.read_bytes()
    numbers = PROBE_CALLS[os.uname().machine]
    program = f"""{PROBE}
state = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({{
    "user": [os.getuid(), os.getgid()],
    "capabilities": [int(state[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "filter": [int(state["NoNewPrivs"]), int(state["Seccomp"])],
    "core_pattern": outcome(os.open, "{core}", os.O_WRONLY),
    "user_namespace": syscall({numbers["unshare"]}, 0x10000000),
    "mount": syscall({numbers["mount"]}, b"none", b"/tmp", b"tmpfs", 0, 0),
    "outside": outcome(os.listdir, "/proc/1/root"),
    "sys": outcome(os.listdir, "/sys"),
}}))
"""
    seen = printed(settings(sys.executable, str(write(home / "project/agent.py", program))))
    assert 0 not in seen.pop("user")
    assert seen.pop("core_pattern") in ("EACCES", "EROFS")
    assert seen == {
        "capabilities": [0, 0, 0, 0],
        "filter": [1, 2],
        "user_namespace": "EPERM",
        "mount": "EPERM",
        "outside": "EACCES",
        "sys": "ENOENT",
    }
    assert core.read_bytes() == before


def test_the_home_is_an_empty_folder_of_its_own(home: Path) -> None:
    write(home / "letter.txt", "dear")
    program = f"""{PROBE}
home = os.path.expanduser("~")
before = os.listdir(home)
open(home + "/note", "w").write("mine")
open("/tmp/note", "w").write("mine")
print(json.dumps([home, before, outcome(open, "note", "w"), os.listdir(".")]))
"""
    seen = printed(settings(sys.executable, str(write(home / "project/agent.py", program))))
    assert seen == [str(home), ["project"], "EROFS", ["agent.py"]]
    assert sorted(os.listdir(home)) == ["letter.txt", "project"]
    assert not os.path.exists("/tmp/note")


SECRETS = (
    *(".ssh/id_ed25519", ".aws/credentials", ".netrc", ".config/agenttrain/key", ".npmrc"),
    *(".config/gh/hosts.yml", ".cache/huggingface/token", ".bash_history", ".python_history"),
    *(".git-credentials", ".docker/config.json", ".kube/config", ".local/share/keyrings/login"),
)


def test_a_sandbox_starts_under_limits_that_are_lower_than_its_own(home: Path) -> None:
    program = "import json, resource as r; print(json.dumps(r.getrlimit(r.RLIMIT_CORE)))"
    config = settings(sys.executable, "-c", program)
    lowered = [
        "sh",
        "-c",
        'ulimit -c 0; exec "$@"',
        "sh",
        *sandbox_command(config),
        *config.command,
    ]
    done = subprocess.run(lowered, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[0, 0]\n", "")


def test_keys_tokens_and_histories_are_absent_from_all_that_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [write(home / name, "secret", 0o600) for name in SECRETS]
    secrets.append(write(home / "project/.env", "TOKEN=secret"))
    dotfiles = home / "dotfiles"
    secrets.append(write(dotfiles / "pypirc", "secret"))
    (home / ".pypirc").symlink_to(dotfiles / "pypirc")
    secrets.append(write(home / "keys/own", "secret"))
    monkeypatch.setenv("AGENTTRAIN_KEY", str(home / "keys/own"))
    plain = [
        write(home / ".config/tool/settings", "plain"),
        write(dotfiles / "vimrc", "plain"),
        write(home / "keys/public", "plain"),
        write(home / "private/notes/one", "plain"),
    ]
    (home / "private").chmod(0o700)
    program = write(
        home / "project/agent.py",
        f"{PROBE}\nprint(json.dumps([outcome(read, path) for path in json.loads(sys.argv[1])]))",
    )
    paths = [str(path) for path in (*secrets, *plain)]
    shown = ["~/.config", "~/.cache", "~/dotfiles", "~/keys", "~/private/notes", "~/.docker"]
    shown.append("~/.local/share")
    seen = printed(settings(sys.executable, str(program), json.dumps(paths), read=shown))
    assert seen == ["ENOENT"] * len(secrets) + ["plain"] * len(plain)


def test_sockets_and_pipes_of_the_machine_lead_nowhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, elsewhere = tmp_path / "shown", tmp_path / "elsewhere"
    paths = []
    opened: list[Any] = []
    for folder in (shown, elsewhere, home / "project"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)  # the path of a socket is short
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].bind("service")
        opened[-1].listen()
        os.mkfifo("pipe")
        opened.append(os.fdopen(os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)))
        for name in ("service", "pipe"):
            os.chmod(name, stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
            paths.append(str(folder / name))
    write(shown / "text", "plain")
    paths.append(str(shown / "text"))
    program = write(
        home / "project/agent.py",
        f"{PROBE}\nos.chdir('/tmp')\n"
        "print(json.dumps([outcome(read, path) for path in json.loads(sys.argv[1])]))",
    )
    config = settings(sys.executable, str(program), json.dumps(paths), read=[str(shown)])
    try:
        assert printed(config) == [
            *("ECONNREFUSED", "ENXIO", "ENOENT", "ENOENT", "ECONNREFUSED", "ENXIO"),
            "plain",
        ]
    finally:
        for thing in opened:
            thing.close()


def node(home: Path) -> str:
    """nvm: a package of npm, whose program is a link to a script of node."""
    prefix = home / ".nvm/versions/node/v22"
    write(prefix / "bin/node", f'#!/bin/sh\nexec {sys.executable} "$@"\n', 0o755)
    package = prefix / "lib/node_modules/my-agent"
    write(
        package / "cli.js",
        "#!/usr/bin/env node\nfrom pathlib import Path\n"
        "print(Path(__file__).resolve().with_name('data.json').read_text())",
        0o755,
    )
    write(package / "data.json", '["nvm"]')
    (prefix / "bin/my-agent").symlink_to("../lib/node_modules/my-agent/cli.js")
    return str(prefix / "bin")


def npm(home: Path) -> str:
    """npm's global folder, whose scripts are run by a node in another one."""
    package = home / ".npm-global/lib/node_modules/@me/my-agent"
    write(package / "cli.js", "#!/usr/bin/env -S node\nprint('[\"npm\"]')", 0o755)
    (home / ".npm-global/bin").mkdir()
    (home / ".npm-global/bin/my-agent").symlink_to("../lib/node_modules/@me/my-agent/cli.js")
    folder = node(home)
    os.unlink(f"{folder}/my-agent")
    return f"{home}/.npm-global/bin:{folder}"


def pyenv(home: Path) -> str:
    """pyenv: a shim that asks for the version."""
    root = home / ".pyenv"
    shim = f'#!/usr/bin/env bash\nexec "{root}/libexec/pyenv" exec "$@"\n'
    write(root / "shims/my-agent", shim, 0o755)
    write(root / "libexec/pyenv", f"#!/bin/sh\nexec {root}/versions/3.12/bin/my-agent\n", 0o755)
    write(root / "versions/3.12/bin/my-agent", script("print('[\"pyenv\"]')"), 0o755)
    return str(root / "shims")


def pipx(home: Path) -> str:
    """pipx: a link into a virtual environment beside others' data, behind a linked folder."""
    real = home / "disk/venvs/my-agent/bin/my-agent"
    write(real, script("print('[\"pipx\"]')"), 0o755)
    (home / ".local/share").mkdir(parents=True)
    (home / ".local/share/pipx").symlink_to(home / "disk")
    (home / ".local/bin").mkdir()
    link = home / ".local/bin/my-agent"
    link.symlink_to(home / ".local/share/pipx/venvs/my-agent/bin/my-agent")
    return str(home / ".local/bin")


def single(home: Path) -> str:
    """A program in the home itself, beside everything else."""
    write(
        home / "my-agent", script("import os\nprint(f'[\"{len(os.listdir(os.curdir))}\"]')"), 0o755
    )
    return str(home)


@pytest.mark.parametrize(
    ("install", "answer"),
    [(node, "nvm"), (npm, "npm"), (pyenv, "pyenv"), (pipx, "pipx"), (single, "1")],
)
def test_programs_below_the_home_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, install: Any, answer: str
) -> None:
    write(home / ".ssh/id", "secret")
    folders = install(home)
    monkeypatch.setenv("PATH", f"{folders}:{os.environ['PATH']}")
    if install is single:
        monkeypatch.chdir(home)  # which is not shown, but for the program
    assert printed(settings("my-agent")) == [answer]


def test_what_cannot_be_shown_is_refused_before_an_agent_starts(home: Path) -> None:
    write(home / ".ssh/id", "secret")
    for path, word in {
        "~": "home",
        str(home.parent): "home",
        "~/.ssh": "keys",
        "~/missing": "no such",
        "/etc": "system",
    }.items():
        with pytest.raises(ValueError, match=rf"^agent\.read: {path}: .*{word}"):
            check_sandbox(settings("true", read=[path]))
    with pytest.raises(ValueError, match=r"agent\.read=\['data'\]: without a sandbox"):
        AgentConfig(name="endpoint", command=["true"], read=["data"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only agents of root have another user")
def test_a_script_that_the_sandbox_s_user_cannot_read_is_refused(home: Path) -> None:
    path = write(home / "project/agent.py", "", 0o600)
    with pytest.raises(ValueError, match=r"^agent\.command: .*agent\.py: .*chmod o\+r it"):
        check_sandbox(settings("python", str(path)))


def test_a_sandbox_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"^agent\.sandbox=bwrap: bubblewrap is not installed"):
        check_sandbox(settings("true"))
