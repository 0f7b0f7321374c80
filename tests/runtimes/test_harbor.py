"""Harbor's tasks: what is read and refused, and grading on the double of a runtime."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import parts
import pytest
from container_kit import (
    BASE,
    IMAGE,
    machines,
    make_image,
    make_task,
    needs_containers,
    ours,
)

from agenttrain import cli
from agenttrain.data.harbor import harbor_rows
from agenttrain.data.tasks import to_task
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.builtin.harbor import harbor
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.runtimes.base import MachineLost, MachineSpec
from agenttrain.runtimes.config import RuntimeConfig
from agenttrain.runtimes.containers import size_of
from agenttrain.runtimes.harbor import grading
from agenttrain.runtimes.harbor.keys import KEYS, Use
from agenttrain.runtimes.harbor.steps import Progress
from agenttrain.runtimes.harbor.task import BadTask, read_task, resolve_variables
from agenttrain.runtimes.local import LocalMachine, LocalRuntime
from agenttrain.runtimes.machines import Machines, harbor_task
from agenttrain.tools.build import build_toolbox
from agenttrain.types import ConfigError, Rollout, StopReason, Task

TASKS = Path(__file__).parents[2] / "examples" / "terminal_agent" / "tasks"
SWE = TASKS.parents[1] / "swe_mini" / "tasks"
BASH = {
    "_target_": "agenttrain.tools.sandbox.tool.interpreter",
    "language": "bash",
    "sandbox": "runtime",
}
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "harbor.md"


def test_the_example_tasks_are_rows() -> None:
    rows = harbor_rows(str(TASKS))
    assert len(rows) == 10
    assert rows[0]["task_id"] == "archive"
    assert rows[0]["prompt"].startswith("Pack the folder /app/docs")
    task = read_task(TASKS / "archive")
    assert task.artifacts == ("/app/docs.tar.gz",)
    assert task.verifier_container == task.container
    assert not task.bundled_tests
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (120.0, 60.0)
    assert (task.container.memory_mb, task.container.wants_network) == (512, False)


HEALTH = "[environment]\ndocker_image='x'\n[environment.healthcheck]\ncommand = 'true'\n"
REFUSED = {
    'steps = [{ name = "a" }]': "instruction.md: is missing in steps/a",
    "steps = [{ name = '../a' }]": "steps.name=../a: expected the name of a folder",
    "steps = [{ name = 'a', agent = { user = 'x' } }]": "steps.agent.user: one user holds for",
    "steps = [{ name = 'a', min_reward = 'x' }]": "steps.min_reward=x: expected a number",
    "[environment]\ndocker_image='x'\ngpus = 1": "environment.gpus: containers here have no GPU",
    "[environment]\ndocker_image='x'\nprivileged = true": "environment.privileged: is no key",
    "[environment]\ndocker_image='x'\ndevices = ['/dev/kvm']": "environment.devices: is no key",
    "[environment]\ndocker_image='x'\nvolumes = ['/:/host']": "environment.volumes: is no key",
    "[environment]\ndocker_image='x'\nos = 'windows'": "environment.os=windows",
    "[environment]\ndocker_image='x'\nnetwork_mode = 'host'": "environment.network_mode=host",
    "[environment]\ndocker_image='x'\nallowed_hosts = ['a.com']": "allowed_hosts: are those of",
    "artifacts = ['../etc/passwd']": "artifacts=../etc/passwd: expected an absolute path",
    "[agent]\ntimeout_sec = -1": "agent.timeout_sec=-1: must be more than 0",
    "[verifier]\nenvironment_mode = 'x'": "verifier.environment_mode=x",
    f"{HEALTH}timeout_sec = '5'": "environment.healthcheck.timeout_sec=5: expected a number",
    f"{HEALTH}interval_sec = -1": "environment.healthcheck.interval_sec=-1: must be more than 0",
    f"{HEALTH}retries = 0": "environment.healthcheck.retries=0: expected a whole number",
    f"{HEALTH}start_period_sec = 0\ncommand2 = 1": "environment.healthcheck.command2: is no key",
    f"[agent]\ntimeout_sec = 1{'0' * 400}": "too large",
    "[environment]\ndocker_image='x'\nmemory = '1e400G'": "cannot convert float infinity",
    "[[verifier.collect]]\ntimeout_sec = 1": "command: is missing",
    "[verifier.env]\n'a b' = 'x'": "verifier.env.a b: is no name of a variable",
    "[agent]\nuser = '\\u0000'": "holds a NUL character",
    "[environment]\ndocker_image='--privileged'": "docker_image=--privileged: names no image",
}
"""task.toml -> part of the refusal."""


@pytest.mark.parametrize("toml", REFUSED)
def test_tasks_that_ask_for_more_are_refused_by_the_key(toml: str, tmp_path: Path) -> None:
    with pytest.raises(BadTask) as caught:
        read_task(make_task(tmp_path / "task", toml))
    assert REFUSED[toml] in str(caught.value)


STEPS = """
artifacts = ["/all"]
multi_step_reward_strategy = "{strategy}"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 40.0
[verifier.env]
A = "1"
[environment]
docker_image = "{image}"
[[steps]]
name = "write"
min_reward = {least}
artifacts = ["/one"]
[[steps]]
name = "copy"
[steps.agent]
timeout_sec = 5.0
[steps.verifier.env]
B = "2"
"""


def make_steps(folder: Path, *, strategy: str = "mean", least: float = 0.0) -> Path:
    """A task of two steps: write 1 to /tmp/a, then copy /tmp/seed, which the setup makes."""
    toml = STEPS.format(strategy=strategy, least=least, image=IMAGE)
    make_task(folder, toml, ". /tests/check.sh", IMAGE)
    check = 'if grep -q "$2" "$1"; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
    (folder / "tests" / "lib.sh").write_text(f"check() {{ {check}; }}\n")
    for name, path, instruction in (
        ("write", "/tmp/a", "Write 1 to /tmp/a."),
        ("copy", "/tmp/b", "Copy /tmp/seed to /tmp/b."),
    ):
        step = folder / "steps" / name
        (step / "tests").mkdir(parents=True)
        (step / "instruction.md").write_text(f"{instruction}\n")
        (step / "tests" / "check.sh").write_text(f". /tests/lib.sh; check {path} 1\n")
        (step / "solution").mkdir()
        (step / "solution" / "solve.sh").write_text(
            "#!/bin/sh\n" + ("echo 1 > /tmp/a" if name == "write" else "cp /tmp/seed /tmp/b") + "\n"
        )
    (folder / "steps" / "copy" / "workdir").mkdir()
    (folder / "steps" / "copy" / "workdir" / "seed.txt").write_text("1\n")
    (folder / "steps" / "copy" / "workdir" / "setup.sh").write_text("cp seed.txt /tmp/seed\n")
    return folder


def test_steps_have_what_their_task_has_and_their_own(tmp_path: Path) -> None:
    (row,) = harbor_rows(str(make_steps(tmp_path / "task")))
    task = to_task(row, 0)
    assert task.messages[0]["content"] == "Write 1 to /tmp/a."
    assert task.user_turns == ("Copy /tmp/seed to /tmp/b.",)
    whole = read_task(tmp_path / "task")
    write, copy = whole.steps
    assert (whole.agent_timeout_s, write.agent_timeout_s, copy.agent_timeout_s) == (35.0, 30.0, 5.0)
    assert (write.verifier_timeout_s, write.artifacts) == (40.0, ("/all", "/one"))
    assert (write.verifier_env, copy.verifier_env) == ({"A": "1"}, {"A": "1", "B": "2"})
    assert copy.tests == [tmp_path / "task" / "tests", tmp_path / "task" / "steps/copy/tests"]
    assert copy.solution == tmp_path / "task" / "steps/copy/solution"


def test_a_task_s_rewards_are_those_of_its_steps(tmp_path: Path) -> None:
    progress = Progress(task=read_task(make_steps(tmp_path / "mean", least=0.5)))
    assert not progress.is_over
    progress.grades.append({"reward": 0.5})
    assert not progress.is_over
    progress.grades.append({"reward": 0.0, "style": 1.0})
    assert progress.is_over
    assert progress.rewards() == {"reward": 0.25, "style": 0.5}  # 0.5 / 2 and 1 / 2
    low = Progress(task=progress.task, grades=[{"reward": 0.25}])
    assert low.is_over
    assert low.rewards() == {"reward": 0.25}
    last = Progress(
        task=read_task(make_steps(tmp_path / "final", strategy="final")), grades=progress.grades
    )
    assert last.rewards() == {"reward": 0.0, "style": 1.0}


WRITE = parts.call("bash", '{"command": "echo 1 > /tmp/a"}')
COPY = parts.call("bash", '{"command": "cp /tmp/seed /tmp/b; ls /tests; ls /logs/verifier"}')
ATTEMPTS = {
    "both": ([WRITE, "Done.<|im_end|>", COPY, "Done.<|im_end|>"], 1.0, 2),
    "the first": ([WRITE, "Done.<|im_end|>", "Done.<|im_end|>"], 0.5, 2),  # (1 + 0) / 2
    "none, which ends it": (["Done.<|im_end|>"], 0.0, 1),  # the second is not begun
}
"""Name -> answers, reward, and number of instructions that the model gets."""


@needs_containers
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_steps_are_turns_with_tests_after_each(tmp_path: Path, attempt: str) -> None:
    make_image()
    answers, reward, instructions = ATTEMPTS[attempt]
    (row,) = harbor_rows(str(make_steps(tmp_path / "task", least=0.5)))

    async def work() -> Rollout:
        pool, toolbox = machines(trust=True), build_toolbox({"bash": BASH})
        context = RolloutContext(
            engine=ScriptedEngine([parts.ids(answer) for answer in answers]),
            chat=parts.chat(),
            toolbox=toolbox,
            limits=parts.LIMITS,
            machines=pool,
        )
        try:
            request = RolloutRequest(task=to_task(row, 0), sampling=Sampling(), rollout_id="r")
            return await run_rollout(request, context)
        finally:
            await toolbox.aclose()
            await pool.aclose()

    done = asyncio.run(work())
    assert (done.stop_reason, done.grades) == (StopReason.completed, {"reward": reward}), done.error
    messages = done.trajectories[0].messages
    assert len([m for m in messages if m["role"] == "user"]) == instructions
    if attempt == "both":  # no tests, and no outputs of theirs
        assert "ls: /tests: No such file" in [m["content"] for m in messages][-2]
        assert "test-stdout" not in [m["content"] for m in messages][-2]


@needs_containers
def test_rehearse_solves_each_step(tmp_path: Path) -> None:
    make_image()
    make_steps(tmp_path / "tasks" / "two", least=0.5)
    words = ("experiment=none", "data=harbor", "reward=[harbor]", "runtime=podman")
    report = tmp_path / "report.json"
    more = ("runtime.trust=true", f"data.path={tmp_path / 'tasks'}", "--json", str(report))
    assert cli.main(["rehearse", *words, "runtime.memory_mb=64", *more]) == 0
    (found,) = json.loads(report.read_text())["attempts"]
    assert (found["oracle"], found["untouched"]) == ({"reward": 1.0}, {"reward": 0.0})


def test_older_keys_are_read(tmp_path: Path) -> None:
    toml = (
        "version = '1.0'\n[environment]\ndocker_image='x'\nmemory = '2G'\nstorage = '512M'\n"
        "allow_internet = false"
    )
    place = read_task(make_task(tmp_path / "task", toml)).container
    assert (place.memory_mb, place.disk_mb, place.wants_network) == (2048, 512, False)


def test_a_task_reaches_what_both_it_and_the_run_allow(tmp_path: Path) -> None:
    place = "[environment]\ndocker_image='x'\nnetwork_mode="
    toml = {
        "all": f"{place}'public'",
        "some": f"{place}'allowlist'\nallowed_hosts=['example.org', '*.a.com']",
        "none": f"{place}'no-network'",
    }
    places = {name: read_task(make_task(tmp_path / name, toml[name])).container for name in toml}
    runs = {
        "open": Machines(RuntimeConfig(name="podman", network="open")),
        "list": Machines(
            RuntimeConfig(name="podman", network="allowlist", hosts=["*.org", "b.a.com"])
        ),
        "endpoint": Machines(RuntimeConfig(name="podman")),
    }
    assert {(r, p): runs[r]._network_of(places[p]) for r in runs for p in places} == {
        ("open", "all"): (True, ()),
        ("open", "some"): (False, ("example.org", "*.a.com")),
        ("open", "none"): (False, ()),
        ("list", "all"): (False, ("*.org", "b.a.com")),
        ("list", "some"): (False, ("example.org", "b.a.com")),
        ("list", "none"): (False, ()),
        ("endpoint", "all"): (False, ()),
        ("endpoint", "some"): (False, ()),
        ("endpoint", "none"): (False, ()),
    }


def test_variables_of_this_machine_are_read_only_if_listed() -> None:
    env = {"A": "${TOKEN}", "B": "${OTHER:-seven}", "C": "plain"}
    with pytest.raises(ValueError, match=r"runtime\.env=\[TOKEN\]"):
        resolve_variables(env, {})
    resolved = {"A": "x", "B": "seven", "C": "plain"}
    assert resolve_variables(env, {"TOKEN": "x"}) == resolved


def test_a_stranger_s_files_need_trust() -> None:
    tasks = [to_task(row, n) for n, row in enumerate(harbor_rows(str(TASKS)))]
    with pytest.raises(ConfigError, match=r"runtime\.trust=true"):
        Machines(RuntimeConfig(name="podman")).images_of(tasks)
    assert len(Machines(RuntimeConfig(name="podman", trust=True)).images_of(tasks)) == 10


def test_an_image_of_several_tasks_may_build_as_long_as_the_slowest_says(tmp_path: Path) -> None:
    for name, seconds in (("a", 900), ("b", 60)):
        toml = f'[environment]\ndocker_image = "shared"\nbuild_timeout_sec = {seconds}\n'
        make_task(tmp_path / name, toml)
    tasks = [to_task(row, n) for n, row in enumerate(harbor_rows(str(tmp_path)))]
    machines = Machines(RuntimeConfig(name="podman", trust=True))
    assert machines.images_of(tasks) == {"shared": 900.0}


def test_the_page_lists_every_key() -> None:
    page = PAGE.read_text()
    assert all(f"| `{key}` | {use} |" in page for key, use in KEYS.items())


def test_rewards_are_picked_by_name() -> None:
    task = Task(task_id="t", messages=())
    several = Rollout(task=task, rollout_id="r", grades={"total": 1.0, "best": 0.0})
    assert harbor(several, name="best") == 0.0
    with pytest.raises(ValueError, match="wrote total, best"):
        harbor(several)
    assert harbor(Rollout(task=task, rollout_id="r", grades={"only": 0.5})) == 0.5
    assert harbor(Rollout(task=task, rollout_id="r")) is None


@pytest.mark.skipif(
    "HARBOR_PYTHON" not in os.environ, reason="needs HARBOR_PYTHON, a Python with harbor 0.26"
)
def test_every_key_of_harbor_s_schema_is_known() -> None:
    script = """
import json, typing
from pydantic import BaseModel
from harbor.models.task.config import TaskConfig
def models(hint):
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [m for part in typing.get_args(hint) for m in models(part)]
def walk(model, prefix, depth=0):
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in models(field.annotation):
            if depth < 4:
                yield from walk(inner, f"{prefix}{name}.", depth + 1)
print(json.dumps(list(walk(TaskConfig, ""))))
"""
    printed = subprocess.run(
        [os.environ["HARBOR_PYTHON"], "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    missing = set()
    for key in json.loads(printed.stdout.strip().splitlines()[-1]):
        parts = key.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        refused = any(KEYS.get(name) is not None and KEYS[name] is not Use.used for name in above)
        is_section = any(name.startswith(f"{key}.") for name in KEYS)
        if key not in KEYS and not is_section and not refused:
            missing.add(key)
    assert missing == set()


def outcome(tasks: list[Task], *, solved: bool) -> dict[str, dict[str, float]]:
    """The rewards of each task, solved by its solution or untouched."""

    async def work() -> dict[str, dict[str, float]]:
        pool = Machines(RuntimeConfig(name="podman", trust=True, memory_mb=512))
        grades = {}
        try:
            for task in tasks:
                harbor_of = harbor_task(task)
                assert harbor_of is not None
                machine = await pool.start(task.task_id, task)
                if solved:
                    assert await pool.solve(harbor_of, machine) is None
                grades[task.task_id] = await pool.grade_task(harbor_of, machine)
                await pool.release(task.task_id)
        finally:
            await pool.aclose()
        return grades

    return asyncio.run(work())


@needs_containers
@pytest.mark.parametrize(
    ("examples", "number"),
    [([TASKS / "csv-total"], 1), pytest.param([TASKS, SWE], 13, marks=pytest.mark.long)],
)
def test_rehearse_lists_tasks_whose_solution_fails_or_that_pass_untouched(
    tmp_path: Path, examples: list[Path], number: int
) -> None:
    """The example tasks are good, and two more are not."""
    give = "echo {} > /logs/verifier/reward.txt"
    for name, reward in (("impossible", 0), ("free", 1)):
        folder = make_task(tmp_path / name, test=give.format(reward), image=BASE)
        (folder / "solution").mkdir()
        (folder / "solution" / "solve.sh").write_text("#!/bin/sh\ntrue\n")
    report = tmp_path / "report.json"
    words = ("experiment=none", "data=harbor", "reward=[harbor]", "runtime=podman")
    paths = ",".join(map(str, [*examples, tmp_path]))
    more = ("runtime.trust=true", f"data.path=[{paths}]", "--json", str(report))
    assert cli.main(["rehearse", *words, *more]) == 1
    found = json.loads(report.read_text())
    attempts = {attempt["task"]: attempt for attempt in found["attempts"]}
    assert {
        name: attempt["problems"] for name, attempt in attempts.items() if attempt["problems"]
    } == {
        "impossible": ["the solution does not pass the tests"],
        "free": ["the tests pass without any attempt"],
    }
    assert (found["tasks"], found["bad"]) == (number + 2, 2)
    good = [attempt for attempt in attempts.values() if not attempt["problems"]]
    assert {(a["oracle"]["reward"], a["untouched"]["reward"]) for a in good} == {(1.0, 0.0)}
    assert attempts["csv-total"]["oracle"] == {"total": 1.0, "best": 1.0, "reward": 1.0}


@pytest.mark.parametrize(
    "text", ['{"reward": 1' + "0" * 400 + "}", "[" * 65_000, '{"\\ud800": 1}', "{}", "[1]", '"1"']
)
def test_no_reward_file_is_more_than_trouble_of_its_rollout(text: str) -> None:
    with pytest.raises(MachineLost, match="reward"):
        grading._read_rewards(grading.REWARD_JSON, text)


@needs_containers
def test_tests_of_an_image_of_their_own_run_there(tmp_path: Path) -> None:
    """The image holds the tests, so none are copied, and those that it has are not removed."""
    toml = '[verifier]\nenvironment_mode = "separate"'
    give = "test -f /tests/answer && echo 1 > /logs/verifier/reward.txt"
    folder = make_task(tmp_path / "separate", toml, give, BASE)
    (folder / "tests" / "answer").write_text("42")
    (folder / "tests" / "Dockerfile").write_text(f"FROM {BASE}\nCOPY . /tests/\n")
    task = Task(task_id="t", messages=(), columns={"harbor": str(folder)})
    assert outcome([task], solved=False) == {"t": {"reward": 1.0}}


BAD_TESTS = {
    "true": "wrote neither",
    "echo x > /logs/verifier/reward.txt": "is no reward",
    ": > /logs/verifier/reward.txt": "left it empty",
    "echo nan > /logs/verifier/reward.txt": "a reward is a finite number",
    'echo \'{"a": "1"}\' > /logs/verifier/reward.json': "a reward is a finite number",
    "sleep 30": "verifier.timeout_sec=1",
}


@needs_containers
def test_tests_that_fail_are_trouble_of_the_infrastructure(tmp_path: Path) -> None:
    for number, (script, problem) in enumerate(BAD_TESTS.items()):
        toml = "[verifier]\ntimeout_sec = 1.0" if "sleep" in script else ""
        folder = make_task(tmp_path / str(number), toml, script, BASE)
        task = Task(task_id="t", messages=(), columns={"harbor": str(folder)})
        with pytest.raises(MachineLost) as caught:
            outcome([task], solved=False)
        assert problem in str(caught.value)


@needs_containers
@pytest.mark.skipif(
    "HARBOR_PYTHON" not in os.environ, reason="needs HARBOR_PYTHON, a Python with harbor 0.26"
)
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_grades_equal_those_of_harbor(tmp_path: Path) -> None:
    """Harbor's podman back end knows no `no-network`: it gets the tasks without this line."""
    copies = tmp_path / "tasks"
    shutil.copytree(TASKS, copies)
    for folder in copies.iterdir():
        file = folder / "task.toml"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if "network_mode" not in line))
    conf = tmp_path / "containers.conf"
    conf.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "runc"\n'
    )
    python = Path(os.environ["HARBOR_PYTHON"])
    env = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "CONTAINERS_CONF": str(conf),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    env.pop("PYTHONPATH", None)
    tasks = [to_task(row, n) for n, row in enumerate(harbor_rows(str(TASKS)))]
    for agent, solved in (("oracle", True), ("nop", False)):
        subprocess.run(
            [python.parent / "harbor", "run", "-p", copies, "-a", agent, "-e", "podman", "-n", "2",
             "--timeout-multiplier", "10", "-o", tmp_path / "jobs", "--job-name", agent,
             "-y", "-q"],
            env=env, check=True, capture_output=True,
        )  # fmt: skip
        theirs = {}
        for file in (tmp_path / "jobs" / agent).glob("*/result.json"):
            result = json.loads(file.read_text())
            name = result["task_name"].rpartition("/")[2]
            theirs[name] = result["verifier_result"]["rewards"]
        assert theirs == outcome(tasks, solved=solved)
    assert ours() == []


FORGE = "while :; do echo 1 > /tmp/x; mv /tmp/x /logs/verifier/reward.txt; done"


@needs_containers
@pytest.mark.parametrize("user", [None, "1000"])
def test_a_process_that_the_agent_left_does_not_grade(tmp_path: Path, user: str | None) -> None:
    make_image()
    test = "sleep 0.5; echo 0.25 > /logs/verifier/reward.txt; sleep 0.5; id -u"
    folder = make_task(tmp_path / "task", test=test, image=IMAGE)
    row = Task(task_id="t", messages=(), columns={"harbor": str(folder)})

    async def work() -> dict[str, float]:
        pool = machines(trust=True, user=user)
        try:
            box = await pool.start("r", row)
            await box.exec(["sh", "-c", f"({FORGE}) >/dev/null 2>&1 &"], timeout_s=10)
            rollout = Rollout(task=row, rollout_id="r")
            await pool.grade(rollout)
            log = await box.exec(["cat", "/logs/verifier/test-stdout.txt"], timeout_s=10)
            assert log.text == "0\n"  # the tests run as root, whoever the agent is
            return rollout.grades
        finally:
            await pool.aclose()

    assert asyncio.run(work()) == {"reward": 0.25}


@needs_containers
@pytest.mark.parametrize(("keep", "reward"), [(False, 0.0), (True, 1.0)])
def test_a_service_lasts_for_the_tests_if_the_user_asks(
    tmp_path: Path, keep: bool, reward: float
) -> None:
    make_image()
    served = "wget -q -O- http://127.0.0.1:8000/page | grep -c ready > /logs/verifier/reward.txt"
    folder = make_task(tmp_path / "task", test=served, image=IMAGE)
    row = Task(task_id="t", messages=(), columns={"harbor": str(folder)})
    serve = "mkdir /tmp/www; echo ready > /tmp/www/page; httpd -p 127.0.0.1:8000 -h /tmp/www"

    async def work() -> dict[str, float]:
        pool = machines(trust=True, keep_processes=keep)
        try:
            box = await pool.start("r", row)
            await box.exec(["sh", "-c", serve], timeout_s=10)
            rollout = Rollout(task=row, rollout_id="r")
            await pool.grade(rollout)
            return rollout.grades
        finally:
            await pool.aclose()

    assert asyncio.run(work()) == {"reward": reward}


def test_nothing_of_a_task_folder_runs_without_trust(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "Dockerfile").write_text("FROM scratch\n")
    folder = make_task(tmp_path / "task")
    rows = [{"image": str(tmp_path / "image")}, {"harbor": str(folder)}]

    async def work() -> None:
        runtime = LocalRuntime()
        pool = Machines(RuntimeConfig(name="podman", image="x"), runtime)
        for columns in rows:
            with pytest.raises(ConfigError, match=r"runtime\.trust=false"):
                await pool.start("r", Task(task_id="t", messages=(), columns=columns))
        machine = await runtime.start(MachineSpec(image="x"))
        with pytest.raises(ConfigError, match=r"runtime\.trust=false"):
            await pool.grade_task(read_task(folder), machine)
        await pool.aclose()

    asyncio.run(work())


def test_a_release_that_is_cancelled_or_fails_frees_its_place() -> None:
    class Stubborn(LocalMachine):
        async def stop(self) -> None:
            await asyncio.sleep(0.05)
            raise ValueError("a bug of the back end's")

    class Cloud(LocalRuntime):
        async def start(self, spec: MachineSpec) -> LocalMachine:
            return Stubborn(spec)

    async def work() -> None:
        pool = Machines(RuntimeConfig(name="podman", image="x", max_running=1), Cloud())
        row = Task(task_id="t", messages=())
        await pool.start("a", row)
        ending = asyncio.ensure_future(pool.release("a"))
        await asyncio.sleep(0.01)
        ending.cancel()
        await asyncio.wait((ending,))
        async with asyncio.timeout(5):
            await pool.start("b", row)
            with pytest.raises(ValueError, match="a bug"):
                await pool.release("b")
            await pool.start("c", row)

    asyncio.run(work())


def test_what_a_container_writes_is_measured_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert size_of(str(tmp_path)) == 4096
    inside = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):  # a path of 7,500 characters, which no system call takes
        os.mkdir("x" * 250, dir_fd=inside)
        below = os.open("x" * 250, os.O_RDONLY, dir_fd=inside)
        os.close(inside)
        inside = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=inside)
    os.write(file, bytes(1 << 20))
    assert 1 << 20 < size_of(str(tmp_path)) < 2 << 20
    assert size_of(str(tmp_path), depth=30) == float("inf")
    for descriptor in (file, inside):
        os.close(descriptor)


@needs_containers
def test_a_call_of_a_tool_is_tried_in_a_container(capsys: pytest.CaptureFixture[str]) -> None:
    make_image()
    words = ("experiment=none", "model=shop", "debug=tiny", "tools=[bash]", "stop_tools=[]")
    more = ("runtime=podman", f"runtime.image={IMAGE}", "--call", "bash", '{"command": "hostname"}')
    assert cli.main(["tools", *words, *more]) == 0
    assert "sandbox" in capsys.readouterr().out
    assert ours() == []
