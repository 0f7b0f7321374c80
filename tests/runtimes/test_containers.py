"""Containers as rollouts use them: commands, limits, failures, and nothing left."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import container_kit
import parts
import psutil
import pytest
from container_kit import IMAGE, make_image, needs_containers, ours, task

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.runtimes.base import MachineLost
from agenttrain.runtimes.containers import Container
from agenttrain.runtimes.machines import Machines
from agenttrain.tools.build import build_toolbox
from agenttrain.types import Rollout, StopReason

pytestmark = needs_containers
TOOLS = {
    "bash": {
        "_target_": "agenttrain.tools.sandbox.tool.interpreter",
        "language": "bash",
        "sandbox": "runtime",
    },
    "files": {"_target_": "agenttrain.tools.builtin.files.Files"},
}


@pytest.fixture(scope="module", autouse=True)
def image() -> Iterator[None]:
    make_image()
    yield
    assert ours() == []


@asynccontextmanager
async def machine(**changes: Any) -> AsyncIterator[Container]:
    """One container, removed at the end."""
    pool = container_kit.machines(**changes)
    try:
        started = await pool.start("r", task())
        assert isinstance(started, Container)
        yield started
    finally:
        await pool.release("r")
        await pool.aclose()


async def rollout(pool: Machines, *answers: str, rollout_id: str = "r", **row: Any) -> Rollout:
    """One rollout of the loop, with `bash` and `files` in its container."""
    toolbox = build_toolbox(TOOLS)
    context = RolloutContext(
        engine=ScriptedEngine([parts.ids(answer) for answer in answers]),
        chat=parts.chat(),
        toolbox=toolbox,
        limits=parts.LIMITS,
        machines=pool,
    )
    try:
        return await run_rollout(
            RolloutRequest(task=task(**row), sampling=Sampling(), rollout_id=rollout_id), context
        )
    finally:
        await toolbox.aclose()


def replies(done: Rollout) -> list[str]:
    return [m["content"] for m in done.trajectories[0].messages if m["role"] == "tool"]


def bash(command: str) -> str:
    return parts.call("bash", f'{{"command": "{command}"}}')


def test_a_command_gets_input_variables_and_folder_and_gives_output_and_code() -> None:
    async def work() -> None:
        async with machine() as box:
            script = 'echo "$A"; pwd; cat; echo problem >&2; exit 3'
            result = await box.exec(
                ["sh", "-c", script], timeout_s=10, stdin=b"in\n", env={"A": "it's"}, cwd="/tmp"
            )
            assert (result.code, result.text) == (3, "it's\n/tmp\nin\nproblem\n")
            long = "x" * 100_000
            result = await box.exec(["echo", long], timeout_s=10, max_bytes=10)
            assert result.size == 100_001
            assert result.text == "xxxxx\n[... 99991 bytes left out ...]\nxxxx\n"
            missing = await box.exec(["no-such-program"], timeout_s=10)
            assert missing.code == 127
            together = [box.exec(["sh", "-c", f"sleep 1; echo {n}"], timeout_s=10) for n in "123"]
            start = time.monotonic()
            assert [r.text for r in await asyncio.gather(*together)] == ["1\n", "2\n", "3\n"]
            assert time.monotonic() - start < 2.5  # one after the other would take 3

    asyncio.run(work())


def test_another_user_s_command_and_variables_go_by_the_client(
    fault: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "a secret")

    async def work() -> None:
        async with machine(env=["OWN"]) as box:
            script = 'echo "$OWN,$A,$B"; id -u; cat; exit 125'
            env = {"A": "it's # x", "B": "two\nlines"}
            result = await box.exec(
                ["sh", "-c", script], timeout_s=30, user="1000", env=env, stdin=b"in"
            )
            assert (result.code, result.text) == (125, "a secret,it's # x,two\nlines\n1000\nin")
            assert result.size == len(result.output)
            assert "a secret" not in fault.with_name("log").read_text()
            assert "it's" not in fault.with_name("log").read_text()
            fault.write_text("gone")
            with pytest.raises(MachineLost, match="cannot connect to the daemon"):
                await box.exec(["true"], timeout_s=30, user="1000")
            fault.write_text("")

    asyncio.run(work())


def test_a_command_that_takes_too_long_ends_with_its_descendants() -> None:
    async def work() -> None:
        async with machine() as box:
            result = await box.exec(["sh", "-c", "sleep 987 & echo a; sleep 987"], timeout_s=0.5)
            assert (result.timed_out, result.code, result.text) == (True, 137, "a\n")
            assert "987" not in (await box.exec(["ps"], timeout_s=10)).text

    asyncio.run(work())


def test_files_go_in_and_out(tmp_path: Path) -> None:
    async def work() -> None:
        async with machine() as box:
            source = tmp_path / "source"
            (source / "below").mkdir(parents=True)
            (source / "below" / "run.sh").write_text("echo ran\n")
            (source / "below" / "run.sh").chmod(0o700)
            await box.copy_in(source, "/made/for/it")
            result = await box.exec(["/made/for/it/below/run.sh"], timeout_s=10)
            assert result.text == "ran\n"
            assert await box.copy_out("/made/for", tmp_path / "out")
            assert (tmp_path / "out/it/below/run.sh").read_text() == "echo ran\n"
            assert not await box.copy_out("/nothing", tmp_path / "none")
            # A link of the container's leads to the container's own file, or nowhere.
            await box.exec(["ln", "-s", "/etc/shadow", "/made/link"], timeout_s=10)
            with pytest.raises(MachineLost, match="cannot be unpacked"):
                await box.copy_out("/made", tmp_path / "links")

    asyncio.run(work())


def test_tools_of_a_rollout_share_its_container_and_rows_bring_their_image() -> None:
    async def work() -> None:
        pool = container_kit.machines(image=None)
        write = parts.call("write_file", '{"path": "/tmp/a", "content": "seven"}')
        done = await rollout(
            pool,
            write,
            bash("cat /tmp/a; x=5; cd /tmp"),
            bash("echo $x; pwd"),
            "It is 7.<|im_end|>",
            image=IMAGE,
        )
        assert done.stop_reason is StopReason.completed
        assert replies(done) == ["wrote 5 characters to /tmp/a", "seven", "5\n/tmp"]
        failed = await rollout(pool, "It is 7.<|im_end|>", image="localhost/not/there:1")
        assert failed.stop_reason is StopReason.error
        assert "this machine does not have it" in str(failed.error)
        await pool.aclose()

    asyncio.run(work())


def test_an_agents_program_reaches_the_endpoint_and_nothing_else(tmp_path: Path) -> None:
    script = (
        'b=\'{"model":"policy","messages":[{"role":"user","content":"hi"}]}\'; '
        'wget -q -O- --header "Authorization: Bearer $OPENAI_API_KEY" '
        '--header "Content-Type: application/json" --post-data "$b" '
        '"$OPENAI_BASE_URL/chat/completions" | grep -o "It is 7."; '
        "nc -w 2 169.254.169.254 80 </dev/null && echo reached; "
        "ip -o link | wc -l; echo '{\"reward\": 0.25}'"
    )

    async def work() -> None:
        pool = container_kit.machines()
        agents = Agents(
            AgentConfig(name="endpoint", command=["sh", "-c", script]),
            parts.chat(),
            tmp_path,
            machines=pool,
        )
        request = RolloutRequest(task=task(), sampling=Sampling(), rollout_id="rollout")
        engine = ScriptedEngine([parts.ids("It is 7.<|im_end|>")])
        done = await agents.attempt(request, engine, parts.LIMITS)
        await agents.aclose()
        await pool.aclose()
        printed = (tmp_path / "rollout.stdout").read_text()
        assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.25), printed
        assert printed.startswith("It is 7.\n")
        assert "reached" not in printed
        assert "\n1\n" in printed  # the loopback interface alone

    asyncio.run(work())


def test_an_agent_whose_container_does_not_start_frees_its_place(tmp_path: Path) -> None:
    async def work() -> None:
        pool = container_kit.machines(image="localhost/not/there:1", retries=0)
        settings = AgentConfig(name="endpoint", command=["true"])
        agents = Agents(settings, parts.chat(), tmp_path, machines=pool)
        request = RolloutRequest(task=task(), sampling=Sampling(), rollout_id="rollout")
        engine = ScriptedEngine([])
        done = await agents.attempt(request, engine, parts.LIMITS)
        assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
        assert "this machine does not have it" in str(done.error)
        assert engine.released == ["rollout"]  # else other rollouts of a lockstep would wait
        await agents.aclose()
        await pool.aclose()

    asyncio.run(work())


def test_an_agent_is_installed_once_in_the_image_of_its_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "install.sh"
    script.write_text(
        f"echo {time.time()} > /made\n"  # another image each time
        "printf '#!/bin/sh\\necho \"$KEY $OTHER\"' > /bin/my-agent\n"
        "chmod 755 /bin/my-agent\n"
    )
    for name in ("KEY", "OTHER"):
        monkeypatch.setenv(name, name.lower())
    made = []

    async def work() -> None:
        for number in range(2):  # two runs share the image
            pool = Machines(container_kit.settings(), install=str(script))
            await pool.prepare([task()])
            settings = AgentConfig(name="endpoint", command=["my-agent"], env=["KEY"])
            agents = Agents(settings, parts.chat(), tmp_path, machines=pool)
            request = RolloutRequest(task=task(), sampling=Sampling(), rollout_id=f"r{number}")
            await agents.attempt(request, ScriptedEngine([]), parts.LIMITS)
            await agents.aclose()
            await pool.aclose()
            made.extend(pool._images.values())

    asyncio.run(work())
    assert (tmp_path / "r0.stdout").read_text() == "key \n"
    assert (tmp_path / "r1.stdout").read_text() == "key \n"
    assert len(set(made)) == 1
    assert capsys.readouterr().err.count("building") == 1
    container_kit.podman("rmi", made[0])


def test_an_allowlist_opens_its_hosts_and_no_others() -> None:
    """A server of the host answers as `localhost`, which the list names, and as nothing else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.write(f"HTTP/1.1 200 OK\r\n\r\n{head.splitlines()[0]}".encode())
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with machine(network="allowlist", hosts=["localhost"]) as box:

            async def send(*lines: str) -> str:
                text = "".join(f"{line}\r\n" for line in lines)
                command = 'nc -w 1 127.0.0.1 "${http_proxy##*:}"'
                result = await box.exec(["sh", "-c", command], timeout_s=20, stdin=text.encode())
                return result.text

            plain = await send(f"GET http://localhost:{port}/a?b=c HTTP/1.1", "")
            assert plain == "HTTP/1.1 200 OK\r\n\r\nGET /a?b=c HTTP/1.1"
            tunnel = await send(f"CONNECT localhost:{port} HTTP/1.1", "", "GET /t HTTP/1.1", "")
            assert tunnel.endswith("\r\n\r\nGET /t HTTP/1.1")
            for other in ("127.0.0.1", "evil.localhost", "169.254.169.254"):
                for line in (
                    f"GET http://{other}:{port}/ HTTP/1.1",
                    f"CONNECT {other}:80 HTTP/1.1",
                ):
                    assert (await send(line, "")).startswith(f"HTTP/1.1 403 Forbidden: {other} ")
            links = await box.exec(["sh", "-c", "ip -o link | wc -l"], timeout_s=20)
            assert links.text == "1\n"  # the loopback interface alone
        server.close()

    asyncio.run(work())


ESCAPES = {
    "root file system of the host": ("ls /proc/1/root/work /proc/1/cwd/work", "No such file"),
    "mount": ("mount -t tmpfs none /tmp", "denied|not permitted"),
    "bind mount": ("mount --bind /proc /tmp", "denied|not permitted"),
    "remount of our folder": ("mount -o remount,rw /.agenttrain", "denied|not permitted"),
    "write to our folder": ("echo x > /.agenttrain/x", "Read-only"),
    "make a device": ("mknod /tmp/sda b 8 0", "not permitted"),
    "raw disk": ("cat /dev/vda", "No such file|denied|can't open"),
    "kernel memory": ("head -c1 /dev/mem", "No such file|can't open"),
    "core pattern": ("echo x > /proc/sys/kernel/core_pattern", "Read-only|denied|nonexistent"),
    "sysrq": ("echo b > /proc/sysrq-trigger", "Read-only|denied|nonexistent"),
    "hostname": ("hostname evil", "not permitted|denied"),
    "kernel log": ("dmesg", "not permitted"),
    "clock": ("date -s 2000-01-01", "not permitted|can't set"),
    "chroot": ("chroot /tmp /bin/true", "not permitted"),
    "change of user": ("su nobody -c id", "not permitted|can't set|must be|unknown user"),
    "another user namespace": ("unshare -U true", "not permitted|denied|No space"),
    "another network": ("unshare -n true", "not permitted|denied"),
    "processes of the host": ("ls -d /proc/[0-9]* | wc -l", r"^[1-9]$"),
    "kill the first process": ("kill -9 1; sleep 0.2; echo alive", "alive"),
    "trace the first process": ("cat /proc/1/environ | tr '\\0' '\\n' | grep -c SECRET", "^0$"),
    "network interfaces": ("ip -o link | wc -l", "^1$"),
    "metadata address": (
        "nc -w 2 169.254.169.254 80 </dev/null; echo $?",
        "unreachable|can't connect",
    ),
    "private addresses": ("nc -w 2 10.0.0.1 80 </dev/null", "unreachable|can't connect"),
    "services of the host": ("nc -w 2 127.0.0.1 22 </dev/null", "refused"),
    "packet sockets": ("ping -c1 -W1 127.0.0.1", "denied|not permitted|are you root"),
    "cgroup limits": (
        "echo -1 > /sys/fs/cgroup/memory/memory.limit_in_bytes",
        "Read-only|denied|nonexistent",
    ),
    "podman's socket": ("ls /run/podman/podman.sock /var/run/docker.sock", "No such file"),
    "capabilities": ("grep CapEff /proc/self/status", "0000000000000000"),
    "new privileges": ("grep NoNewPrivs /proc/self/status", r"1$"),
    "seccomp": ("grep ^Seccomp: /proc/self/status", r"2$"),
}
"""Attempt -> (command, what its output must hold)."""


def test_escapes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    assert len(ESCAPES) == 30

    async def work() -> None:
        async with machine() as box:
            for name, (command, expected) in ESCAPES.items():
                result = await box.exec(["sh", "-c", command], timeout_s=20)
                assert re.search(expected, result.text.strip()), (name, result.text)

    asyncio.run(work())


def test_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def work() -> None:
        async with machine(memory_mb=64, processes=32) as box:
            bomb = "f() { f | f & }; f; sleep 1; ls -d /proc/[0-9]* | wc -l"
            await box.exec(["sh", "-c", bomb], timeout_s=3)
            # Descendants whose parents have ended are background processes: they stay in the limit.
            number = sum(1 for p in Path("/proc").glob("[0-9]*") if _inside(p, box.pid))
            assert number <= 32
        async with machine(memory_mb=64) as box:
            result = await box.exec(
                ["sh", "-c", "tail /dev/zero; echo $?"], timeout_s=30, max_bytes=100
            )
            assert "137" in result.text  # killed by the kernel
            assert not [*tmp_path.iterdir()]
        async with machine(disk_mb=8) as box:
            fill = "dd if=/dev/zero of=/tmp/a bs=1M count=64"
            await box.exec(["sh", "-c", fill], timeout_s=30)
            assert os.path.getsize(f"{box.upper}/tmp/a") <= 8 << 20
            more = "for i in 1 2 3 4; do head -c 4000000 /dev/zero > /tmp/$i; done; sleep 20"
            with pytest.raises(MachineLost, match=r"runtime\.disk_mb=8"):
                await box.exec(["sh", "-c", more], timeout_s=30)
        async with machine(user="1000") as box:
            result = await box.exec(["sh", "-c", "id -u; echo x > /etc/passwd"], timeout_s=10)
            assert result.text.startswith("1000\n")
            assert "denied" in result.text

    asyncio.run(work())


def test_a_container_whose_files_cannot_be_measured_is_named_once() -> None:
    async def work() -> None:
        async with machine(disk_mb=8) as box:
            box.upper = "/proc/self/status"  # no folder, as of another storage driver
            with pytest.warns(RuntimeWarning, match="cannot be read") as caught:
                await asyncio.sleep(2.5)  # it is measured each second
            assert len(caught) == 1
            assert (await box.exec(["true"], timeout_s=10)).code == 0

    asyncio.run(work())


def _inside(process: Path, pid: int) -> bool:
    try:
        return os.readlink(process / "ns/pid") == os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return False


def test_rollouts_see_no_files_and_processes_of_each_other() -> None:
    async def work() -> None:
        pool = container_kit.machines()
        first, second = await pool.start("a", task()), await pool.start("b", task())
        await first.exec(["sh", "-c", "echo secret > /tmp/mine; sleep 765 &"], timeout_s=10)
        seen = await second.exec(["sh", "-c", "ls /tmp; ps"], timeout_s=10)
        assert "mine" not in seen.text
        assert "765" not in seen.text
        await pool.aclose()

    asyncio.run(work())


CLIENT = """#!/bin/sh
# The real podman, unless the file FAULT says otherwise.
fault=$(cat {fault} 2>/dev/null)
echo "$@" >> {log}
case "$fault $1" in
  "start run") echo "cannot start" >&2; exit 125;;
  "hang run") sleep 60;;
  "late run") sleep 1; {podman} "$@"; echo "started $?" >> {log}; exit;;
  "gone "*) echo "cannot connect to the daemon" >&2; exit 125;;
esac
exec {podman} "$@"
"""
FEW_FAILURES = {"start": 4, "hang": 4, "gone": 4, "dies": 3, "stops": 3, "full": 2}
MANY_FAILURES = {"start": 50, "hang": 50, "gone": 60, "dies": 14, "stops": 13, "full": 13}
"""Failure of the client, or of a container that runs -> rollouts that meet it."""
FILL = "while :; do head -c 4000000 /dev/zero >> /tmp/a; head -c 4000000 /dev/zero >> /tmp/b; done"


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that makes the client fail in the way that it names."""
    real, folder = shutil.which("podman"), tmp_path / "bin"
    folder.mkdir()
    file = tmp_path / "fault"
    client = folder / "podman"
    client.write_text(CLIENT.format(fault=file, log=tmp_path / "log", podman=real))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return file


@pytest.mark.parametrize(
    "failures", [FEW_FAILURES, pytest.param(MANY_FAILURES, marks=pytest.mark.long)]
)
def test_no_failure_of_the_infrastructure_becomes_a_reward(
    fault: Path, failures: dict[str, int]
) -> None:
    """Rollouts that fail end as `error`, without a reward and with nothing left."""

    async def failing(pool: Machines, kind: str, number: int) -> Rollout:
        name = f"{kind}-{number}"

        async def strike() -> None:
            while (box := pool.machine_of(name)) is None:
                await asyncio.sleep(0.02)
            assert isinstance(box, Container)
            await asyncio.sleep(0.1)
            os.kill(box.pid, signal.SIGKILL if kind == "dies" else signal.SIGSTOP)

        striking = asyncio.ensure_future(strike()) if kind in ("dies", "stops") else None
        try:
            command = bash(FILL) if kind == "full" else bash("sleep 3")
            answers = [command, bash("true"), bash("true"), "It is 7.<|im_end|>"]
            return await rollout(pool, *answers, rollout_id=name)
        finally:
            if striking is not None:  # not done where the container never started
                striking.cancel()

    async def work() -> None:
        done: list[Rollout] = []
        for kind, number in failures.items():
            pool = container_kit.machines(
                start_timeout_s=1.0 if kind == "hang" else 60.0,
                retries=0,
                max_starting=50 if kind == "hang" else 4,
                disk_mb=8 if kind == "full" else 32,
                memory_mb=256,  # more than `full` writes: unwritten pages count as memory too
            )
            fault.write_text(kind)
            done += await asyncio.gather(*(failing(pool, kind, n) for n in range(number)))
            fault.write_text("")
            await pool.aclose()
        assert len(done) == sum(failures.values())
        outcomes = {(r.stop_reason, r.reward, r.environment_reward) for r in done}
        assert outcomes == {(StopReason.error, None, None)}
        assert all(r.grades == {} and r.error for r in done)
        full = [r.error or "" for r in done if r.rollout_id.startswith("full")]
        assert all("runtime.disk_mb=8" in error for error in full), full

    asyncio.run(work())


FEW_KILLS, MANY_KILLS = (8, 8), (*(8,) * 20, 64, 64)
"""Containers at once in each killed process."""


@pytest.mark.parametrize("kills", [FEW_KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.long)])
def test_nothing_is_left_of_killed_processes(kills: tuple[int, ...]) -> None:
    """Kill processes at random instants, every second one together with its reaper."""
    stranger = container_kit.start_stranger()
    chance = random.Random(7)
    pids = []
    try:
        for number, count in enumerate(kills):
            process = _busy_process(count)
            assert process.stdout is not None
            process.stdout.readline()  # one has started; the others may be anywhere
            time.sleep(chance.uniform(0.0, 3.0))
            _kill(process, with_reaper=bool(number % 2))
            pids.append(process.pid)
        _wait_until_nothing_is_left(*pids)
        assert container_kit.is_running(stranger)
    finally:
        container_kit.remove(stranger)


def test_a_container_that_starts_after_its_run_has_died_ends_by_itself(fault: Path) -> None:
    """The client goes on when the run and its reaper are killed; no later run helps here."""
    fault.write_text("late")
    log = fault.with_name("log")
    process = _busy_process(1)
    while not (log.exists() and "run --detach" in log.read_text()):
        time.sleep(0.02)
    _kill(process, with_reaper=True)
    assert "started" not in log.read_text()
    while "started" not in log.read_text():
        time.sleep(0.1)
    _wait_until_nothing_is_left(process.pid)


def _busy_process(count: int) -> subprocess.Popen[bytes]:
    """Start a process with `count` containers at once, which says when one has started."""
    script = Path(container_kit.__file__).with_name("container_process.py")
    return subprocess.Popen([sys.executable, str(script), str(count)], stdout=subprocess.PIPE)


def _kill(process: subprocess.Popen[bytes], *, with_reaper: bool) -> None:
    if with_reaper:
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.NoSuchProcess):  # a client that has just ended
                if any("reaper.py" in word for word in child.cmdline()):
                    child.kill()
    process.kill()
    process.wait()


def _wait_until_nothing_is_left(*processes: int) -> None:
    deadline = time.monotonic() + 90
    while ours(*processes) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert ours(*processes) == []


def test_the_next_start_removes_what_a_dead_process_left(tmp_path: Path) -> None:
    from agenttrain.runtimes.leftovers import is_left, machine_id, own_prefix

    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    left = f"agenttrain-{machine_id()}-{dead.stdout.strip()}-123abcd-0"
    alien = "agenttrain-00000000-1-1-0"  # of another machine
    for name in (left, alien):
        container_kit.start_stranger("--name", name, "--label", "agenttrain.run=x")
    assert is_left(left)
    assert not is_left(alien)
    assert not is_left(f"{own_prefix()}0")

    async def work() -> None:
        async with machine():
            assert left not in container_kit.labelled()
            assert alien in container_kit.labelled()

    try:
        asyncio.run(work())
    finally:
        container_kit.remove(alien)
