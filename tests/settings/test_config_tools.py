"""Settings of MCP servers and of search: refused before anything is started or read."""

from __future__ import annotations

import sys

import pytest

from agenttrain.cli import main
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.tools.config import expand_variables
from agenttrain.types import ConfigError

MCP = ("tools=[mcp]", "stop_tools=[]")
SERVER = (*MCP, f"tools.mcp.command=[{sys.executable},no_such_file.py]")
URL = (*MCP, "tools.mcp.url=http://127.0.0.1:9/mcp")
SEARCH = ("tools=[search]", "stop_tools=[]", "tools.search.path=bundled:encyclopedia")


def check(*overrides: str) -> None:
    with hydra_session(Source()):
        validate(compose_run(open_keys(overrides), Source()).config)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (MCP, "tools.mcp: command or url: none is given; a server is either started here, e.g. "),
        ((*URL, "tools.mcp.command=[python]"), "tools.mcp: command or url: both are given"),
        (
            (*MCP, "tools.mcp.command=[no-such-program,x]"),
            "tools.mcp.command=[no-such-program, x]: there is no program 'no-such-program' on the "
            "PATH; install it, or give its whole path",
        ),
        (
            (*MCP, "tools.mcp.command=npx server"),
            "tools.mcp.command='npx server': must be a list of words, e.g. command=[npx,server]",
        ),
        ((*MCP, "tools.mcp.command=[]"), "must be a list of words, e.g. command=[python,my_server"),
        ((*MCP, "tools.mcp.url=localhost:8000"), "tools.mcp.url=localhost:8000: must be a whole"),
        ((*URL, "tools.mcp.env={A: b}"), "is of use with a server that is started only"),
        ((*SERVER, "tools.mcp.headers={A: b}"), "is of use with a url only; leave it out"),
        (
            (*SERVER, "tools.mcp.env={KEY: $NO_SUCH_VARIABLE}"),
            "tools.mcp.env={'KEY': '$NO_SUCH_VARIABLE'}: $NO_SUCH_VARIABLE of KEY is not set in "
            "the environment; export NO_SUCH_VARIABLE=… first",
        ),
        ((*SERVER, "tools.mcp.env={KEY: a$}"), "write $$ for a dollar"),
        ((*SERVER, "tools.mcp.env=[A]"), "tools.mcp.env=['A']: must be a mapping"),
        ((*SERVER, "tools.mcp.allow=[]"), "tools.mcp.allow=[]: must be a list of the server's"),
        ((*SERVER, "tools.mcp.prefix=3"), "tools.mcp.prefix=3: must be a text"),
        ((*SERVER, "tools.mcp.reconnect_s=0"), "tools.mcp.reconnect_s=0: must be a number of sec"),
        ((*SERVER, "tools.mcp.timeout_s=5"), "must be below tools.mcp.timeout_s=5, or a call t"),
        ((*SERVER, "tools.mcp.alow=[a]"), "has no such argument (did you mean 'allow'?)"),
        ((*SEARCH, "tools.search.path=/no/docs"), "tools.search.path=/no/docs: there is no such f"),
        ((*SEARCH, "tools.search.k=many"), "tools.search.k=many: must be a whole number of at lea"),
        ((*SEARCH, "tools.search.text_column=''"), "tools.search.text_column=: must be the name"),
        ((*SEARCH, "stop_tools=[serch]"), "is not a tool of this run (did you mean 'search'?)"),
    ],
)
def test_what_cannot_work(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_stop_tools_may_be_a_servers_which_only_the_server_knows() -> None:
    check(*SERVER, "stop_tools=[submit]")


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    assert expand_variables("headers", {"Authorization": "Bearer $TOKEN", "X": "$$5"}) == {
        "Authorization": "Bearer s3cret",
        "X": "$5",
    }


@pytest.mark.parametrize("verb", ["train", "check"])
@pytest.mark.parametrize("credentials", ["me:SECRET", "SECRET"])
def test_credentials_in_a_url_are_refused_and_not_printed(tmp_path, capsys, verb, credentials):
    url = f"tools.mcp.url=http://{credentials}@127.0.0.1:9/mcp"
    folder = tmp_path / "run"
    assert main([verb, *MCP, url, f"hydra.run.dir={folder}"]) == 2
    told = capsys.readouterr()
    assert "tools.mcp.url=http://***@127.0.0.1:9/mcp: holds credentials" in told.err
    assert "'url=http://$NAME:$PASSWORD@127.0.0.1:9/mcp'" in told.err
    assert "SECRET" not in told.err + told.out and not folder.exists()


@pytest.mark.slow
def test_the_names_of_credentials_stay_in_a_url(monkeypatch, capsys, tmp_path):
    """What is sent is their values; what is printed and written, their names or nothing."""
    pytest.importorskip("mcp")
    monkeypatch.setenv("MCP_PASSWORD", "SECRET")
    url = "tools.mcp.url=http://me:$MCP_PASSWORD@127.0.0.1:9/mcp"
    folder = tmp_path / "run"
    assert main([*MCP, url, "debug=tiny", "tracker=none", f"hydra.run.dir={folder}"]) == 2
    told = capsys.readouterr()
    assert "url=http://me:$MCP_PASSWORD@127.0.0.1:9/mcp: cannot connect" in told.err
    assert "SECRET" not in told.err + told.out
    for file in folder.rglob("*"):
        assert not file.is_file() or "SECRET" not in file.read_text()
