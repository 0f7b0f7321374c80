"""`agenttrain engine-server`: one of the servers that a run samples from."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from socket import SO_REUSEADDR, SOL_SOCKET, socket

from agenttrain.commands.arguments import FolderCommand, parse_folder
from agenttrain.engines.registry import names_with, spec_of, specs
from agenttrain.launch.processes import count_gpus
from agenttrain.settings.checks import validate
from agenttrain.settings.command_line import take_trust
from agenttrain.settings.compose import Source, compose_new, hydra_session, open_keys
from agenttrain.settings.machine import Machine, broadcast_problems
from agenttrain.settings.pinning import fetch
from agenttrain.settings.trust import check_trusted
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.signing import verifies

USAGE = (
    "engine-server: give the folder of a run with servers: engine-server <run folder> number=0 "
    "[host=…] [wait=SECONDS]"
)
ALONE = (
    "engine-server: a server for runs elsewhere has a port and a new folder: engine-server "
    "<folder> port=8000 [host=…] [key=value …]"
)
KEYS = ("number", "parent", "host", "port", "wait")
HOST = "127.0.0.1"
PLAN = "servers/plan.json"
LOOK_S = 0.5
"""Seconds between two looks for the plan of a run that has not begun."""


def engine_server(arguments: Sequence[str]) -> int:
    """Run `engine-server <run folder> number=N [host=…] [wait=SECONDS]`; raises ConfigError.

    It replaces a server of a run that has used up its restarts, or is one of those that a run with
    `servers.nodes` waits for. With `port=` it is a server for runs elsewhere, `engine-server
    <folder> port=N [host=ADDRESS] [key=value …]`.
    """
    words, trust = take_trust(arguments)
    typed = parse_folder(words, KEYS, USAGE)
    if "port" in typed.words:
        return _alone(typed)
    if typed.overrides:
        key = typed.overrides[0].partition("=")[0]
        hint = did_you_mean(key, KEYS)
        raise ConfigError(f"{typed.overrides[0]}: is not an option of engine-server{hint}; {USAGE}")
    for key, text in typed.words.items():
        if key != "host" and not text.isdecimal():
            raise ConfigError(f"{key}={text}: is no number; {USAGE}")
    host, wait = typed.words.get("host"), typed.words.get("wait")
    without_port = f"host={host}: has no effect without port= or servers.nodes; {ALONE}"
    plan_file = typed.folder / PLAN
    deadline = time.monotonic() + int(wait or 0)
    while not plan_file.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    try:
        plan = json.loads(plan_file.read_text(encoding="utf-8"))
    except OSError as error:
        if host is not None and wait is None and not (typed.folder / "config.yaml").exists():
            raise ConfigError(without_port) from error
        raise ConfigError(
            f"{plan_file}: {error.strerror}: no run with servers is going on in this "
            f"folder; a run with {names_with(fleet=True)} starts them itself"
        ) from error
    signature = plan.pop("signature", None)
    if "parent" not in typed.words and not verifies(plan, signature):
        named = (f"module={plan['module']}", f"servers.args={plan['servers'].get('args')}")
        argument = f"engine-server {typed.folder}"
        check_trusted(argument, named, trust=trust, what=f"its {PLAN}")
    number, count = int(typed.words.get("number", 0)), plan["servers"]["count"]
    if number >= count:
        raise ConfigError(
            f"number={number}: this run has servers.count={count}, numbered from 0; {USAGE}"
        )
    if host is not None and not plan["servers"].get("nodes"):
        raise ConfigError(without_port)
    if host is not None:
        _check_free(host, 0)
    parent = typed.words.get("parent")
    run_server = specs()[plan["engine"]["name"]].run_server
    assert run_server is not None
    return run_server(typed.folder, number, None if parent is None else int(parent), host or HOST)


def _alone(typed: FolderCommand) -> int:
    """Run a server with the settings of the command line, as `servers.admin_urls` names it."""
    from agenttrain.runs.sampling import server_inputs

    words, folder = typed.words, typed.folder
    for key in ("number", "parent", "wait"):
        if key in words:
            raise ConfigError(f"{key}={words[key]}: has no effect beside port=; {ALONE}")
    port = words["port"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"port={port}: give a number from 1 to 65535; {ALONE}")
    if (folder / "config.yaml").exists():
        raise ConfigError(f"{folder}: holds a run; {ALONE}")
    host = words.get("host", HOST)
    _check_free(host, int(port))
    overrides = typed.overrides
    if not any(text.startswith("engine=") for text in overrides):
        overrides = [names_with(fleet=True), *overrides]
    source = Source()
    with hydra_session(source):
        config = compose_new(open_keys(overrides), source, starts=False).config
        validate(config)
    spec = spec_of(config.engine)
    if spec.serve_alone is None:
        raise ConfigError(f"engine={config.engine.name}: has no servers; leave it out")
    if config.servers.outside or config.servers.nodes or config.servers.count > 1:
        raise ConfigError(
            "servers.count, servers.nodes, servers.admin_urls: this is one server; leave them out"
        )
    machine = Machine(count_gpus)
    problems = [*spec.check_machine(config.engine, lambda: machine.gpus)]
    if problems := [*broadcast_problems(config, machine), *problems]:
        raise ConfigError("\n".join(problems))
    fetch(config, "eval")
    folder.mkdir(parents=True, exist_ok=True)
    inputs = server_inputs(config, folder.resolve(), on_gpu=machine.gpus > 0)
    return spec.serve_alone(config.engine, inputs, host, int(port))


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError for an address that cannot be listened on."""
    with socket() as probe:
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"host={host} port={port}: {error.strerror}; take another") from error
