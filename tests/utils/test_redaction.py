"""Secrets in addresses are hidden in every text that leaves the process."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import pytest

from agenttrain.cli import main
from agenttrain.environments.adapters.openenv import OpenEnv
from agenttrain.tools.reply import error_reply
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.types import ToolFailure
from agenttrain.utils.chat_api import ChatApi, ChatUnavailable, with_path
from agenttrain.utils.redaction import (
    hide_in_settings,
    hide_in_words,
    hide_secrets,
    shell_command,
)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("http://h/mcp?token=s3cret", "http://h/mcp?token=***"),
        ("http://h/mcp?a=1&api_key=s3cret&b=2", "http://h/mcp?a=1&api_key=***&b=2"),
        ("http://h/?apiKey=s3cret#x", "http://h/?apiKey=***#x"),
        ("http://h/?X-Amz-Signature=s3cret%2F", "http://h/?X-Amz-Signature=***"),
        ("http://h/#access_token=s3cret", "http://h/#access_token=***"),
        ("wss://me:s3cret@h/ws?client_secret=s3cret", "wss://***@h/ws?client_secret=***"),
        ("https://ghp_s3cret@h/x", "https://***@h/x"),
        ("url=http://h?key=s3cret: no server", "url=http://h?key=***: no server"),
        ("for url 'http://h?token=s3cret'.", "for url 'http://h?token=***'."),
        ('{"url": "http://h?a=1\\u0026token=s3cret"}', '{"url": "http://h?a=1\\u0026token=***"}'),
        ("POST /v1/chat?password=s3cret HTTP/1.1", "POST /v1/chat?password=*** HTTP/1.1"),
        ("[http://h?token=s3cret]", "[http://h?token=***]"),
        ("http://h?next=http%3A%2F%2Fx%3Ftoken%3Ds3cret", "http://h?next=http%3A%2F%2Fx%3Ftoken%3D***"),
        ("http://h/?sig=s3cret&se=2026", "http://h/?sig=***&se=2026"),
        ("http://h/?session_id=s3cret;auth=s3cret", None),
    ],
)  # fmt: skip
def test_secrets_are_hidden_by_their_names(text: str, hidden: str | None) -> None:
    assert "s3cret" not in hide_secrets(text)
    assert hidden is None or hide_secrets(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "http://me:$PASSWORD@h/mcp?token=$TOKEN&api_key=${KEY}",
        "http://h/mcp?page=2&q=token",
        "What is the token=3 of a=b?",
        "algorithm.objective=clip optimizer.lr=1e-4",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert hide_secrets(text) == text


@pytest.mark.parametrize(
    "text", ["?token=" + "." * 100_000 + "a", "?" + "token" * 100_000, "?" + "key" * 100_000 + "&"]
)
def test_texts_that_a_model_repeats_take_linear_time(text: str) -> None:
    started = time.process_time()
    hide_secrets(f"{text}=")
    assert time.process_time() - started < 1


def test_settings_are_shared_without_secrets() -> None:
    settings = {
        "reward": {"judge": {"url": "http://h/v1?api_key=s3cret"}},
        "environment": {"open": {"url": "http://h#token=s3cret"}},
        "tools": {"mcp": {"url": "http://h?token=s3cret", "headers": {"x": "s3cret"}}},
    }
    assert "s3cret" not in str(hide_in_settings(settings))


def test_a_path_comes_before_the_query() -> None:
    assert with_path("http://h/v1/?key=a", "/chat") == "http://h/v1/chat?key=a"


@pytest.mark.parametrize("status", [400, 401, 503])
def test_a_judge_says_no_secret(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(status, text=f"cannot serve {request.url}")

    api = ChatApi(url="http://h/v1?api_key=s3cret", model="m", retries=0)
    monkeypatch.setitem(vars(api), "_client", httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises((ChatUnavailable, ValueError)) as caught:
        api.ask([], str)
    assert asked == ["http://h/v1/chat/completions?api_key=s3cret"]
    assert "s3cret" not in str(caught.value) and "http://h/v1/chat" in str(caught.value)


def test_an_environment_says_no_secret() -> None:
    with pytest.raises(ValueError) as caught:
        OpenEnv.tools(url="http://127.0.0.1:1/?token=s3cret")
    assert "s3cret" not in str(caught.value) and "127.0.0.1:1" in str(caught.value)


def test_what_a_tool_raises_and_how_a_run_ends_have_no_secret(tmp_path) -> None:
    error = ValueError("404 for url 'http://h/?token=s3cret'")
    assert error_reply(error, max_chars=1000).content == (
        "Error: ValueError: 404 for url 'http://h/?token=***'"
    )
    update_summary(tmp_path, status="failed", error=str(error))
    assert "s3cret" not in read_summary(tmp_path)["error"]


JUDGE = ("reward=[judge]", "reward.judge.url=http://h/v1?token=s3cret", "reward.judge.model=m")


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job", *JUDGE],
        ["check", *JUDGE, "reward.judge.lwo=1"],
        ["check", "reward=[judge]", "reward.judge.url=ftp://h/v1?token=s3cret"],
        ["check", "+tools.mcp._target_=agenttrain.tools.mcp.server.McpServer", "++tools.mcp.url=http://127.0.0.1:1/?token=s3cret"],
        ["tools", JUDGE[0], "reward.judge.url='http://h/v1?token=s3cret'", JUDGE[2]],
        ["tools", "environment=openenv", "environment.openenv.url=http://127.0.0.1:1/?api_key=s3cret"],
    ],
)  # fmt: skip
def test_no_command_prints_a_secret(words, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    main(words)
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    assert "***" in printed.out + printed.err


def test_tracebacks_and_logs_of_the_command_have_no_secret() -> None:
    code = (
        "import logging\n"
        "from agenttrain.utils.output import protect\n"
        "protect()\n"
        "logging.getLogger('x').error('GET %s', 'http://h/?token=s3cret')\n"
        "raise ValueError('http://me:s3cret@h')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "s3cret@" not in done.stderr and "token=s3cret" not in done.stderr
    assert "http://h/?token=***" in done.stderr and "ValueError: http://***@h" in done.stderr


def test_commands_to_copy_have_no_secret() -> None:
    command = shell_command(["tools", "a.url='http://h?token=s3cret'", "--call", "sql", "{}"])
    assert "s3cret" not in command and " --call sql '{}'  # type the secrets again" in command
    # A variable names a secret without being one: the command runs as it is.
    command = shell_command(["eval", "tools.mcp.url=http://h?token=$TOKEN"])
    assert command == "agenttrain eval 'tools.mcp.url=http://h?token=$TOKEN'"


@pytest.mark.parametrize(
    ("word", "hidden"),
    [
        ("+tools.mcp.headers.Authorization=Bearer s3cret", "+tools.mcp.headers.Authorization=***"),
        ("tools.mcp.headers={x-key: s3cret, b: $B}", "tools.mcp.headers={x-key: ***, b: $B}"),
        ("tools.mcp={a: 1, env: {KEY: 's3,cret'}}", "tools.mcp={a: 1, env: {KEY: ***}}"),
        ("reward.judge.headers.x-key=$$s3cret", "reward.judge.headers.x-key=***"),
        ("tools.mcp.headers.x-key=$KEY", None),
        ("environment.env.size=3", None),
        ("agent.env=[KEY]", None),
    ],
)  # fmt: skip
def test_typed_headers_and_variables_are_hidden(word: str, hidden: str | None) -> None:
    assert hide_in_words([word]) == [hidden or word]


def test_words_for_the_model_are_sent_as_they_are() -> None:
    """Of a failure with words for the model nothing is hidden, or it could not use them."""
    text = "page http://h/?code=12 is empty; take http://h/?code=13"
    assert error_reply(ToolFailure(text), max_chars=1000).content == f"Error: {text}"
