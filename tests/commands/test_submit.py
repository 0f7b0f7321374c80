"""`agenttrain submit` up to where SLURM begins: what is written, refused and told without one."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import hydra
import pytest

from agenttrain import cli
from agenttrain.commands.slurm.config import wall_seconds
from agenttrain.commands.slurm.script import core

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "slurm"
DRY = ("submit", "--dry-run", "--no-check")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no sbatch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*DRY, *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*DRY, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.+)$", script, re.MULTILINE)


def arguments_of(script: str, **environment: str) -> list[str]:
    """What the script's own bash makes of `arguments`."""
    above = script.partition("# From here on")[0].replace("source .venv/bin/activate", "")
    done = subprocess.run(
        ["/bin/bash", "-uc", above + '\nprintf "%s\\n" "${arguments[@]}"'],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_run_becomes_a_script_and_nothing_is_written(capsys, elsewhere):
    script = rendered(
        capsys,
        *("debug=tiny", "algorithm=rloo", "data.train.seed=7", "hydra.run.dir='runs/a b=1'"),
        *("slurm=gpu", "slurm.partition=a100", "slurm.account=me", "slurm.time=1-02:00:00"),
        *("slurm.directives=['--constraint=h100']", "slurm.setup=[module load cuda]"),
        *("slurm.srun=['--container-image=/x y.sqsh']", "slurm.max_requeues=3"),
    )
    assert directives(script) == [
        *("--job-name=shop", "--partition=a100", "--account=me", "--time=1-02:00:00"),
        *("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=12"),
        *("--mem=120G", "--signal=B:USR1@300", f"--chdir={elsewhere}"),
        f"--output='{elsewhere}/runs/a b=1/slurm-%j.out'",
        *("--open-mode=append", "--requeue", "--constraint=h100"),
    ]
    assert arguments_of(script) == [
        *("train", "debug=tiny", "algorithm=rloo", "++data.train.seed=7", "resume=auto"),
        f"hydra.run.dir='{elsewhere}/runs/a b=1'",
    ]
    lines = script.splitlines()
    assert "module load cuda" in lines
    assert "export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1" in lines
    assert "max_requeues=3" in lines
    assert "srun=('--container-image=/x y.sqsh')" in lines
    assert list(elsewhere.iterdir()) == []


def test_without_setup_lines_the_python_that_submits_is_used(capsys):
    script = rendered(capsys, "debug=tiny", "slurm.offline=false")
    folder = shlex.quote(str(Path(sys.executable).parent))
    assert f'export PATH={folder}:"$PATH"' in script.splitlines()
    assert "HF_HUB_OFFLINE" not in script


def test_a_folder_is_named_for_a_run_that_names_none(capsys, elsewhere):
    script = rendered(capsys, "experiment=calculator")
    folder = arguments_of(script)[-1].removeprefix("hydra.run.dir=")
    where = re.escape(f"{elsewhere}/outputs/calculator/")
    assert re.fullmatch(where + r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder)


def test_one_process_per_gpu_on_every_node(capsys):
    script = rendered(capsys, "distributed=fsdp2", "slurm=nodes", "slurm.nodes=4")
    assert "--nodes=4" in directives(script)
    assert "distributed.processes=8" in arguments_of(script)
    # Their number and where they meet is the job's to say.
    assert not [text for text in arguments_of(script) if "distributed.nodes" in text]
    assert '"distributed.nodes=$training" "distributed.rendezvous=$first:$port"' in script


def test_a_sweep_becomes_one_array(capsys, elsewhere):
    script = rendered(
        capsys, "-m", "algorithm=grpo,rloo", "seed=0,1", "hydra.sweep.dir=s", "slurm.concurrent=2"
    )
    assert "--array=0-3%2" in directives(script)
    assert f"--output={elsewhere}/s/slurm-%A_%a.out" in directives(script)
    found = [arguments_of(script, SLURM_ARRAY_TASK_ID=str(number)) for number in range(4)]
    assert [words[1:3] for words in found] == [
        *(["algorithm=grpo", "seed=0"], ["algorithm=grpo", "seed=1"]),
        *(["algorithm=rloo", "seed=0"], ["algorithm=rloo", "seed=1"]),
    ]
    assert [words[3:] for words in found] == [
        ["resume=auto", f"hydra.run.dir={elsewhere}/s/{number}"] for number in range(4)
    ]
    assert list(elsewhere.iterdir()) == []


def test_folders_of_other_names(capsys, elsewhere):
    """What the hydra section of a local sweep may say, and signs that SLURM would replace."""
    script = rendered(
        capsys,
        *("-m", "seed=3,4", "hydra.sweep.dir=100%s"),
        "hydra.sweep.subdir=${hydra.job.num}_${hydra.job.override_dirname}",
    )
    assert f"--output={elsewhere}/100%%s/slurm-%A_%a.out" in directives(script)
    last = arguments_of(script, SLURM_ARRAY_TASK_ID="1")[-1]
    assert last == f"hydra.run.dir='{elsewhere}/100%s/1_seed=4'"


SERVE = """\

# The last nodes run the servers, which wait in the run's folder for the run to begin.
folder='{0}/my run'
training=$((SLURM_NNODES - 2))
serve() {{
  rm -f "$folder"/servers/*.json "$folder"/servers/*.kill # of an earlier start of the job
  srun --nodes=2 --relative="$training" --ntasks=4 --ntasks-per-node=2 \\
    --cpus-per-task=6 --distribution=block --kill-on-bad-exit=0 --wait=0 "${{srun[@]}}" \\
    bash -c 'exec python3 -m agenttrain.cli engine-server "$0" trust=true number="$SLURM_PROCID" \\
    host="$(hostname)" wait=86400' "$folder" &
  servers=$!
}}
"""


def test_servers_are_a_step_of_the_job(capsys, elsewhere):
    script = rendered(
        capsys,
        *(
            "debug=tiny",
            "engine=vllm_server",
            "servers.nodes=2",
            "servers.count=4",
            "slurm=gpu",
            "slurm.gpus=2",
        ),
        *("distributed=fsdp2", "distributed.nodes=4", "hydra.run.dir='my run'"),
    )
    # four that train and two that serve
    assert "--nodes=6" in directives(script)
    assert SERVE.format(elsewhere) in script
    assert arguments_of(script, SLURM_NNODES="6") == [
        *("train", "debug=tiny", "engine=vllm_server", "servers.nodes=2", "servers.count=4"),
        *("distributed=fsdp2", "distributed.processes=2", "resume=auto"),
        f"hydra.run.dir='{elsewhere}/my run'",
    ]
    done = subprocess.run(["/bin/bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["single_node", "multi_node", "array_sweep"])
def test_the_examples_are_what_is_written(name, capsys):
    example = (EXAMPLES / f"{name}.sbatch").read_text()
    typed = re.search(r"agenttrain submit (.+)$", example, re.MULTILINE)
    assert typed is not None
    written = rendered(capsys, *typed[1].split())
    mark = "# From here on"
    assert example.partition(mark)[2] == written.partition(mark)[2]
    assert example.endswith(core())
    # The log and the folder have names of their own, and the working folder is where one types.
    own = ("--output", "--chdir")
    assert {text for text in directives(example) if not text.startswith(own)} == {
        text for text in directives(written) if not text.startswith(own)
    }
    numbers = {
        **dict.fromkeys(("SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"), "7"),
        "SLURM_ARRAY_TASK_ID": "2",
    }
    words = [
        [word for word in arguments_of(text, **numbers) if not word.startswith("hydra.run.dir=")]
        for text in (example, written)
    ]
    assert words[0] == words[1]


def test_a_mistake_is_told_before_anything_is_written(capsys, elsewhere):
    """`command_lines.txt` has the others."""
    for line in ("slurm=node", "-m seed=1,2 steps=0", "resume=auto hydra.run.dir=x"):
        refusal(capsys, *line.split())
        assert list(elsewhere.iterdir()) == []


def test_the_other_verbs_do_not_read_the_section(capsys):
    assert cli.main(["slurm.partition=a100"]) == 2
    assert "slurm.partition=a100: has no effect in agenttrain train" in capsys.readouterr().err


def test_without_sbatch_only_the_script_can_be_had(capsys, elsewhere):
    assert cli.main(["submit", "debug=tiny"]) == 2
    assert "there is no sbatch on PATH; log in to a machine of the cluster" in (
        capsys.readouterr().err
    )
    assert list(elsewhere.iterdir()) == []


CONTROLLER_GONE = "allocation failure: Unable to contact slurm controller (connect failure)"
BAD_PARTITION = "sbatch: error: invalid partition specified: a100"


def test_a_dry_run_needs_no_cluster_though_there_is_an_sbatch(
    capsys, elsewhere, tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp("bin")

    def answering(message: str) -> None:
        (folder / "sbatch").write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
        (folder / "sbatch").chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    answering(CONTROLLER_GONE)
    assert cli.main([*DRY, "debug=tiny"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash")
    assert "note: not checked by SLURM: submit: the cluster does not answer: alloc" in err
    assert cli.main(["submit", "--no-check", "debug=tiny"]) == 2
    assert "the cluster does not answer" in capsys.readouterr().err
    answering(BAD_PARTITION)
    assert cli.main([*DRY, "debug=tiny"]) == 2
    assert "SLURM refuses the job: error: invalid partition" in capsys.readouterr().err
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_what_the_compute_nodes_could_not_load_is_missed_at_submission(
    capsys, elsewhere, monkeypatch
):
    """Template, tools and rows are read; with a network or without, rows come from the cache."""
    monkeypatch.setattr("agenttrain.utils.hub.PAUSES_S", ())
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # none there
    rows = ["data=hub", "data.path=nobody/nothing", "data.test_fraction=0.5"]
    assert cli.main(["submit", "--dry-run", *rows]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "path=nobody/nothing" in err and "is not in the cache" in err
    assert "HF_HUB_OFFLINE" not in os.environ


def test_the_certificate_does_not_mix_with_the_script(capsys, elsewhere):
    assert cli.main(["submit", "--dry-run", "debug=tiny"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n") and out.endswith(core())
    assert "certificate passed" in err
    assert "there is no sbatch here" in err


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["debug=tiny"], 2),  # with the job's settings, and the run
        # One with the fixed settings, the first run with those of the job, and both runs.
        (["-m", "debug=tiny", "seed=1,2"], 4),
    ],
)
def test_settings_are_composed_as_seldom_as_can_be(words, count, capsys, monkeypatch):
    """A composition takes about a sixth of a second."""
    composed = []

    def counting(*arguments, **options):
        composed.append(arguments)
        return hydra.compose(*arguments, **options)

    monkeypatch.setattr("agenttrain.settings.compose.compose", counting)
    rendered(capsys, *words)
    assert len(composed) == count


@pytest.mark.parametrize("verb", [["check", "sft"], ["submit", "sft", "--dry-run", "slurm=gpu"]])
def test_demonstrations_are_checked_as_supervised_learning_reads_them(verb, capsys, elsewhere):
    """Rows end with their answers, nothing is rewarded and no agent is started."""
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    row = json.dumps({"messages": turns})
    (elsewhere / "rows.jsonl").write_text(row + "\n")
    (elsewhere / "agent.py").write_text("raise SystemExit('was started')\n")
    words = ["data=file", "data.path=rows.jsonl", "tools=[]", "stop_tools=[]", "eval.questions=0"]
    agent = ["agent=endpoint", f"agent.command=[{sys.executable},agent.py]"]
    assert cli.main([*verb, *words, *agent]) == 0, capsys.readouterr().err


def test_a_job_is_checked_without_a_cluster(capsys, elsewhere):
    """On two nodes, which this machine need not have."""
    job = ["debug=tiny", "slurm=nodes", "slurm.nodes=2", "distributed=ddp"]
    assert cli.main(["check", "submit", *job]) == 0, capsys.readouterr().err
    assert "certificate passed" in capsys.readouterr().out
    assert list(elsewhere.iterdir()) == []
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / "job.sbatch").write_text("")
    assert cli.main(["check", "submit", *job, "hydra.run.dir=mine"]) == 2
    assert "holds a run or a job already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "job.sbatch", "sweep.json"])
def test_a_folder_that_is_in_use_is_left_alone(name, capsys, elsewhere):
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / name).write_text("")
    assert "holds a run or a job already" in refusal(capsys, "hydra.run.dir=mine")


def test_a_folder_whose_name_would_end_a_line_of_the_script_is_refused(capsys, elsewhere):
    told = refusal(capsys, 'hydra.run.dir="a\necho not a comment"')
    assert "SLURM takes no such folder name" in told and told.count("\n") == 1
    assert list(elsewhere.iterdir()) == []


def test_paths_of_this_machine_alone_are_noted(capsys, elsewhere):
    rendered_paths = ("debug=tiny", "hydra.run.dir=/tmp/x")
    assert cli.main([*DRY, *rendered_paths]) == 0
    assert "the run's folder: /tmp/x is in /tmp, which every machine has for itself" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("04:00:00", 14400),
        ("1-12", 129600),
        ("1-12:30:00", 131400),
        ("90", None),
        ("12:30", None),
        ("soon", None),
    ],
)
def test_wall_times(time, seconds):
    # 1-12:30:00 is 86400 + 12 * 3600 + 30 * 60.
    assert wall_seconds(time) == seconds


STAND_IN = """#!/bin/bash
echo "$0 $*" >> "$LOG"
case "$0 $*" in
  *squeue*) echo "$STATE" ;;
  *srun*) trap 'exit "$CODE"' USR1; : > "$READY"; while :; do sleep 0.05; done ;;
esac
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run that may be put back three times."""
    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.setenv("PATH", "/nowhere")
        assert cli.main([*DRY, "slurm.max_requeues=3", "slurm.setup=[]"]) == 0
    return printed.getvalue()


@pytest.mark.parametrize(
    ("code", "state", "restarts", "array", "requeued"),
    [
        (75, "RUNNING", "", False, True),
        (75, "RUNNING", "", True, True),
        (75, "RUNNING", "3", False, False),
        (75, "COMPLETING", "", False, False),
        (143, "RUNNING", "", False, True),
        (0, "RUNNING", "", False, False),
        (1, "RUNNING", "", False, False),
        (70, "RUNNING", "", False, False),
    ],
)
def test_the_script_puts_back_what_a_signal_stopped(
    code, state, restarts, array, requeued, script, elsewhere
):
    """With programs in the place of SLURM's; scripts/test-slurm has the real ones."""
    programs = elsewhere / "bin"
    programs.mkdir()
    for name in ("srun", "squeue", "scontrol"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(stat.S_IRWXU)
    (programs / "scontrol").write_text(STAND_IN + 'kill -TERM "$PPID"\n')
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        **{"LOG": str(elsewhere / "log"), "READY": str(elsewhere / "ready")},
        **{"CODE": str(code), "STATE": state},
        **{"SLURM_JOB_ID": "9", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2"},
        **({"SLURM_RESTART_COUNT": restarts} if restarts else {}),
        **({"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"} if array else {}),
    }
    job = subprocess.Popen(["/bin/bash", "-c", script], env=environment, start_new_session=True)
    try:
        while not (elsewhere / "ready").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(10)  # SIGUSR1
        found = job.wait(timeout=120)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, 9)
    log = (elsewhere / "log").read_text()
    assert (f"scontrol requeue {'8_1' if array else '9'}\n" in log) == requeued
    assert requeued or "scontrol" not in log
    # SLURM ends the script of a job that is put back.
    assert found == (-15 if requeued else code)


def test_a_job_with_containers_says_what_nodes_need(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("runtime=podman", "runtime.image=localhost/box:1")
    assert cli.main([*DRY, *words]) == 0
    (note,) = (line for line in capsys.readouterr().err.splitlines() if "runtime.client" in line)
    assert note.startswith("note: runtime.client=podman: each node needs podman")
    assert "podman ps -aq --filter label=agenttrain.run | xargs -r podman rm -f" in note
