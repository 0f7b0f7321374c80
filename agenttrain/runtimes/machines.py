"""A machine for each rollout: started, lent to tools and agents, graded, ended."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from agenttrain.runtimes import images
from agenttrain.runtimes.allowlist import common_hosts
from agenttrain.runtimes.base import EndsProcesses, MachineLost, MachineSpec, Runtime
from agenttrain.runtimes.config import Client, Grade, Network, RuntimeConfig
from agenttrain.runtimes.containers import Containers
from agenttrain.runtimes.harbor import grading
from agenttrain.runtimes.harbor.steps import Progress
from agenttrain.runtimes.harbor.task import (
    COLUMN,
    TASK_FILE,
    HarborTask,
    Healthcheck,
    TaskContainer,
    read_task,
    resolve_variables,
)
from agenttrain.types import ConfigError, Rollout, RolloutMachine, Task, ToolUnavailable
from agenttrain.utils.locate import locate
from agenttrain.utils.redaction import hide_secrets

IMAGE = "image"
"""Column of a row with its image's name, or a folder with a Dockerfile."""
CGROUPS = Path("/sys/fs/cgroup")
CLIENT_S = 20.0
RETRY_S = 0.5
"""Seconds before a start is tried again, doubled each time."""
SHOWN = 5
"""Files of strangers that a refusal lists."""


class Machines:
    """Starts, grades and ends the machines of a run: the containers in which rollouts run commands.

    Example::

        machines = Machines(RuntimeConfig(name="podman", image="debian:12"))
        machine = await machines.start("train-3-0-1", task)
        await machine.exec(["ls"], timeout_s=5.0)
        await machines.grade(rollout)             # a Harbor task's own tests
        await machines.release("train-3-0-1")

    A Harbor task is a folder with an image, an instruction and tests that give the rewards. If it
    has several steps, the rollout loop calls `next_step` between them, which grades the step that
    ends: `Progress.begun` counts the steps that were prepared, `Progress.grades` has the rewards of
    those that have ended. Tests run in the rollout's own container (`_grade_shared`) or in a new
    one (`_grade_fresh`). No file of a task runs before `_check_trust`.
    """

    def __init__(
        self, settings: RuntimeConfig, runtime: Runtime | None = None, install: str | None = None
    ) -> None:
        """`runtime` replaces the one that the settings name. Raises ConfigError.

        `install` is a script that runs once in every image for rollouts, but not in those for the
        tests of Harbor's tasks.
        """
        self.settings = settings
        self._runtime = runtime or make_runtime(settings)
        self._is_custom = settings._target_ is not None or runtime is not None
        """True: the runtime is a class of the user's. It gets the name of an image as the settings
        or the row have it: nothing is built or pulled for it."""
        self._machines: dict[str, RolloutMachine] = {}
        """Machines of the rollouts in flight, by rollout id."""
        self._progress: dict[str, Progress] = {}
        """Steps of those rollouts whose task has several, by rollout id."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the two semaphores. `_bind_to_loop` makes them for the loop of `start`; the
        ones made here are never acquired."""
        self._running = asyncio.Semaphore()
        """Bounds the machines that run together: `max_running` of the settings."""
        self._starting = asyncio.Semaphore()
        """Bounds the machines that start together: `max_starting`."""
        self._env = {name: os.environ[name] for name in settings.env if name in os.environ}
        """Variables of this process that machines get, and that Harbor tasks may read."""
        self._images: dict[tuple[str, bool], str] = {}
        """(name or folder of an image, True for a rollout's machine and False for one of tests) ->
        name of the image to start: one that was built, or in which `install` was run."""
        self._install = None if install is None else Path(install).expanduser()
        if self._install is not None and not self._install.is_file():
            raise ConfigError(f"agent.install={install}: there is no such file")

    def machine_of(self, rollout_id: str) -> RolloutMachine | None:
        """Return a rollout's machine; None before it is started and after its end."""
        return self._machines.get(rollout_id)

    def limit_s(self, task: Task) -> float | None:
        """Return the seconds that the task itself gives its agent; None if it gives no limit."""
        harbor = harbor_task(task)
        return None if harbor is None else harbor.agent_timeout_s

    async def start(self, rollout_id: str, task: Task) -> RolloutMachine:
        """Start a rollout's machine, and again if that fails. Raises MachineLost."""
        self._bind_to_loop()
        await self._running.acquire()
        try:
            machine = await self._start_with_retries(rollout_id, task)
        except BaseException:
            self._running.release()
            raise
        self._machines[rollout_id] = machine
        if (harbor := harbor_task(task)) is not None and harbor.steps:
            self._progress[rollout_id] = Progress(task=harbor, begun=1)
        return machine

    def current_step(self, rollout_id: str) -> HarborTask | None:
        """Return the step that a rollout has not ended; None if its task has no steps."""
        progress = self._progress.get(rollout_id)
        return None if progress is None or progress.is_over else progress.current

    async def next_step(self, rollout_id: str) -> bool:
        """Grade the current step and begin the next. Raises MachineLost.

        Returns False if none follows: it was the last, or its rewards are below its `min_reward`.
        """
        progress, machine = self._progress[rollout_id], self._machines[rollout_id]
        # Does nothing, unless the rollout's time limit has interrupted the step's preparation.
        await self._ensure_prepared(progress, machine)
        rewards = await self.grade_task(progress.current, machine)
        progress.grades.append(rewards)  # this ends the step: `current` is the next one from here
        if progress.is_over:
            return False
        await self._ensure_prepared(progress, machine)
        return True

    async def _ensure_prepared(self, progress: Progress, machine: RolloutMachine) -> None:
        """Prepare the current step, unless that is done."""
        ended = len(progress.grades)
        if progress.begun > ended:
            return
        await self._prepare_step(progress.current, machine)
        progress.begun = ended + 1

    async def _prepare_step(self, task: HarborTask, machine: RolloutMachine) -> None:
        """Copy a step's files, run its setup, and wait until its health check succeeds."""
        assert task.step_details is not None
        self._check_trust(_setup_files(task))
        await grading.begin_step(machine, task.step_details)
        if task.step_details.healthcheck is not None:
            await wait_until_healthy(machine, task.step_details.healthcheck)

    async def grade(self, rollout: Rollout) -> None:
        """Set the `grades` of a rollout whose task has tests of its own. Raises MachineLost.

        Steps that the rollout has not reached are begun, and graded although the agent does nothing
        in them.
        """
        task, machine = harbor_task(rollout.task), self._machines.get(rollout.rollout_id)
        if task is None or machine is None:
            return
        progress = self._progress.get(rollout.rollout_id)
        if progress is None:
            rollout.grades = await self.grade_task(task, machine)
            return
        while not progress.is_over:
            await self.next_step(rollout.rollout_id)
        rollout.grades = progress.rewards()

    async def grade_task(self, task: HarborTask, machine: RolloutMachine) -> dict[str, float]:
        """Run a task's tests where the settings or the task say, and return their rewards."""
        self._check_trust(tests / "test.sh" for tests in task.tests)
        try:
            env = resolve_variables(task.verifier_env, self._env)
        except ValueError as error:
            raise MachineLost(f"{task.name}: verifier.env: {error}") from error
        # Runs the task's own commands that save files for the tests in the rollout's container.
        await grading.collect(machine, task)
        container = self._new_container_for_tests(task)
        if container is None:
            return await self._grade_shared(task, machine, env)
        return await self._grade_fresh(task, machine, container, env)

    def _new_container_for_tests(self, task: HarborTask) -> TaskContainer | None:
        """Return the container that is started for a task's tests; None: the rollout's own is used.

        `verifier_container` is None if the task names none for its tests.
        """
        match self.settings.grade:
            case Grade.shared:
                return None
            case Grade.task:
                return task.verifier_container
            case Grade.fresh:
                return task.verifier_container or task.container

    async def _grade_shared(
        self, task: HarborTask, machine: RolloutMachine, env: dict[str, str]
    ) -> dict[str, float]:
        """Run a task's tests in the rollout's own container."""
        if isinstance(machine, EndsProcesses) and not self.settings.keep_processes:
            await machine.end_processes()
        # The container runs as this user, if there is one. A task with an `agent_user` has its
        # tests run as root by `grade`: as the agent's user they could be tampered with.
        user = task.agent_user or self.settings.user
        # With bundled tests `grade` copies none. But only the image of the verifier's container is
        # made with them, and this is the agent's: here they have to be copied.
        task_in_shared = replace(task, agent_user=user, bundled_tests=False)
        grades = await grading.grade(machine, task_in_shared, env)
        if task.step_details is not None:  # the agent must not see the tests in the next step
            await grading.remove_tests(machine)
        return grades

    async def _grade_fresh(
        self,
        task: HarborTask,
        machine: RolloutMachine,
        container: TaskContainer,
        env: dict[str, str],
    ) -> dict[str, float]:
        """Run a task's tests in a new container, with the artifacts of the rollout's."""
        fresh = await self._start_container(task, container, user=task.verifier_user)
        try:
            # Commands in this container run as the verifier's user, with which it was started.
            task_in_fresh = replace(task, agent_user=None, verifier_user=None)
            await grading.make_folders(fresh)
            await grading.move_artifacts(machine, fresh, task_in_fresh)
            return await grading.grade(fresh, task_in_fresh, env)
        finally:
            await self._end(fresh)

    async def solve(self, task: HarborTask, machine: RolloutMachine) -> str | None:
        """Run a task's solution; return its problem, or None. Raises MachineLost."""
        if task.solution is None:
            return "it has no solution/solve.sh"
        self._check_trust([task.solution / "solve.sh"])
        try:
            env = resolve_variables(task.solution_env, self._env)
        except ValueError as error:
            return f"solution.env: {error}"
        result = await grading.solve(machine, task, env)
        if result.timed_out:
            return f"its solution took longer than {task.solution_timeout_s:g} s"
        return None if result.code == 0 else f"its solution ended with exit code {result.code}"

    async def release(self, rollout_id: str) -> None:
        """End a rollout's machine. A client that fails leaves it to the end of the run."""
        machine = self._machines.pop(rollout_id, None)
        self._progress.pop(rollout_id, None)
        if machine is None:
            return
        try:
            await self._end(machine)
        finally:  # also where this is cancelled: the end goes on by itself
            self._running.release()

    async def aclose(self) -> None:
        """End all machines."""
        try:
            for rollout_id in list(self._machines):
                await self.release(rollout_id)
        finally:
            await self._runtime.aclose()

    async def prepare(self, tasks: Sequence[Task]) -> None:
        """Build the images of tasks, before anything is sampled. Raises MachineLost.

        An image that a task gives by name is not built: this machine must have it, or may pull it.
        """
        harbor_tasks = [task for task in map(harbor_task, tasks) if task is not None]
        tasks_and_steps = [part for task in harbor_tasks for part in (task, *task.steps)]
        # Tests may have an image for each step (`verifier_container`). A rollout starts in the
        # image of its task's `container`, and stays in it for all steps.
        only_for_tests = {
            part.verifier_container.image
            for part in tasks_and_steps
            if part.verifier_container is not None
        }
        only_for_tests -= {task.container.image for task in harbor_tasks}
        for image, timeout_s in self.images_of(tasks).items():
            # Images for rollouts get the agent's program installed.
            await self._make_image(image, timeout_s, for_rollout=image not in only_for_tests)

    def images_of(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Return the images that tasks need, with the seconds that the build of each may take.

        Raises ConfigError for tasks without an image, tasks that cannot be run, and folders that
        are not trusted.
        """
        timeouts: dict[str, float] = {}
        for task in tasks:
            harbor = harbor_task(task)
            if harbor is None:
                timeouts[self._image_name(task)] = self.settings.build_timeout_s
                continue
            for step_or_task in (harbor, *harbor.steps):
                # The container of the agent, and that of the tests if they have one of their own.
                for container in (step_or_task.container, step_or_task.verifier_container):
                    if container is not None:
                        # Tasks may share an image: it may take as long as the slowest one says.
                        earlier_s = timeouts.get(container.image, 0)
                        timeouts[container.image] = max(self._build_timeout(container), earlier_s)
        self._check_trust(_files_to_trust(tasks, timeouts))
        return timeouts

    def _build_timeout(self, container: TaskContainer) -> float:
        """Return the seconds that an image may take to build: the task's, at most the run's."""
        return min(container.build_timeout_s, self.settings.build_timeout_s)

    def _check_trust(self, files: Iterable[Path]) -> None:
        """Raise ConfigError if files of task folders would run, and are not trusted."""
        if self.settings.trust or not (listed := list(files)):
            return
        more = "" if len(listed) <= SHOWN else f"\n  … and {len(listed) - SHOWN} more"
        shown = "\n".join(f"  {file}" for file in listed[:SHOWN])
        raise ConfigError(
            "runtime.trust=false: these files of task folders would run in containers, and "
            f"they are code of whoever made them:\n{shown}{more}\nread them, and add "
            "runtime.trust=true"
        )

    def _bind_to_loop(self) -> None:
        """Make the limits anew for another event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._running = asyncio.Semaphore(self.settings.max_running)
            self._starting = asyncio.Semaphore(self.settings.max_starting)

    async def _start_with_retries(self, rollout_id: str, task: Task) -> RolloutMachine:
        """Start a machine, at most `retries` times more if it fails."""
        pause = RETRY_S
        for attempt in range(self.settings.retries + 1):
            try:
                return await self._start(rollout_id, task)
            except MachineLost as error:
                if attempt == self.settings.retries:
                    text = hide_secrets(str(error))
                    raise MachineLost(f"{self.settings.label}: {text}") from error
                await asyncio.sleep(pause)
                pause *= 2
        raise AssertionError

    async def _start(self, rollout_id: str, task: Task) -> RolloutMachine:
        """Start the container of a rollout; of a Harbor task, prepared for the agent's first turn.

        Raises MachineLost.
        """
        harbor = harbor_task(task)
        labels = {"agenttrain.rollout": rollout_id}
        # `_starting` bounds the starts of the runtime, not the builds of images before them. With a
        # Harbor task `_start_container` takes it, else this function does.
        if harbor is not None:
            user = harbor.agent_user or self.settings.user
            machine = await self._start_container(
                harbor, harbor.container, user=user, labels=labels, for_rollout=True
            )
            try:
                await grading.make_folders(machine)
                if harbor.container.healthcheck is not None:
                    await wait_until_healthy(machine, harbor.container.healthcheck)
                if harbor.steps:
                    await self._prepare_step(harbor.steps[0], machine)
            except BaseException:
                await self._end(machine)
                raise
            return machine
        name, timeout_s = self._image_name(task), self.settings.build_timeout_s
        image = await self._make_image(name, timeout_s, for_rollout=True)
        async with self._starting:
            return await self._runtime.start(self._make_spec(image, labels))

    async def _start_container(
        self,
        task: HarborTask,
        container: TaskContainer,
        *,
        user: str | None,
        labels: Mapping[str, str] | None = None,
        for_rollout: bool = False,
    ) -> RolloutMachine:
        """Start a container that a Harbor task describes, within the run's own limits."""
        self._check_trust([task.folder / TASK_FILE])
        try:
            env = resolve_variables(container.env, self._env)
        except ValueError as error:
            raise MachineLost(f"{task.name}: environment.env: {error}") from error
        timeout_s = self._build_timeout(container)
        image = await self._make_image(container.image, timeout_s, for_rollout=for_rollout)
        spec = self._make_spec(image, labels or {})
        is_open, hosts = self._network_of(container)
        spec = replace(
            spec,
            cpus=min(container.cpus or spec.cpus, spec.cpus),
            memory_mb=min(container.memory_mb or spec.memory_mb, spec.memory_mb),
            disk_mb=min(container.disk_mb or spec.disk_mb, spec.disk_mb),
            is_open=is_open,
            hosts=hosts,
            user=user,
            workdir=container.workdir or spec.workdir,
            env={**spec.env, **env},
        )
        async with self._starting:
            return await self._runtime.start(spec)

    def _network_of(self, container: TaskContainer) -> tuple[bool, tuple[str, ...]]:
        """Return True for an open network, else the hosts of a proxy, as task and run allow."""
        is_open, hosts = self.settings.network is Network.open, tuple(self.settings.hosts)
        if not container.wants_network:
            return False, ()
        if container.hosts is None:  # the task limits nothing
            return is_open, hosts
        return False, container.hosts if is_open else common_hosts(container.hosts, hosts)

    def _make_spec(self, image: str, labels: Mapping[str, str]) -> MachineSpec:
        """Return a container's description by the settings; Harbor tasks change parts of it."""
        settings = self.settings
        return MachineSpec(
            image=image,
            cpus=settings.cpus,
            memory_mb=settings.memory_mb,
            disk_mb=settings.disk_mb,
            processes=settings.processes,
            open_files=settings.open_files,
            is_open=settings.network is Network.open,
            hosts=tuple(settings.hosts),
            user=settings.user,
            workdir=settings.workdir,
            env=self._env,
            capabilities=tuple(settings.capabilities),
            labels=labels,
        )

    def _image_name(self, task: Task) -> str:
        """Return the image of a task's row. Raises ConfigError if it has none."""
        image = task.columns.get(IMAGE) or self.settings.image
        if not isinstance(image, str) or image.startswith("-"):
            raise ConfigError(
                f"task {task.task_id}: {IMAGE}={image!r}: names no image; set runtime.image=…, or "
                f"a column {IMAGE!r}"
            )
        return image

    async def _make_image(self, image: str, timeout_s: float, *, for_rollout: bool) -> str:
        """Return the name of an image that this machine has. Raises MachineLost.

        `image` is a name, or a folder with a Dockerfile, of which the image is built. Only images
        for rollouts get the script of the agent's program (`_install`) run in them, not those for
        tests.
        """
        if images.is_folder(image):  # rows that no check has seen come here too
            self._check_trust([images.folder_of(image) / images.DOCKERFILE])
        if self._is_custom:  # a runtime of the user's own makes its images itself
            return image
        key = (image, for_rollout)
        if key not in self._images:
            client, is_open = self.settings.client, self.settings.network is Network.open
            if images.is_folder(image):
                folder = images.folder_of(image)
                name = await images.build(client, folder, timeout_s=timeout_s, is_open=is_open)
            elif self.settings.pull or await images.exists(client, image):
                name = image
            else:
                raise MachineLost(
                    f"image {image}: this machine does not have it; build or load it first "
                    f"({client} load -i …), or pull it with runtime.pull=true"
                )
            if for_rollout and self._install is not None:
                name = await images.install(
                    client, name, self._install, timeout_s=timeout_s, is_open=is_open
                )
            self._images[key] = name
        return self._images[key]

    async def _end(self, machine: RolloutMachine) -> None:
        """Stop a machine, also if this is cancelled. A failure leaves it to the end of the run."""
        with suppress(ToolUnavailable):
            await asyncio.shield(asyncio.ensure_future(machine.stop()))


async def wait_until_healthy(machine: RolloutMachine, check: Healthcheck) -> None:
    """Run a health check until it succeeds. Raises MachineLost once all its tries are used up."""
    loop = asyncio.get_running_loop()
    grace_ends, failures = loop.time() + check.start_period_sec, 0
    while True:
        command = ["sh", "-c", check.command]
        result = await machine.exec(command, timeout_s=check.timeout_sec)
        if result.code == 0:
            return
        in_grace = loop.time() < grace_ends
        if not in_grace:
            failures += 1
        if failures >= check.retries:
            raise MachineLost(
                f"environment.healthcheck: `{check.command}` failed {failures} times, last with: "
                f"{result.text.strip()[-200:]}"
            )
        await asyncio.sleep(check.start_interval_sec if in_grace else check.interval_sec)


def harbor_task(task: Task) -> HarborTask | None:
    """Return the Harbor task of a row; None for a row without one. Raises BadTask."""
    folder = task.columns.get(COLUMN)
    return None if folder is None else read_task(Path(str(folder)))


def make_runtime(settings: RuntimeConfig) -> Runtime:
    """Return the runtime that the settings name: a class of the user's, or containers.

    Raises ConfigError.
    """
    if settings._target_ is not None:
        target = locate(settings._target_, key="runtime._target_")
        try:
            runtime: Runtime = target(**settings.options)
        except TypeError as error:
            raise ConfigError(f"runtime._target_={settings._target_}: {error}") from error
        return runtime
    return Containers(settings.client, start_timeout_s=settings.start_timeout_s, pull=settings.pull)


def runtime_problems(settings: RuntimeConfig) -> Iterator[str]:
    """Yield reasons why no container can be started on this machine, without starting one."""
    if not settings.is_client:
        return
    key = f"runtime.client={settings.client}"
    if shutil.which(settings.client) is None:
        yield (
            f"{key}: the program is not installed; apt-get install {package_of(settings.client)}, "
            "or set runtime=bwrap"
        )
    elif (problem := client_problem(settings.client)) is not None:
        reason, remedy = problem
        yield f"{key}: {reason}; {remedy}"
    is_podman = settings.client is Client.podman  # docker's daemon is root
    if is_podman and (missing := limits_problem(is_root=os.geteuid() == 0)) is not None:
        yield f"{key}: {missing}"
    if not hasattr(tarfile, "data_filter"):
        yield (
            f"{key}: Python {sys.version.split()[0]} cannot unpack a container's files safely; "
            "use Python 3.11.4 or newer"
        )
    if settings.network is Network.allowlist and os.geteuid():
        yield (
            "runtime.network=allowlist: only root can open a proxy in a container; run as root, or "
            "set runtime.network=endpoint"
        )


def limits_problem(*, is_root: bool, cgroups: Path = CGROUPS) -> str | None:
    """Return why podman would not limit memory and processes; None if it does."""
    if is_root or (cgroups / "cgroup.controllers").is_file():
        return None
    return (
        "without root it limits neither memory nor processes under cgroup v1; run as root, or boot "
        "this machine with systemd.unified_cgroup_hierarchy=1"
    )


@cache
def client_problem(client: str) -> tuple[str, str] | None:
    """Return why a client can make no containers, and the remedy; None if it answers."""
    try:
        result = subprocess.run(
            [client, "info"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"does not answer within {CLIENT_S:g} s", "restart its daemon"
    except OSError as error:
        return str(error.strerror), "install it again"
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it fails"]
        return lines[-1], "start its daemon, or repair it, until `info` works"
    if os.geteuid() and client == "podman":
        user = getpass.getuser()
        names = Path("/etc/subuid")
        listed = names.read_text().splitlines() if names.is_file() else []
        if not any(line.startswith((f"{user}:", f"{os.getuid()}:")) for line in listed):
            remedy = f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
            return f"/etc/subuid has no ids for {user}", remedy
    return None


def package_of(client: Client) -> str:
    """Return Debian's package of a client."""
    return "podman runc" if client is Client.podman else "docker.io"


def _files_to_trust(tasks: Sequence[Task], needed: Iterable[str]) -> Iterator[Path]:
    """Yield the files whose code would run: Dockerfiles, and the tests and setups of Harbor tasks.

    `needed` are images: names, which have no file to trust, or folders with a Dockerfile.
    """
    for image in needed:
        if images.is_folder(image):
            yield images.folder_of(image) / images.DOCKERFILE
    for task in tasks:
        harbor = harbor_task(task)
        if harbor is None:
            continue
        # A task of several steps has its files in the steps.
        for step_or_task in harbor.steps or (harbor,):
            yield from (tests / "test.sh" for tests in step_or_task.tests)
            yield from _setup_files(step_or_task)


def _setup_files(task: HarborTask) -> list[Path]:
    """Return the script that prepares a step, if there is one."""
    if task.step_details is None:
        return []
    script = task.step_details.workdir / grading.SETUP
    return [script] if script.is_file() else []
