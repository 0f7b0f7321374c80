"""The judge against a real HTTP server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from judge_server import Reply, Server, says
from reward_cases import called, made, reward

from agenttrain.rewards.builtin.judge import Judge
from agenttrain.rewards.function import RewardError
from agenttrain.rewards.rubric import build_rubric

PATTERN = r"Score: (-?\d+)"


@pytest.fixture
def server() -> Iterator[Server]:
    made_one = Server()
    yield made_one
    made_one.close()


def judge(server: Server, **settings: Any) -> Judge:
    given = {"prompt": "{{ question }} {{ answer }} {{ final }}", "pattern": PATTERN, "high": 10}
    return Judge(**{"url": server.url, "model": "m", "backoff_s": 0.01, **given, **settings})


def test_a_score(server):
    server.replies = [says("It is vague.\nScore: 3\nNo, Score: 4")]
    assert reward(judge(server, system="Be strict."), made("Rome", answer="Oslo")) == 0.4
    (asked,) = server.asked
    assert asked["path"] == "/v1/chat/completions"
    assert asked["messages"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "What is it? Oslo Rome"},
    ]
    assert (asked["model"], asked["temperature"]) == ("m", 0.0)
    assert "Authorization" not in server.headers


def test_what_a_prompt_can_hold(server):
    server.replies = [says("Score: 10")]
    rollout = made("Oslo", called("sql", query="SELECT 1"), n=3)
    rollout.trajectories[0].messages[1]["tool_calls"] = [
        {"function": {"name": "sql", "arguments": {"query": "SELECT 1"}}}
    ]
    prompt = "{{ conversation }}|{{ tool_calls | length }}|{{ stop_reason }}|{{ n + 1 }}|{x}"
    assert reward(judge(server, prompt=prompt), rollout) == 1.0
    assert server.asked[0]["messages"][0]["content"] == (
        '[user] What is it?\n[assistant] Oslo\n[call] sql({"query": "SELECT 1"})|1|completed|4|{x}'
    )
    assert judge(server, prompt=prompt).columns == ("n",)


def test_a_score_in_json(server):
    server.replies = [says('```json\n{"verdict": {"score": 0.25}, "why": "}"}\n```')]
    settings = {"pattern": None, "json_path": "verdict.score", "high": 1}
    assert reward(judge(server, **settings), made("", answer="")) == 0.25


def test_the_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server.replies = [says("Score: 5")]
    assert reward(judge(server, api_key_env="MY_KEY"), made("", answer="")) == 0.5
    assert server.headers["Authorization"] == "Bearer secret"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match=r"^api_key_env=MY_KEY: that environment variable is not"):
        judge(server, api_key_env="MY_KEY")


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": "slow down"}),
        (500, {"error": "oops"}),
        (200, b"not json"),
        (200, {"choices": []}),
        says("I cannot say."),
        says("Score: 11"),
        says("Score: -1"),
    ],
    ids=str,
)
def test_another_try_after_trouble(server, trouble):
    server.replies = [trouble, trouble, says("Score: 5")]
    assert reward(judge(server, retries=2), made("", answer="")) == 0.5
    assert len(server.asked) == 3


def hangs() -> Reply:
    time.sleep(3)
    return says("Score: 1")


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ((503, {"error": "down"}), r"503 .*down.* \(after 2 tries\)"),
        (says("hm"), r"no score in the reply 'hm' \(after 2 tries\)"),
        (hangs, r"ReadTimeout: timed out \(after 2 tries\)"),
        ((400, {"error": "too long"}), r"400 .*too long"),
    ],
)
def test_no_score_is_no_zero(server, trouble, said):
    server.replies = [trouble]
    function = judge(server, retries=1, request_timeout_s=0.3)
    with pytest.raises(RewardError, match=said) as caught:
        reward(function, made("", answer=""))
    assert "(reward.it.on_unavailable=drop leaves such rollouts out)" in str(caught.value)


def test_nobody_listens(server):
    server.close()
    with pytest.raises(RewardError, match=r"chat/completions: ConnectError: .* \(after 1 tries\)"):
        reward(judge(server, retries=0), made("", answer=""))


def test_a_key_that_is_refused_ends_the_run_at_once(server):
    server.replies = [(401, {"error": "wrong key"})]
    with pytest.raises(RewardError, match=r"401 .*wrong key.*check url, model and api_key_env"):
        reward(judge(server), made("", answer=""))
    assert len(server.asked) == 1


def test_a_rollout_without_a_score_is_dropped_where_that_is_declared(server):
    def by_answer() -> Reply:
        text = server.asked[-1]["messages"][-1]["content"]
        return (500, {}) if "bad" in text else says("Score: 10")

    server.replies = [by_answer]
    rubric = build_rubric(
        {
            "judge": {
                **{
                    "_target_": "agenttrain.rewards.builtin.judge.Judge",
                    "url": server.url,
                    "model": "m",
                },
                **{"prompt": "{{ final }}", "pattern": PATTERN, "high": 10, "retries": 1},
                **{"backoff_s": 0.01, "on_unavailable": "drop"},
            },
            "contains": {"_target_": "agenttrain.rewards.builtin.answers.Contains"},
        }
    )
    rollouts = [made("good x", answer="x"), made("bad x", answer="x"), made("good", answer="x")]
    unscored = asyncio.run(rubric.score(rollouts))
    assert [rollout.reward for rollout in rollouts] == [2.0, None, 1.0]
    assert rollouts[1].rewards == {"judge": None, "contains": 1.0}
    assert unscored == [rollouts[1].error]
    assert "reward 'judge' on rollout 'r' of task 't': http://127.0.0.1" in unscored[0]


def test_requests_run_at_once(server):
    together = threading.Barrier(3)

    def waits() -> Reply:
        together.wait(timeout=20)  # a reply needs three requests in flight
        return says("Score: 10")

    server.replies = [waits]
    section = {
        **{"_target_": "agenttrain.rewards.builtin.judge.Judge", "url": server.url, "model": "m"},
        **{"prompt": "{{ final }}", "pattern": PATTERN, "high": 10, "concurrency": 3},
    }
    rollouts = [made(str(number)) for number in range(3)]
    asyncio.run(build_rubric({"judge": section}).score(rollouts))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "localhost:8000"}, "url=localhost:8000: must be a whole address"),
        ({"url": "http://[::1"}, r"url=http://\[::1: must be a whole address"),
        ({"pattern": "Score: 1"}, "pattern=Score: 1: needs one group, which is the score"),
        ({"pattern": "("}, r"pattern=\(: .*position"),
        ({"json_path": "score"}, "json_path=score: give either it or a pattern"),
        ({"pattern": None}, "json_path=None: give either it or a pattern"),
        ({"pattern": None, "json_path": "a["}, "json_path=a.: is no JMESPath"),
        ({"low": 10}, "low=10: must be below high=10"),
        ({"retries": -1}, "retries=-1: it and backoff_s=0.01 must be 0 or more"),
        ({"request_timeout_s": 0}, "request_timeout_s=0: must be more than 0"),
        ({"prompt": "{{ final"}, r"prompt: is no template: .* \(line 1\)"),
    ],
)
def test_settings_that_cannot_work(server, settings, said):
    with pytest.raises(ValueError, match=rf"^{said}"):
        judge(server, **settings)
