"""A task in Harbor's format, read from its folder::

fix-script/
  task.toml         limits, times, users, network, health check, variables, artifacts
  instruction.md    the prompt
  environment/      a Dockerfile and what it copies
  tests/test.sh     writes /logs/verifier/reward.txt (a number) or reward.json (named numbers)
  solution/solve.sh optional: the oracle
  steps/<name>/     of a task of several steps: instruction.md, tests/, solution/, and workdir/ with
                    files and a setup.sh that come before the step
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from agenttrain.runtimes.config import HOST
from agenttrain.runtimes.harbor.keys import HARMLESS, KEYS, REASONS, VERIFIER_ENVIRONMENT, Use
from agenttrain.utils.names import did_you_mean

COLUMN = "harbor"
"""Column of a row with the path of its task's folder."""
TASK_FILE, INSTRUCTION = "task.toml", "instruction.md"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
LARGEST_FILE = 1 << 20
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Name of an environment variable."""
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
FREE_FORM = (
    *("metadata", "task.authors", "environment.env", "verifier.env", "solution.env"),
    *(f"{VERIFIER_ENVIRONMENT}.env", "steps.verifier.env", f"steps.{VERIFIER_ENVIRONMENT}.env"),
    "steps.min_reward",
)
"""Tables whose keys are the task's own."""


class BadTask(ValueError):
    """A folder is no task that can be run; the message names it, the key and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that has to succeed before the agent begins; the names are Harbor's.

    For `start_period_sec` it is tried every `start_interval_sec`, and failures do not count. Then
    it is tried every `interval_sec`, until it has failed `retries` times.
    """

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContainer:
    """A container as the task describes it: image, limits, network. `Machines` starts it."""

    docker_image: str | None = None
    folder: Path
    """Folder of the Dockerfile, where there is no image."""
    build_timeout_s: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    wants_network: bool = True
    hosts: tuple[str, ...] | None = None
    """The only hosts of the network; None: all."""
    healthcheck: Healthcheck | None = None

    @property
    def image(self) -> str:
        """Name of the image, or the folder of which it is made."""
        return self.docker_image or str(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """A command that runs once the agent has ended, before artifacts are copied."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Folder, required rewards and health check of one step of a task with several steps.

    The step's instruction, tests and containers are in a `HarborTask`.
    """

    folder: Path
    min_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name that the step must earn at least; with less the next step does not begin."""
    healthcheck: Healthcheck | None = None

    @property
    def workdir(self) -> Path:
        """Folder of files for the container's working folder; it may be missing."""
        return self.folder / "workdir"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task in Harbor's format, or one step of it: an instruction, a container and tests.

    A task of several steps has one of these for each step, in `steps`; its own fields are those of
    the first. Of a step, `folder` is the whole task's, and `step_details` has its own folder, whose
    `tests` and `solution` go before the task's.

    Harbor calls the run of the tests, which write the rewards, the verifier.
    """

    folder: Path
    name: str
    instruction: str
    container: TaskContainer
    """Container of the agent."""
    agent_timeout_s: float | None = None
    agent_user: str | None = None
    verifier_timeout_s: float = 600.0
    verifier_user: str | None = None
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    verifier_container: TaskContainer | None = None
    """Container of the tests; None: the agent's own."""
    bundled_tests: bool = False
    """The image of `verifier_container` holds the tests already: it was made with them."""
    collect: tuple[Collect, ...] = ()
    """Commands that run between the agent's end and the tests."""
    solution_env: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    """Paths in the agent's container. If the tests run in another one, they are copied to it."""
    step_details: Step | None = None
    """Folder, required rewards and health check of the step that this is; None: a whole task."""
    steps: tuple[HarborTask, ...] = ()
    """The steps of a whole task, in order; empty for a task of a single instruction."""
    takes_last_step: bool = False
    """The rewards are those of the last step; False: the means over all."""

    @property
    def tests(self) -> list[Path]:
        """Folders of the tests, each laid over the one before it: the task's, then the step's."""
        folders = [self.folder, *([] if self.step_details is None else [self.step_details.folder])]
        return [folder / "tests" for folder in folders if (folder / "tests").is_dir()]

    @property
    def solution_timeout_s(self) -> float:
        """Seconds that the solution may take: the agent's, or the verifier's if that has none."""
        return self.agent_timeout_s or self.verifier_timeout_s

    @property
    def solution(self) -> Path | None:
        """Folder of the solution, the step's before the task's; None if there is none."""
        folder = self.folder / "solution"
        if self.step_details is not None and (self.step_details.folder / "solution").is_dir():
            folder = self.step_details.folder / "solution"
        return folder if (folder / "solve.sh").is_file() else None


@lru_cache(maxsize=4096)
def read_task(folder: Path) -> HarborTask:
    """Read and check a task's folder. Raises BadTask."""
    settings = _read_settings(folder)
    if problems := list(_key_problems(settings, "")):
        raise BadTask("\n".join(f"{folder / TASK_FILE}: {problem}" for problem in problems))
    try:
        return _make_whole_task(folder, settings)
    except KeyError as error:
        raise BadTask(f"{folder / TASK_FILE}: {error.args[0]}: is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise BadTask(f"{folder / TASK_FILE}: {error}") from error


def task_folders(path: str | Sequence[str]) -> list[Path]:
    """Return the task folders of a folder of tasks, of a single task, or of a list of both."""
    paths = [path] if isinstance(path, str) else list(path)
    folders: list[Path] = []
    for text in paths:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise ValueError(f"path={text}: there is no such folder")
        if (folder / TASK_FILE).is_file():
            folders.append(folder.resolve())
            continue
        inside = sorted(file.parent.resolve() for file in folder.glob(f"*/{TASK_FILE}"))
        if not inside:
            raise ValueError(f"path={text}: neither it nor a folder in it has a {TASK_FILE}")
        folders += inside
    return folders


def resolve_variables(env: Mapping[str, str], allowed: Mapping[str, str]) -> dict[str, str]:
    """Fill in ``${NAME}`` and ``${NAME:-default}``. Raises ValueError for a name not `allowed`."""
    resolved = {}
    for key, text in env.items():
        match = VARIABLE.fullmatch(text)
        if match is None:
            resolved[key] = text
            continue
        name, default = match[1], match[2]
        if name not in allowed and default is None:
            raise ValueError(
                f"{key}=${{{name}}}: reads a variable of this machine, which the task may not; "
                f"set it, and allow it with runtime.env=[{name}]"
            )
        resolved[key] = allowed.get(name, default or "")
    return resolved


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of a task's task.toml. Raises BadTask."""
    try:
        file = folder / TASK_FILE
        if file.stat().st_size > LARGEST_FILE:
            raise BadTask(f"{file}: is larger than {LARGEST_FILE >> 20} MiB")
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        if "\\u0000" in json.dumps(settings, default=str):
            raise BadTask(f"{file}: holds a NUL character, which no command can")
        return settings
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, BadTask):
            raise
        raise BadTask(f"{folder / TASK_FILE}: cannot be read: {error}") from error


def _key_problems(section: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield keys of task.toml that are unknown or refused, with the reason.

    `prefix` is the path of the section: "environment." or "" for the whole file.
    """
    for name, value in section.items():
        key = f"{prefix}{name}"
        use = KEYS.get(key)  # None for an unknown key, and for a section that KEYS has no entry for
        is_section = any(known.startswith(f"{key}.") for known in KEYS)
        if use is Use.refused:
            # By the last word alone: `network_mode` is refused in several sections, for one reason.
            asks_for_nothing = value in HARMLESS.get(name, ()) or value in ([], {})
            if not asks_for_nothing:
                yield f"{key}: {REASONS.get(name, 'is not supported')}; the task is refused"
        elif use is Use.ignored or key in FREE_FORM:  # the author chooses the keys of a FREE_FORM
            continue
        elif is_section and isinstance(value, Mapping):
            yield from _key_problems(value, f"{key}.")
        elif is_section and isinstance(value, list):  # a list of tables, such as `[[steps]]`
            for item in value:
                if isinstance(item, Mapping):
                    yield from _key_problems(item, f"{key}.")
        elif use is None:
            yield f"{key}: is no key of Harbor's schema{did_you_mean(key, KEYS)}"


def _make_whole_task(folder: Path, settings: Mapping[str, Any]) -> HarborTask:
    """Return the task of a folder: of one instruction, or of several steps.

    `settings` is the content of its task.toml.
    """
    tables = settings.get("steps") or []
    if not tables:
        return _make_task(folder, settings, settings.get("agent", {}), settings.get("verifier", {}))
    steps = tuple(_make_step(folder, settings, table) for table in tables)
    # Each is a `HarborTask` with the details of its step, unlike the whole task that is made below.
    # Names are compared without case: on some file systems such names are one folder.
    names = [
        step.step_details.folder.name.casefold() for step in steps if step.step_details is not None
    ]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"steps.name={repeated[0]}: names two steps")
    strategy = settings.get("multi_step_reward_strategy") or "mean"
    if strategy not in ("mean", "final"):
        raise ValueError(f"multi_step_reward_strategy={strategy}: expected mean or final")
    limits = [step.agent_timeout_s for step in steps]
    seconds = [limit for limit in limits if limit is not None]
    # The whole task has the container and the instruction of its first step, in which a rollout
    # begins, and the time of all.
    return replace(
        steps[0],
        step_details=None,
        steps=steps,
        takes_last_step=strategy == "final",
        # A step without a limit makes a task without one.
        agent_timeout_s=sum(seconds) if len(seconds) == len(limits) else None,
    )


def _make_step(folder: Path, settings: Mapping[str, Any], table: Mapping[str, Any]) -> HarborTask:
    """Return a step as a task: its own settings go before those of the whole task.

    `settings` is the content of task.toml, and `table` the step's `[[steps]]` in it.
    """
    name = table["name"]
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
        raise ValueError(f"steps.name={name}: expected the name of a folder in steps/")
    min_rewards = table.get("min_reward")
    if min_rewards is None:
        min_rewards = {}
    elif not isinstance(min_rewards, Mapping):
        min_rewards = {"reward": min_rewards}
    for reward in min_rewards.values():
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ValueError(f"steps.min_reward={reward}: expected a number")
    step = Step(
        folder=folder / "steps" / name,
        min_rewards={key: float(reward) for key, reward in min_rewards.items()},
        healthcheck=_make_healthcheck(table.get("healthcheck"), "steps.healthcheck"),
    )
    agent = {**settings.get("agent", {}), **table.get("agent", {})}
    verifier = _verifier_of_step(settings.get("verifier", {}), table.get("verifier", {}))
    artifacts = [*settings.get("artifacts", []), *table.get("artifacts", [])]
    return _make_task(folder, {**settings, "artifacts": artifacts}, agent, verifier, step)


def _verifier_of_step(task: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [verifier] of a step: its own keys before the task's.

    `task` and `step` are the sections of task.toml. In them `environment` describes a container for
    the tests, `environment_mode` says whether the tests use it (`separate`) or the agent's
    (`shared`), and `collect` are commands that run before the tests.
    """
    merged = {**task, **step}
    # A step that describes a container wants it, also where the task's mode is shared.
    if "environment" in step and "environment_mode" not in step:
        merged["environment_mode"] = "separate"
    # A step that shares the agent's container does not want the one that the task describes.
    if step.get("environment_mode") == "shared" and "environment" not in step:
        merged.pop("environment", None)
    merged["env"] = {  # the first arguments are the keys that errors name
        **_as_texts("verifier.env", task.get("env")),
        **_as_texts("env", step.get("env")),
    }
    merged["collect"] = [*task.get("collect", []), *step.get("collect", [])]
    return merged


def _make_task(
    folder: Path,
    settings: Mapping[str, Any],
    agent: Mapping[str, Any],
    verifier: Mapping[str, Any],
    step: Step | None = None,
) -> HarborTask:
    """Return a task of one instruction, or one step of a task.

    `settings` is the content of task.toml. `agent` and `verifier` are its sections of these names,
    for a step merged with the step's own. Where they name no time limit, Harbor's default holds.
    """
    container = _make_container(settings.get("environment", {}), folder / "environment")
    files = folder if step is None else step.folder  # the instruction and tests are in it
    instruction = files / INSTRUCTION
    if not instruction.is_file():
        where = "the folder" if step is None else f"steps/{files.name}"
        raise ValueError(f"{INSTRUCTION}: is missing in {where}")
    # The container of the tests, None for the agent's, and whether its image holds the tests.
    verifier_container, bundled = _find_verifier_container(folder, files, verifier, container)
    task = HarborTask(
        folder=folder,
        name=str(settings.get("task", {}).get("name", folder.name)),
        instruction=instruction.read_text(encoding="utf-8").strip(),
        container=container,
        agent_timeout_s=_as_number("agent.timeout_sec", agent.get("timeout_sec")),
        agent_user=_as_text(agent.get("user")),
        verifier_timeout_s=_as_number("verifier.timeout_sec", verifier.get("timeout_sec")) or 600.0,
        verifier_user=_as_text(verifier.get("user")),
        verifier_env=_as_texts("verifier.env", verifier.get("env")),
        verifier_container=verifier_container,
        bundled_tests=bundled,
        collect=tuple(
            Collect(
                command=str(item["command"]),
                timeout_s=_as_number("verifier.collect.timeout_sec", item.get("timeout_sec"))
                or 60.0,
                user=_as_text(item.get("user")),
            )
            for item in verifier.get("collect", [])
        ),
        solution_env=_as_texts("solution.env", settings.get("solution", {}).get("env")),
        artifacts=tuple(_artifact_path(item) for item in settings.get("artifacts", [])),
        step_details=step,
    )
    # `task.tests` are folders that are copied over each other: the task's tests, then the step's.
    if not bundled and not any((tests / "test.sh").is_file() for tests in task.tests):
        raise ValueError("tests/test.sh: is missing in the folder")
    return task


def _find_verifier_container(
    folder: Path, files: Path, verifier: Mapping[str, Any], container: TaskContainer
) -> tuple[TaskContainer | None, bool]:
    """Return the container that is started for the tests, and True if its image holds the tests.

    It is None if the tests run in the container that the agent has used. If the task asks for a
    separate one but has no image for it, it is another container like `container`, the agent's.

    `folder` is the task's folder, `files` the step's or, for a whole task, `folder` too.
    """
    mode = verifier.get("environment_mode")
    if mode not in (None, "shared", "separate"):
        raise ValueError(f"verifier.environment_mode={mode}: expected shared or separate")
    if mode == "shared" and "environment" in verifier:
        raise ValueError("verifier.environment: contradicts verifier.environment_mode=shared")
    if mode == "shared" or (mode is None and "environment" not in verifier):
        return None, False
    # If the tests have an image or Dockerfile, it holds them: the step's goes before the task's.
    test_folders = [files / "tests"]
    if files != folder:
        test_folders.append(folder / "tests")
    for tests in test_folders:
        test_container = _make_container(verifier.get("environment", {}), tests, required=False)
        if (
            test_container.docker_image is not None
            or (test_container.folder / "Dockerfile").is_file()
        ):
            return test_container, True
    return container, False  # a new container of the agent's image, into which tests are copied


def _make_container(
    section: Mapping[str, Any], folder: Path, *, required: bool = True
) -> TaskContainer:
    """Return the container that a section `environment` describes, with the Dockerfile in `folder`.

    Raises ValueError if it cannot be made; without an image only if one is `required`.
    """
    image = _as_text(section.get("docker_image"))
    if image is not None and image.startswith("-"):
        raise ValueError(f"environment.docker_image={image}: names no image")
    compose = next((name for name in COMPOSE if (folder / name).is_file()), None)
    if compose is not None:
        raise ValueError(f"{folder.name}/{compose}: containers of several services are not made")
    if required and image is None and not (folder / "Dockerfile").is_file():
        raise ValueError(
            f"{folder.name}/Dockerfile: is missing, and environment.docker_image names no image"
        )
    if str(section.get("os", "linux")).lower() != "linux":
        raise ValueError(f"environment.os={section['os']}: only linux is run")
    network = section.get("network_mode")
    if network is None and section.get("allow_internet") is not None:
        network = "public" if section["allow_internet"] else "no-network"
    if network not in (None, "public", "no-network", "allowlist"):
        raise ValueError(
            f"environment.network_mode={network}: expected public, no-network or allowlist"
        )
    hosts = [str(host).lower().rstrip(".") for host in section.get("allowed_hosts") or ()]
    if hosts and network != "allowlist":
        raise ValueError("environment.allowed_hosts: are those of network_mode='allowlist'")
    if bad := [host for host in hosts if not HOST.fullmatch(host)]:
        raise ValueError(
            f"environment.allowed_hosts={bad[0]}: expected a name like example.org or *.example.org"
        )
    return TaskContainer(
        docker_image=image,
        folder=folder,
        build_timeout_s=_as_number("build_timeout_sec", section.get("build_timeout_sec")) or 600.0,
        cpus=_as_number("environment.cpus", section.get("cpus")),
        memory_mb=_read_megabytes("memory", section),
        disk_mb=_read_megabytes("storage", section),
        env=_as_texts("environment.env", section.get("env")),
        workdir=_as_text(section.get("workdir")),
        wants_network=network != "no-network",
        hosts=tuple(hosts) if network == "allowlist" else None,
        healthcheck=_make_healthcheck(section.get("healthcheck")),
    )


def _make_healthcheck(
    table: Mapping[str, Any] | None, key: str = "environment.healthcheck"
) -> Healthcheck | None:
    """Return a health check whose values have the types that it declares."""
    if table is None:
        return None
    check = Healthcheck(**table)
    if not isinstance(check.command, str):
        raise ValueError(f"{key}.command={check.command}: expected a text")
    _as_number(f"{key}.timeout_sec", check.timeout_sec)
    for name in ("interval_sec", "start_period_sec", "start_interval_sec"):
        if getattr(check, name) != 0:  # these may be 0, which `_as_number` refuses
            _as_number(f"{key}.{name}", getattr(check, name))
    retries = check.retries
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 1:
        raise ValueError(f"{key}.retries={retries}: expected a whole number above 0")
    return check


def _read_megabytes(name: str, section: Mapping[str, Any]) -> int | None:
    """Return a size of a section `environment` in megabytes; None if it is not given.

    For the name "memory": ``memory_mb = 2048``, or in the older form ``memory = "2G"``.
    """
    value = section.get(f"{name}_mb")
    if value is None and (text := section.get(name)) is not None:
        unit = UNITS.get(str(text).strip().upper()[-1:])
        if unit is None:
            raise ValueError(f'environment.{name}="{text}": expected a size like "2G" or "512M"')
        value = int(float(str(text).strip()[:-1]) * unit)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"environment.{name}_mb={value}: expected a whole number above 0")
    return value


def _as_number(key: str, value: Any) -> float | None:
    """Return a number above 0, or None for None. Raises ValueError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{key}={value}: expected a number")
    if value <= 0:
        raise ValueError(f"{key}={value}: must be more than 0")
    return float(value)


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _as_texts(key: str, value: Any) -> dict[str, str]:
    """Return a table of environment variables as texts. Raises ValueError for a wrong name."""
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key}: expected a table of texts")
    if bad := [name for name in value or {} if not NAME.fullmatch(name)]:
        raise ValueError(f"{key}.{bad[0]}: is no name of a variable")
    return {name: str(text) for name, text in (value or {}).items()}


def _artifact_path(item: Any) -> str:
    """Return an artifact's path: the item itself, or its `source`. Raises ValueError."""
    source = item.get("source") if isinstance(item, Mapping) else item
    if not isinstance(source, str) or not source.startswith("/") or ".." in source.split("/"):
        raise ValueError(f"artifacts={source}: expected an absolute path in the container")
    return source
