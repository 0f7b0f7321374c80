"""The batch script of a job: its request to SLURM, its command, and how it resumes a run.

`lint` has sbatch check the script, and `submit` submits it. `note_local_paths` names paths that the
job's machines may not see.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agenttrain.commands.slurm.config import SlurmConfig
from agenttrain.engines.config import ServersConfig
from agenttrain.runtimes.reaper import LABEL
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import BUNDLED, model_folder

FOLDER = Path(__file__).parent
NAME = "job.sbatch"
"""The script's file in the run's folder, or the sweep's."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that keep Hugging Face's libraries from the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """Inputs of a job's batch script besides the section `slurm`; `render` writes the script."""

    name: str
    """Name of the job, unless slurm.name is set."""
    folder: Path
    """Folder of the run, or of the sweep."""
    workdir: Path
    """Working directory of the job: relative paths and the user's modules are found from it."""
    jobs: Sequence[Sequence[str]]
    """Arguments of `agenttrain` for each job: one for a run, several for an array."""
    array: bool = False
    """True: a job array, for a sweep."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    """Servers of the run. With `servers.nodes` they are a job step of their own."""
    python: Path
    """Interpreter of `agenttrain submit`, which the job uses too."""

    @property
    def path(self) -> Path:
        """The script's file."""
        return self.folder / NAME

    @property
    def log(self) -> Path:
        """Output file, with SLURM's placeholders: %j for a job's number, %A_%a for an array's."""
        numbers = "%A_%a" if self.array else "%j"
        return Path(str(self.folder).replace("%", "%%")) / f"slurm-{numbers}.out"


def core() -> str:
    """Return the shell code that all batch scripts share, those of scripts/slurm/ included."""
    return (FOLDER / "core.sh").read_text(encoding="utf-8")


def render(script: JobScript, settings: SlurmConfig) -> str:
    """Return the script's text."""
    python_path = [f'export PATH={shlex.quote(str(script.python.parent))}:"$PATH"']
    offline = [f"export {' '.join(f'{name}=1' for name in OFFLINE)}"] if settings.offline else []
    # --array=0-9%2: ten jobs, two at a time.
    throttle = "" if settings.concurrent is None else f"%{settings.concurrent}"
    directives = {
        "job-name": settings.name or script.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time,
        "nodes": settings.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": settings.gpus or None,
        "cpus-per-task": settings.cpus,
        "mem": settings.memory,
        "array": f"0-{len(script.jobs) - 1}{throttle}" if script.array else None,
        "signal": f"B:USR1@{settings.signal_s}",  # B: to the batch shell alone
        "chdir": shlex.quote(str(script.workdir)),
        "output": shlex.quote(str(script.log)),
        "open-mode": "append",
    }
    options = [f"--{key}={value}" for key, value in directives.items() if value is not None]
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"quote": shlex.quote, "words": shlex.join}
    return environment.get_template("job.sbatch.jinja").render(
        path=str(script.path),
        directives=[*options, "--requeue", *settings.directives],
        setup=[*(python_path if settings.setup is None else settings.setup), *offline],
        max_requeues=settings.max_requeues,
        srun=settings.srun,
        single=not script.array,
        jobs=script.jobs,
        folder=str(script.folder),
        serving=script.servers.nodes,
        per_node=script.servers.per_node,
        server_cpus=max(settings.cpus // script.servers.per_node, 1),
        core=core(),  # shell code that follows the lines of this job
    )


ABSENT = (
    "submit: there is no sbatch on PATH; log in to a machine of the cluster, or print the script "
    "with agenttrain submit --dry-run …"
)
TIMEOUT_S = 120
"""Seconds to wait for the answer of sbatch."""
NO_CLUSTER = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Socket timed out on send/recv operation",
)
"""Messages of sbatch (SLURM 22 to 25) about the cluster rather than the job."""


class ClusterUnreachable(ConfigError):
    """This machine has sbatch, but no SLURM controller answers it."""


def has_sbatch() -> bool:
    """Return True if this machine has sbatch."""
    return shutil.which("sbatch") is not None


def lint(script: str) -> str:
    """Have SLURM check a script; return its forecast, "Job 7 to start at … on nodes n1 …".

    Raises ConfigError with SLURM's message if it would refuse the script, and ClusterUnreachable if
    no controller answers.
    """
    result = _sbatch(["--test-only"], script)
    text = " ".join(line.removeprefix("sbatch: ") for line in result.stderr.split("\n")).strip()
    if any(message in text for message in NO_CLUSTER):
        raise ClusterUnreachable(
            f"submit: the cluster does not answer: {text}; `sinfo` shows whether it is up, and "
            "agenttrain submit --dry-run … prints the script without it"
        )
    if result.returncode != 0:
        raise ConfigError(
            f"submit: SLURM refuses the job: {text}; see slurm.partition, account, qos, time, "
            "nodes, gpus, cpus and memory, and what `sinfo` offers"
        )
    return text


def submit(path: Path) -> str:
    """Submit the script. Return the job's number. Raises ConfigError with SLURM's message."""
    result = _sbatch(["--parsable", str(path)], None)
    if result.returncode != 0:
        raise ConfigError(f"submit: sbatch {path}: {result.stderr.strip()}")
    number, _, _ = result.stdout.strip().partition(";")  # the cluster's name may follow
    return number


def _sbatch(arguments: list[str], script: str | None) -> subprocess.CompletedProcess[str]:
    """Run sbatch. Raises ConfigError if it is missing, and ClusterUnreachable after a timeout."""
    if not has_sbatch():
        raise ConfigError(ABSENT)
    command = ["sbatch", *arguments]
    try:
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterUnreachable(
            f"submit: {' '.join(command)} has not answered for {TIMEOUT_S} seconds; `sinfo` shows "
            "whether the cluster is up"
        ) from error


LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that are not shared between machines."""


def note_containers(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a note for each client of containers that the job's runs use."""
    runtimes = [config.runtime for config in configs if config.runtime.is_client]
    for client in dict.fromkeys(runtime.client for runtime in runtimes):
        yield (
            f"runtime.client={client}: each node needs {client}, storage on a disk of its own "
            f"(`{client} info`), and the images: those of this machine are not the nodes', so "
            "build or load them there, e.g. in slurm.setup. Where nodes are not shared, an epilog "
            f"`{client} ps -aq --filter label={LABEL} | xargs -r {client} rm -f` removes what a "
            "killed job left"
        )


def note_local_paths(script: JobScript, configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a note for each path of the job in a folder that machines do not share."""
    paths = {
        "the run's folder": script.folder,
        "the working folder": script.workdir,
        "Python": script.python,
    }
    for config in configs:
        if not config.model.path.startswith(BUNDLED):
            folder = model_folder(config.model.path, parts=(), revision=config.model.revision)
            paths[f"model.path={config.model.path}"] = folder
        teacher = config.algorithm.loaded_teacher
        if teacher is not None and not teacher.path.startswith(BUNDLED):
            key = "algorithm.teacher.path"
            folder = model_folder(teacher.path, parts=(), revision=teacher.revision, key=key)
            paths[f"{key}={teacher.path}"] = folder
        for split in ("train", "test"):
            path = getattr(config.data, split).get("path")
            for text in path if isinstance(path, list) else [path]:
                file = Path(str(text)).expanduser()
                # Other texts name a data set of the hub.
                if text is not None and (file.exists() or has_magic(str(text))):
                    paths[f"data.{split}.path={text}"] = file
    local_folders = {Path(folder).resolve() for folder in (*LOCAL_FOLDERS, tempfile.gettempdir())}
    for name, path in paths.items():
        parents = local_folders & {*path.expanduser().resolve().parents}
        if parents:
            # Of folders inside of each other, the innermost is the largest text.
            yield (
                f"{name}: {path} is in {max(parents)}, which every machine has for itself; the "
                "nodes must see it"
            )
