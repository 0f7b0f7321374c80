"""A simulated user: in the loop, over HTTP against a server of this file, and in the settings."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import parts
import pytest
from parts import LIMITS, script

from agenttrain import cli
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.environments.config import UserSettings
from agenttrain.environments.user import LlmUser, SimulatedUser, build_user
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.untrusted import untrusted_values
from agenttrain.types import ConfigError, Message, Rollout, StopReason, Task, ToolUnavailable

TASK = Task(
    task_id="t",
    messages=(
        {"role": "system", "content": "You sell shoes."},
        {"role": "user", "content": "Hello"},
    ),
    columns={"instruction": "red shoes, size 38"},
)


class Server:
    """An OpenAI-compatible server that answers with `replies` in turn, the last one for ever.

    A reply is a text or an HTTP status. It keeps what it was asked.
    """

    def __init__(self, *replies: str | int) -> None:
        self.replies, self.asked = list(replies), list[dict[str, Any]]()
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    server.asked.append({**body, "key": self.headers["authorization"]})
                    left = server.replies
                    reply = left.pop(0) if len(left) > 1 else left[0]
                message = {"role": "assistant", "content": reply}
                raw = json.dumps({"choices": [{"message": message}]}).encode()
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def user(self, **arguments: Any) -> LlmUser:
        given = {"prompt": "You want {{ instruction }}.", "backoff_s": 0.01, **arguments}
        return LlmUser(url=self.url, model="m", **given)


def run(
    *answers: str,
    user: SimulatedUser,
    task: Task = TASK,
    seed: int = 0,
    rollout_ids: Sequence[str] = ("rollout",),
    **limits: Any,
) -> list[Rollout]:
    """Rollouts whose completions are `answers`, with their ledgers checked."""
    chat, tools = parts.chat(), parts.toolbox()

    async def work() -> list[Rollout]:
        context = RolloutContext(
            engine=ScriptedEngine(script(*(f"{answer}<|im_end|>" for answer in answers))),
            chat=chat,
            toolbox=tools,
            limits=replace(LIMITS, **limits),
            simulated_user=user,
        )
        requests = [
            RolloutRequest(task=task, sampling=Sampling(seed=seed), rollout_id=rollout_id)
            for rollout_id in rollout_ids
        ]
        return await asyncio.gather(*(run_rollout(request, context) for request in requests))

    done = asyncio.run(work())
    for one in done:
        verify(one, chat, tools.schemas(task.tools))
    return done


def spoken(done: Rollout) -> list[str]:
    return [m["content"] for m in done.trajectories[0].messages if m["role"] != "system"]


def test_a_conversation_with_a_model_as_the_user() -> None:
    with Server("Red ones, please.", " Size 38. ", "Thanks! ###STOP###") as server:
        user = SimulatedUser(server.user(temperature=0.5, extra={"top_p": 0.9}))
        (done,) = run("Which shoes?", "Which size?", "Here they are.", user=user)
    assert done.stop_reason is StopReason.completed
    assert spoken(done) == [
        "Hello",
        "Which shoes?",
        "Red ones, please.",
        "Which size?",
        "Size 38.",
        "Here they are.",
    ]
    assert [m["role"] for m in server.asked[1]["messages"]] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    assert [m["content"] for m in server.asked[1]["messages"]] == [
        "You want red shoes, size 38.",
        "Hi! How can I help you?",
        "Hello",
        "Which shoes?",
        "Red ones, please.",
        "Which size?",
    ]
    first = server.asked[0]
    assert (first["model"], first["temperature"], first["top_p"]) == ("m", 0.5, 0.9)
    # What the user says is context: it is not trained.
    assert done.trajectories[0].turns == 3


def test_the_user_hears_answers_and_neither_calls_nor_results() -> None:
    call = "I add." + parts.call("add", '{"a": 3, "b": 4}').removesuffix("<|im_end|>")
    with Server("Are you sure?", "###STOP###") as server:
        user = SimulatedUser(server.user(greeting=None))
        (done,) = run(call, "It is 7.", "Yes.", user=user)
    assert [r.content for r in done.tool_results] == ["7"]
    assert [m["content"] for m in server.asked[1]["messages"]] == [
        *("You want red shoes, size 38.", "Hello", "It is 7.", "Are you sure?", "Yes."),
    ]


def test_scripted_turns_come_first_and_max_turns_ends_the_conversation() -> None:
    with Server("More?") as server:
        user = SimulatedUser(server.user(), UserSettings(max_turns=2))
        task = replace(TASK, user_turns=("Written before.",))
        (done,) = run("a", "b", "c", "d", user=user, task=task, max_turns=10)
    assert spoken(done) == ["Hello", "a", "Written before.", "b", "More?", "c", "More?", "d"]
    assert done.stop_reason is StopReason.completed
    assert len(server.asked) == 2


def test_turns_of_the_rollout_end_it_with_a_message_pending() -> None:
    with Server("More?") as server:
        (done,) = run("a", "b", user=SimulatedUser(server.user()), max_turns=2)
    assert done.stop_reason is StopReason.max_turns


def test_seeds_are_the_rollouts_and_the_turns() -> None:
    def seeds(seed: int, **arguments: Any) -> list[Any]:
        with Server("More?") as server:
            user = SimulatedUser(server.user(**arguments), UserSettings(max_turns=2))
            run("a", "b", "c", user=user, seed=seed)
        return [asked.get("seed") for asked in server.asked]

    first, second = seeds(1)
    assert first != second and 0 <= first < 2**31
    assert seeds(1) == [first, second]
    assert seeds(2) != [first, second]
    assert seeds(1, seeded=False) == [None, None]


def test_what_passes_is_tried_again() -> None:
    with Server(503, 429, "  ", "Bye. ###STOP###") as server:
        (done,) = run("a", user=SimulatedUser(server.user()))
    assert done.stop_reason is StopReason.completed
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("reply", "settings", "message"),
    [
        (503, {"retries": 1}, r"/v1/chat/completions: 503 .* \(after 2 tries\)"),
        (422, {}, "/v1/chat/completions: 422"),
        (401, {}, "answers 401 .*; check url, model and api_key_env"),
        ("", {"retries": 0}, "the reply is empty"),
    ],
)
def test_failures_are_errors_and_never_answers(
    reply: str | int, settings: dict[str, Any], message: str
) -> None:
    with Server(reply) as server:
        (done,) = run("a", user=SimulatedUser(server.user(**settings)))
    assert done.stop_reason is StopReason.error
    assert done.rewards == {}
    with pytest.raises(Exception, match=message):
        raise ToolUnavailable(done.error)


def test_a_server_that_is_gone_or_slow_is_an_error() -> None:
    with Server("x") as server:
        gone = server.user(retries=0)
    (done,) = run("a", user=SimulatedUser(gone))
    assert done.stop_reason is StopReason.error
    assert "ConnectError" in str(done.error)

    async def sleeps(task: Task, said: Sequence[Message], seed: int) -> str:
        await asyncio.sleep(60)
        return "never"

    (done,) = run("a", user=SimulatedUser(sleeps, UserSettings(timeout_s=0.05)))
    assert done.stop_reason is StopReason.error
    assert "user.timeout_s=0.05 is the limit" in str(done.error)


def test_no_more_replies_at_once_than_concurrency_allows() -> None:
    running, most = 0, 0

    async def counts(task: Task, said: Sequence[Message], seed: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    user = SimulatedUser(counts, UserSettings(concurrency=3))
    ended = run("a", user=user, rollout_ids=[f"r{n}" for n in range(12)])
    assert {done.stop_reason for done in ended} == {StopReason.completed}
    assert most == 3


def impatient(task: Task, said: Sequence[Message], seed: int, *, patience: int = 1) -> str | None:
    """A user of one's own: says the last answer again."""
    return None if len(said) > 2 * patience else f"What do you mean by {said[-1]['content']!r}?"


def test_a_function_of_ones_own() -> None:
    user = build_user({"_target_": "test_user.impatient", "patience": 2, "max_turns": 5})
    assert user is not None
    (done,) = run("a", "b", "c", user=user)
    assert spoken(done)[2::2] == ["What do you mean by 'a'?", "What do you mean by 'b'?"]
    assert user.settings.max_turns == 5
    assert build_user({}) is None

    def wrong(task: Task, said: Sequence[Message], seed: int) -> int:
        return 3

    def exits(task: Task, said: Sequence[Message], seed: int) -> str:
        raise SystemExit(3)

    for function, message in ((wrong, "it gave a int"), (exits, "SystemExit: 3")):
        (done,) = run("a", user=SimulatedUser(function))
        assert done.stop_reason is StopReason.error
        assert message in str(done.error)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"url": "localhost:1"}, "^user.url=localhost:1: must be a whole address"),
        ({"url": "http://me:secret@h/v1"}, r"^user.url=http://\*\*\*@h/v1: holds credentials"),
        ({"api_key_env": "NO_SUCH_KEY"}, "^user.api_key_env=NO_SUCH_KEY: that environment"),
        ({"stop": " "}, "^user.stop= : must be a text"),
        ({"prompt": "{{ if"}, "^user.prompt: is no template"),
        ({"max_turns": 0}, "^user.max_turns=0: must be at least 1"),
        ({"modell": "m"}, "user.*modell"),
    ],
)
def test_mistakes_name_the_key(section: dict[str, Any], message: str) -> None:
    given = {"url": "http://127.0.0.1:1/v1", "model": "m", "prompt": "{{ instruction }}"}
    target = "agenttrain.environments.user.LlmUser"
    with pytest.raises(ValueError, match=message):
        build_user({"_target_": target, **given, **section})


def composed(*overrides: str) -> Any:
    own = open_keys(["experiment=none", "tools=[]", "user=llm", *overrides])
    with hydra_session(Source()):
        return compose_run(own, Source())


def test_the_settings_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"user\.model=null: name the model as the server of url="
    ):
        validate(composed("user.url=http://h/v1").config)
    run_ = composed("user.url=http://h/v1", "user.model=m", "user.max_turns=3")
    validate(run_.config)
    assert run_.config.user["max_turns"] == 3
    assert [value.key for value in untrusted_values(run_.plain)] == ["user.url"]
    monkeypatch.setenv("MY_KEY", "secret")
    keyed = composed("user.url=http://h/v1", "user.model=m", "user.api_key_env=MY_KEY")
    validate(keyed.config)
    # The key is sent to an address that a run from elsewhere names.
    named = {value.key: value.value for value in untrusted_values(keyed.plain)}
    assert named == {"user.url": "http://h/v1", "user.api_key_env": "MY_KEY"}
    assert "secret" not in json.dumps(keyed.plain)
    with pytest.raises(ConfigError, match=r"user\.tempreature=1: .*did you mean 'temperature'"):
        validate(composed("user.url=http://h/v1", "user.model=m", "user.tempreature=1").config)


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "Hello", "instruction": "red shoes", "answer": "red"}
    file.write_text((json.dumps(row) + "\n") * 4)
    yield file


def test_a_run_with_a_simulated_user_can_be_replayed(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["experiment=none", "tools=[]", "data=file", f"data.train.path={rows}"]
    own += ["reward.exact_match.tool=null", "eval.questions=0"]
    short = ["steps=1", "tasks_per_step=2", "algorithm.group_size=2", "tracker=none"]
    short += [
        "rollout.on_malformed_call=ignore",
        "rollout.max_turn_tokens=64",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    with Server("Go on.", "###STOP###") as server:
        asked = [f"user.url={server.url}", "user.model=m", "user=llm"]
        assert cli.main([*own, *short, *asked]) == 0
        asked_in_all = len(server.asked)
    assert asked_in_all
    assert cli.main(["replay", str(tmp_path / "run")]) == 0
    assert "replay to identical ids" in capsys.readouterr().out
    assert len(server.asked) == asked_in_all
    column = ['user.prompt="{{ wish }}"', "user.url=http://h/v1", "user.model=m", "user=llm"]
    assert cli.main([*own, *column, "hydra.run.dir=" + str(tmp_path / "no")]) == 2
    assert "user.prompt: needs the column 'wish'" in capsys.readouterr().err
