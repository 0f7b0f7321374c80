"""Servers of judges, users and teachers: stubs in processes of their own, as a run has them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_kit import PATIENCE_S, STUB, gone, until
from server_stub import CONFIG, TOKEN_S

from agenttrain import cli
from agenttrain.engines.base import EngineError
from agenttrain.engines.vllm_server.config import RoleConfig, RolesConfig
from agenttrain.engines.vllm_server.roles import RoleServers, await_start, role_folder
from agenttrain.engines.vllm_server.server_records import Condition, ServerRecord, read_record
from agenttrain.runs.roles import start_roles
from agenttrain.runs.setup import Components
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.batch import make_sequences
from agenttrain.training.teacher_scores import ServedTeacher, TeacherFailed
from agenttrain.types import Completion, ConfigError, Finish, Origin, Rollout, Task, Trajectory
from agenttrain.utils.chat_api import ChatApi, ChatUnavailable

SOURCE = Source()
HELLO = [{"role": "user", "content": "Hello!"}]
ALL = (
    *("reward=[judge]", "reward.judge.url=role:judge", "reward.judge.model=null"),
    *("user=llm", "user.url=role:user", "user.prompt='You want {{ answer }}. {{ stop }}'"),
    "algorithm.teacher.path=role:teacher",
)


def composed(*overrides: str) -> RunConfig:
    """A run with a server for each role, of which the settings are valid."""
    models = [f"roles.{name}.model=bundled:shop" for name in ("judge", "user", "teacher")]
    with hydra_session(SOURCE):
        given = open_keys(["debug=tiny", "tracker=none", *ALL, *models, *overrides])
        run = compose_run(given, SOURCE)
        validate(run.config)
    return run.config


@asynccontextmanager
async def serving(run: Path, config: RunConfig) -> AsyncIterator[None]:
    """The servers of the run's roles, which have answered, to the end of the run."""
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        roles = start_roles(config, "train", run, stack, module=STUB)
        await roles.ready()
        yield


def record(run: Path, role: str, number: int = 0) -> ServerRecord:
    found = read_record(role_folder(run, role), number)
    assert found is not None
    return found


async def call(run: Path, role: str, method: str, path: str, body: Any = None) -> Any:
    """Speak with a stub itself."""
    server = record(run, role)
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as http:
        return (await http.request(method, path, json=body)).json()


def rollout(ids: Sequence[int]) -> Rollout:
    """A rollout with the prompt 7 8 9 10 that sampled these ids."""
    task = Task(
        task_id="t", messages=({"role": "user", "content": "2 + 3?"},), columns={"answer": "5"}
    )
    trajectory = Trajectory(rollout_id="g0-0", index=0)
    trajectory.append_context([7, 8, 9, 10], Origin.prompt)
    completion = Completion(
        token_ids=tuple(ids),
        logprobs=(-5.0,) * len(ids),
        finish=Finish.stop,
        versions=((0, len(ids)),),
    )
    trajectory.append_sampled(completion, trajectory.token_ids)
    trajectory.messages.extend([*task.messages, {"role": "assistant", "content": "5"}])
    return Rollout(rollout_id="g0-0", group_id="g0", task=task, trajectories=[trajectory])


def test_a_judge_a_user_and_a_teacher_on_servers_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG, json.dumps({"w": 0.5, "slope": 0.001, "reply": "Score: 7"}))
    run = tmp_path / "run"
    config = composed()
    pids: list[int] = []

    async def main() -> None:
        async with serving(run, config):
            pids.extend(record(run, role).pid for role in ("judge", "user", "teacher"))
            components = Components(config, "train", run)
            one = rollout([20, 21, 2])
            await components.rubric.score([one])
            assert one.reward == 0.7
            user = components.user
            assert user is not None
            said = await user.reply(one.task, [*one.task.messages], replies=0, seed=3)
            assert said == "Score: 7"
            teacher = ServedTeacher(components.roles["teacher"], max_context=64)
            (logprobs,) = (await asyncio.to_thread(teacher.score, make_sequences(one))).values()
            # -(0.5 + 0.001 x id) of 20, 21 and 2
            assert logprobs.tolist() == pytest.approx([-0.52, -0.521, -0.502])
            (asked,) = await call(run, "user", "GET", "/stub/log")
            assert asked["model"] == "user"
            assert asked["messages"][0]["content"] == "You want 5. ###STOP###"
            await components.aclose()

    asyncio.run(main())
    assert gone(pids)
    left = sorted(path.name for path in (role_folder(run, "judge") / "servers").iterdir())
    assert left == ["0.log", "status"]


def test_a_group_is_ranked_by_a_served_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG, json.dumps({"reply": "Ranking: 2 > 1"}))
    run = tmp_path / "run"
    judged = ("reward=[ranking]", "reward.ranking.url=role:judge", "roles.judge.model=bundled:shop")
    with hydra_session(SOURCE):
        config = compose_run(["debug=tiny", "tracker=none", *judged], SOURCE).config
        validate(config)

    async def main() -> None:
        async with serving(run, config):
            components = Components(config, "train", run)
            rollouts = [rollout([20, 21, 2]), rollout([22, 2])]
            rollouts[1].trajectories[0].messages[-1]["content"] = "6"
            await components.rubric.score(rollouts)
            (asked,) = await call(run, "judge", "GET", "/stub/log")
            content = asked["messages"][0]["content"]
            first_is_5 = content.index("[assistant] 5") < content.index("[assistant] 6")
            assert [r.reward for r in rollouts] == ([0.0, 1.0] if first_is_5 else [1.0, 0.0])
            await components.aclose()

    asyncio.run(main())


@pytest.mark.slow
def test_requests_of_a_killed_server_are_sent_to_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(TOKEN_S, "0.5")
    run = tmp_path / "run"
    config = composed("roles.judge.count=2", "roles.judge.health_s=0.1")

    def rows() -> dict[str, list[str]]:
        assert cli.main(["servers", str(run), "--lines", "0"]) == 0
        lines = capsys.readouterr().out.splitlines()[2:]
        return {" ".join(words[:2]): words[2:] for words in map(str.split, lines)}

    async def main() -> None:
        async with serving(run, config):
            servers = RoleServers(run, "judge", config.roles.judge)
            api = ChatApi(url=servers)
            asked = [{"role": "user", "content": str(number)} for number in range(16)]
            work = [asyncio.to_thread(api.ask, [one], str) for one in asked]
            answers = asyncio.gather(*work)
            await until(lambda: servers._fleet and all(m.requests for m in servers._fleet.members))
            os.kill(record(run, "judge", 1).pid, signal.SIGKILL)
            assert await answers == ["Score: 7"] * 16
            await until(lambda: record(run, "judge", 1).boot == 2)
            await until(lambda: [row[0] for row in rows().values()] == ["live"] * 2)
            await until(lambda: sum(int(row[3]) for row in rows().values()) == 16)
            assert list(rows()) == ["judge 0", "judge 1"]
            await asyncio.to_thread(servers.close)

    asyncio.run(main())


@pytest.mark.slow
def test_what_servers_refuse_and_servers_that_are_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = composed("roles.judge.restarts=0", "roles.teacher.restarts=0")

    async def main() -> None:
        async with serving(run, config):
            components = Components(config, "train", run)
            judge = ChatApi(url=components.roles["judge"], retries=0)
            teacher = ServedTeacher(components.roles["teacher"], max_context=64)
            with pytest.raises(ChatUnavailable, match=r"vLLM refuses a request: .* 400"):
                await asyncio.to_thread(judge.ask, [{"role": "user", "content": "x" * 20_000}], str)
            assert await asyncio.to_thread(judge.ask, HELLO, str) == "Score: 7"
            # Ids that the servers do not have, and rollouts that leave no room for a token.
            with pytest.raises(TeacherFailed, match="out of vocabulary"):
                await asyncio.to_thread(teacher.score, make_sequences(rollout([501])))
            assert teacher.score(make_sequences(rollout([20] * 60))) == {}
            # Nobody waits for ever for a server that hangs.
            await call(run, "judge", "POST", "/stub/fault", {"kind": "hang"})
            waiting = asyncio.create_task(asyncio.to_thread(judge.ask, HELLO, str))
            fleet = components.roles["judge"]._fleet
            await until(lambda: fleet is not None and fleet.members[0].requests)
            await asyncio.to_thread(components.close_roles)
            with pytest.raises(ChatUnavailable):
                await waiting
            for role in ("judge", "teacher"):
                os.kill(record(run, role).pid, signal.SIGKILL)
            with pytest.raises(ChatUnavailable, match="judge server 0 was ended by SIGKILL"):
                await asyncio.to_thread(judge.ask, HELLO, str)
            with pytest.raises(TeacherFailed, match=r"roles\.teacher: no server is left"):
                await asyncio.to_thread(teacher.score, make_sequences(rollout([20])))
            await components.aclose()

    asyncio.run(main())


def test_servers_that_do_not_start(tmp_path: Path) -> None:
    config = replace(composed(), roles=RolesConfig(judge=RoleConfig(model="bundled:shop")))
    config.user, config.algorithm.teacher = {}, None

    async def main() -> None:
        async with AsyncExitStack() as stack:
            roles = start_roles(config, "train", tmp_path, stack, module="no_such_module")
            with pytest.raises(EngineError, match=r"judge server 0 did not start(.|\n)*No module"):
                await roles.ready()

    asyncio.run(main())


def test_a_wrapper_that_is_killed_before_its_server_answers(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    starting = ServerRecord(number=0, condition=Condition.starting, wrapper=ended.pid)
    starting.write(tmp_path)
    with pytest.raises(EngineError, match="judge server 0 did not start: it lost its wrapper"):
        asyncio.run(await_start(tmp_path, "judge", 1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward.judge.url=role:jugde"],
            "reward.judge.url=role:jugde: is no role (did you mean 'judge'?); the roles are: judge",
        ),
        (["roles.user.model=null"], "user.url=role:user: roles.user.model is not set; name the"),
        (["algorithm.teacher=null"], "nothing names role:teacher; set algorithm.teacher.path"),
        (
            ["roles.user.model=null", "roles.user.count=2"],
            "roles.user.count=2: has no effect without roles.user.model; set it, or leave this out",
        ),
        (
            ["reward.judge.model=m"],
            "reward.judge.model=m: has no effect with url=role:judge; leave",
        ),
        (["rollout.temperature=0.7"], "rollout.temperature=0.7: servers score at temperature 1"),
        (
            ["distributed=ddp", "distributed.nodes=2", "distributed.rendezvous=node1:29500"],
            "reward.judge.url=role:judge: with distributed.nodes=2 processes of other nodes would "
            "ask its servers, which answer on the first node only; give the address of a server",
        ),
        (
            [
                *("distributed=ddp", "distributed.nodes=2", "distributed.rendezvous=node1:29500"),
                "engine=vllm_server",  # rollouts are made, judged and scored on the first node
            ],
            "algorithm.teacher.path=role:teacher: with distributed.nodes=2 processes of other",
        ),
        (
            ["algorithm.teacher.dtype=bfloat16"],
            "algorithm.teacher.dtype=bfloat16: has no effect here; it needs a model in",
        ),
        (
            ["roles.judge.args.dtype=half"],
            "roles.judge.args.dtype: is set by agenttrain; leave it out, set roles.judge.dtype",
        ),
    ],
)
def test_roles_that_do_not_fit_together(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(*overrides)
    assert message in str(caught.value)
