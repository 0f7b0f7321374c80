"""Runs of several processes, which are real ones over gloo: one folder, and one end for all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from command_kit import parse

from agenttrain.launch.config import DistributedConfig, DistributedName
from agenttrain.launch.processes import (
    accelerate_problems,
    adopt,
    adopt_and_check_processes,
    is_later_node,
    missing_peers_problem,
    node_rank,
    resolve,
)
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.tracking.names import depends_on_clock
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import FAILED, INTERRUPTED, PREEMPTED, REFUSED
from agenttrain.utils.temporary import PREFIX

ROOT = Path(__file__).parents[2]
TINY = ("debug=tiny", "tracker=none", "eval.questions=0")
TWO = ("distributed=ddp", "distributed.processes=2")
HANGS = 800
"""Seconds that only a run that hangs needs."""
pytestmark = pytest.mark.timeout(4 * HANGS)


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "kit")])
    fixed = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **fixed, **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agenttrain.cli", *arguments]


def torchrun(*arguments: str) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return [sys.executable, *start, "-m", "agenttrain.cli", *arguments]


def done(
    arguments: list[str], cwd: Path, first: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command's end; none of its processes outlives it. `first` on its PYTHONPATH, if any."""
    own = environment()
    if first:
        own["PYTHONPATH"] = os.pathsep.join([str(first), own["PYTHONPATH"]])
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env=own,
    ) as process:
        try:
            out, err = process.communicate(timeout=HANGS)
        finally:
            kill_left(cwd)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def kill_left(cwd: Path) -> None:
    """Kill the processes of a folder, some of which may be ending by themselves."""
    for left in of_folder(cwd):
        with suppress(psutil.NoSuchProcess):
            left.kill()


def of_folder(cwd: Path) -> Iterator[psutil.Process]:
    """The processes whose current folder it is."""
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(cwd) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def rewarded_by(name: str) -> tuple[str, str]:
    return "reward=[]", f"+reward.r._target_=process_rewards.{name}"


def summary(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what a clock says."""
    return [
        {name: value for name, value in json.loads(line).items() if not depends_on_clock(name)}
        for line in (folder / "metrics.jsonl").open()
    ]


@pytest.mark.slow
def test_two_processes_make_one_run(tmp_path):
    end = done(command(*TINY, *TWO, "eval.questions=2", "hydra.run.dir=run"), tmp_path)
    assert end.returncode == 0, end.stderr
    run = tmp_path / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    found = summary(run)
    assert (found["status"], found["steps"], found["processes"]) == ("finished", 2, 2)
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert end.stdout.count("after/greedy: reward") == 1
    assert end.stdout.count(f"train in {run}") == end.stdout.count(f"run        {run}") == 1
    for step in (1, 2):
        lines = (run / "rollouts" / f"step-00000{step}.jsonl").read_text().splitlines()
        # 2 tasks x 2 rollouts, each rank one task
        assert sorted(json.loads(line)["rollout_id"] for line in lines) == [
            f"train-{step}-{task}-{sample}" for task in (0, 1) for sample in (0, 1)
        ]
    assert (run / "logs" / "rank-1.log").exists()
    assert (run / "checkpoints" / "latest" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    overrides = (*TINY, *TWO, "steps=3", *rewarded_by("killed"))
    end = done(command(*overrides, "hydra.run.dir=run"), tmp_path)
    assert end.returncode == FAILED
    run = tmp_path / "run"
    assert "agenttrain: rank 1 (process " in end.stderr
    assert f"was ended by SIGKILL (its log: {run / 'logs' / 'rank-1.log'})" in end.stderr
    assert f"To go on: agenttrain resume={run}" in end.stderr
    found = summary(run)
    assert found["status"] == "failed"
    assert str(found["error"]).startswith("rank 1 (process ")


@pytest.mark.long
def test_a_run_whose_rank_was_killed_goes_on_exactly(tmp_path):
    overrides = (*TINY, *TWO, "steps=3", *rewarded_by("killed"))
    assert done(command(*overrides, "hydra.run.dir=run"), tmp_path).returncode == FAILED
    end = done(command("resume=run"), tmp_path)
    assert end.returncode == 0, end.stderr
    # `done` is there now, so that nobody is killed.
    assert done(command(*overrides, "hydra.run.dir=whole"), tmp_path).returncode == 0
    assert summary(tmp_path / "run")["status"] == "finished"
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert len({row["loss"] for row in rows(tmp_path / "run")}) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("interrupted", INTERRUPTED, "interrupted"),
        pytest.param("terminated", PREEMPTED, "preempted", marks=pytest.mark.long),
        pytest.param("hung_up", PREEMPTED, "preempted", marks=pytest.mark.long),
        pytest.param("faulty", FAILED, "failed", marks=pytest.mark.long),
        pytest.param("hung", FAILED, "failed", marks=pytest.mark.long),
        ("abandoned", -9, "failed"),
    ],
)
def test_all_processes_end_together(tmp_path, name, code, status):
    limit = "distributed.timeout_s=20"  # for the one that hangs
    overrides = (*TINY, *TWO, limit, "steps=50", *rewarded_by(name), "hydra.run.dir=run")
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's would be
    with subprocess.Popen(
        command(*overrides), stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    ) as process:
        try:
            # Until all have closed it, those that were started in a session of their own too.
            said = process.communicate(timeout=HANGS)[1]
            left = list(of_folder(tmp_path))
            psutil.wait_procs(left, timeout=60)
            assert [each for each in left if each.is_running()] == []
        finally:
            signal.signal(signal.SIGHUP, inherited)
            kill_left(tmp_path)
    assert process.returncode == code, said
    found = summary(tmp_path / "run")
    assert found["status"] == status
    if name == "faulty":
        assert "rank 1: LookupError: a bug of rank 1" in said
        assert "LookupError: a bug of rank 1" in str(found["error"])
    if name == "hung_up":
        assert "stopped by SIGHUP with checkpoints/step-000001; to go on: " in said
    if name == "hung":
        assert "rank 1" in str(found["error"])


IN_AN_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn" and "AGENTTRAIN_EXCHANGE" in os.environ:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.long
def test_a_signal_while_workers_import_torch_is_a_preemption(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(IN_AN_IMPORT)
    ended = done(command(*TINY, *TWO, "hydra.run.dir=run"), tmp_path, first=tmp_path)
    assert ended.returncode == PREEMPTED, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_a_killed_launcher_leaves_no_temporary_folder(tmp_path):
    run, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    launcher = subprocess.Popen(
        command(*TINY, *TWO, "steps=1000", "hydra.run.dir=run"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment(TMPDIR=str(temporary)),
    )
    try:
        while not (run / "metrics.jsonl").exists():
            assert launcher.poll() is None
            time.sleep(0.1)
        assert len([*temporary.glob(f"{PREFIX}*")]) == 1
        launcher.kill()
        launcher.wait()
        while [*of_folder(tmp_path)]:
            time.sleep(0.1)
    finally:
        kill_left(tmp_path)
    assert [*temporary.glob(f"{PREFIX}*")] == []


@pytest.mark.long
def test_torchrun_starts_one_run(tmp_path):
    end = done(torchrun(*TINY, "steps=1", "hydra.run.dir=run"), tmp_path)
    assert end.returncode == 0, end.stderr
    assert end.stdout.count(f"train in {tmp_path / 'run'}") == 1
    found = summary(tmp_path / "run")
    assert (found["status"], found["processes"]) == ("finished", 2)
    assert len((tmp_path / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()) == 4

    end = done(torchrun(*TINY, "distributed=ddp", "distributed.processes=3"), tmp_path)
    assert end.stderr.count("distributed.processes=3: 2 processes were started") == 1
    assert f"exitcode  : {REFUSED} " in end.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.long
def test_two_nodes_meet(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = (
        *(*TINY, "steps=1", "distributed=ddp", "distributed.processes=1", "distributed.nodes=2"),
        f"distributed.rendezvous=127.0.0.1:{port}",
    )
    nodes = [
        subprocess.Popen(
            command(*overrides, f"hydra.run.dir=of_node_{node}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment(SLURM_NODEID=str(node)),
        )
        for node in (1, 0)
    ]
    try:
        said = [node.communicate(timeout=HANGS)[0] for node in nodes]
    finally:
        kill_left(tmp_path)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [path.name for path in tmp_path.iterdir()] == ["of_node_0"]
    assert summary(tmp_path / "of_node_0")["processes"] == 2


def composed(*overrides: str):
    with hydra_session(Source()):
        return compose_run(open_keys(overrides), Source())


def run_ranks(folder: Path, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Start each command as a rank, as torchrun does; return exit code, stdout and stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment(RANK=str(rank), **meeting),
        )
        for rank, line in enumerate(commands)
    ]
    try:
        printed = [rank.communicate(timeout=HANGS) for rank in ranks]
    finally:
        kill_left(folder)
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, printed, strict=True)]


AGREED = """
import torch.distributed as dist

from agenttrain.launch.ranks import Proposal, agree, share
from agenttrain.launch.worker import leave
from agenttrain.training.world import World


def run():
    agree(World.start(timeout_s=60), Proposal(settings={"seed": 0}, folder="run"))
    dist.destroy_process_group()  # as vLLM does when an engine of several processes closes
    return 0


code = share(run)
leave(7 if dist.is_initialized() else code)
"""


@pytest.mark.long
def test_ranks_that_have_agreed_do_not_meet_again_after_their_run(tmp_path):
    """The second meeting would find the addresses of the first, and could wait for ever."""
    ends = run_ranks(tmp_path, [[sys.executable, "-c", AGREED]] * 2)
    assert [code for code, *_ in ends] == [0, 0], ends


@pytest.mark.long
@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("optimizer.lr=0.25", "optimizer.lr=0.25: the first rank has optimizer.lr=0.0016; start"),
        ("steps=-1", "steps=-1: must be at least 1"),
    ],
)
def test_ranks_that_compose_otherwise_are_refused_by_name(tmp_path, other, problem):
    words = (*TINY, "hydra.run.dir=run")
    ends = run_ranks(tmp_path, [command(*words), command(*words, other)])
    assert [code for code, *_ in ends] == [REFUSED, REFUSED], ends
    (line,) = ends[0][2].splitlines()
    assert line.startswith(f"agenttrain: rank 1 on {socket.gethostname()}: {problem}")
    assert ends[1][1:] == ("", "")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_process_per_gpu_or_as_many_as_the_user_says(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert resolve(DistributedConfig(name=DistributedName.ddp)) == 4
    assert resolve(DistributedConfig(name=DistributedName.ddp, processes=3)) == 3
    with pytest.raises(ConfigError, match=r"processes=5: this machine has 4 GPUs"):
        resolve(DistributedConfig(name=DistributedName.ddp, processes=5))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert resolve(DistributedConfig(name=DistributedName.fsdp2, processes=3)) == 3
    with pytest.raises(ConfigError, match=r"distributed=fsdp2: there is no GPU .*processes=2"):
        resolve(DistributedConfig(name=DistributedName.fsdp2))


def test_slurm_numbers_the_nodes(monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "1")
    two = DistributedConfig(name=DistributedName.ddp, nodes=2, rendezvous="node1:29500")
    assert node_rank(DistributedConfig(nodes=1)) == 0
    assert node_rank(two) == 1
    assert node_rank(replace(two, node_rank=0)) == 0
    monkeypatch.setenv("SLURM_NODEID", "2")
    with pytest.raises(ConfigError, match=r"nodes=2: this is node 2"):
        node_rank(two)
    monkeypatch.delenv("SLURM_NODEID")
    with pytest.raises(ConfigError, match=r"add distributed.node_rank=0 on the first"):
        node_rank(two)


def test_settings_follow_the_processes_that_there_are(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = composed()
    adopt(run, [])
    assert run.plain["distributed"]["name"] == "ddp"
    section = run.config.distributed
    assert (section.name, section.processes) == (DistributedName.ddp, 2)
    validate(run.config)  # so that the run can go on, whoever starts it then
    for typed in (
        ["distributed=fsdp2"],
        ["distributed=ddp", "distributed.processes=2"],  # on each node
        [*TWO, "distributed.nodes=2", "distributed.rendezvous=node1:29500"],
    ):
        adopt(composed(*typed), typed)
    for typed in (["distributed=single"], ["distributed=ddp", "distributed.processes=4"]):
        with pytest.raises(ConfigError, match=r"4 processes were started \(WORLD_SIZE\), 2 on"):
            adopt(composed(*typed), typed)
    saved = composed("distributed=ddp", "distributed.processes=3")  # what a run that goes on says
    adopt(saved, ["steps=3"])
    assert saved.config.distributed.processes == 2


def test_what_torchrun_started_is_checked_as_it_is(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_NODEID", "1")  # torchrun numbers the machines as it likes
    run = composed()
    adopt_and_check_processes(parse([]), [run])
    assert not is_later_node(run.config.distributed)
    shared = composed("engine=vllm", "engine.tensor_parallel_size=2")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: with distributed=ddp each"):
        adopt_and_check_processes(parse([]), [shared])
    restarted = composed("distributed=ddp", "distributed.restarts=3")
    with pytest.raises(ConfigError, match=r"distributed.restarts=3: torchrun starts the processes"):
        adopt_and_check_processes(parse([]), [restarted])


def test_what_accelerate_was_told_is_not_left_out(monkeypatch):
    assert list(accelerate_problems("no")) == []
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    fsdp, precision, backend = accelerate_problems("no")
    assert fsdp == "ACCELERATE_USE_FSDP=true: set distributed=fsdp2 instead"
    assert precision.startswith("ACCELERATE_MIXED_PRECISION=bf16: the run has training.mixed_")
    assert backend.startswith("ACCELERATE_DYNAMO_BACKEND=INDUCTOR: ")
    assert list(accelerate_problems("bf16")) == [fsdp, backend]


ACCELERATE = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "alone"),
    [
        (ACCELERATE, True),  # accelerate launch --cpu --num_processes 2
        ({"ACCELERATE_USE_CPU": "True"}, False),  # one process was asked for
        ({**ACCELERATE, "WORLD_SIZE": "2", "RANK": "0"}, False),
        ({"MASTER_ADDR": "node1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),  # mpirun -n 2
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"PMI_SIZE": "4", "SLURM_JOB_ID": "7"}, False),  # a shell in an allocation
    ],
)
def test_a_process_that_was_to_be_one_of_several_does_not_train_alone(
    environment: dict[str, str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = missing_peers_problem(environment)
    assert bool(problem) == alone
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if alone:
        with pytest.raises(ConfigError, match=r"distributed\.processes"):
            adopt_and_check_processes(parse([]), [composed()])
        adopt_and_check_processes(parse([]), [composed(*TWO)])
