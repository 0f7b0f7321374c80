"""`agenttrain engine-server`: one of the servers that a run samples from."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

from agenttrain.engines.registry import names_with, spec_of, specs
from agenttrain.launch.processes import count_gpus
from agenttrain.settings.checks import validate
from agenttrain.settings.command_line import source_of, take_trust
from agenttrain.settings.compose import compose_new, hydra_session, open_keys
from agenttrain.settings.machine import broadcast_problems
from agenttrain.settings.pinning import fetch
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.trust import check_trusted
from agenttrain.types import ConfigError
from agenttrain.utils.sections import raise_config_error
from agenttrain.utils.signing import verifies

ELSEWHERE = "a server for runs elsewhere has a new folder and --port"
HOST = "127.0.0.1"
PLAN = "servers/plan.json"
LOOK_S = 0.5
"""Seconds between two looks for the plan of a run that has not begun."""


def engine_server(args: Namespace, overrides: Sequence[str]) -> int:
    """Run one server until it ends; raises ConfigError.

    With `--port` it is a server for runs elsewhere, with settings of its own. Otherwise it is
    server `--number` of the run in `args.folder`, as servers/plan.json there describes it. It is
    started by the run (`--parent`), by a user in place of a server that has used up its restarts,
    or on another node for a run with `servers.nodes`, which waits for it.
    """
    # `trust=true` among the overrides permits the code that the plan names.
    settings, trust = take_trust(overrides)
    if args.port is not None:
        return _serve_alone(args, settings)
    if settings:
        raise ConfigError(f"{settings[0]}: the run has its settings; {ELSEWHERE}")
    folder, host = args.folder, args.host
    # Servers of a run listen on 127.0.0.1, unless they are on nodes of their own (servers.nodes).
    host_error = ConfigError(
        f"--host {host}: has no effect without --port or servers.nodes; {ELSEWHERE}"
    )
    try:
        plan = _read_plan(folder, wait_s=args.wait or 0)
    except OSError as error:
        expects_run = args.wait is not None or (folder / "config.yaml").exists()
        if host is not None and not expects_run:
            raise host_error from error
        raise ConfigError(
            f"{folder / PLAN}: {error.strerror}: no run with servers is going on in this "
            f"folder; a run with {names_with(fleet=True)} starts them itself"
        ) from error
    signature = plan.pop("signature", None)
    # A run starts its servers with --parent, and has written the plan itself.
    started_by_run = args.parent is not None
    if not started_by_run and not verifies(plan, signature):
        code_names = (f"module={plan['module']}", f"servers.args={plan['servers'].get('args')}")
        argument = f"engine-server {folder}"
        check_trusted(argument, code_names, trust=trust, what=f"its {PLAN}")
    number, count = args.number or 0, plan["servers"]["count"]
    if number >= count:
        raise ConfigError(f"--number {number}: this run has servers.count={count}, numbered from 0")
    if host is not None:
        if not plan["servers"].get("nodes"):
            raise host_error
        any_port = 0  # the server chooses its own: only the address is checked
        _check_free(host, any_port)
    run_server = specs()[plan["engine"]["name"]].run_server
    assert run_server is not None
    return run_server(folder, number, args.parent, host or HOST)


def _read_plan(folder: Path, *, wait_s: float) -> dict[str, Any]:
    """Return a run's plan of its servers, waiting up to `wait_s` for the run to write it.

    Raises OSError if there is none by then.
    """
    file = folder / PLAN
    deadline = time.monotonic() + wait_s
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return plan


def _serve_alone(args: Namespace, overrides: list[str]) -> int:
    """Run a server for the `servers.admin_urls` of other runs, with the typed settings.

    All that can be refused is refused before weights are downloaded and the folder is made.
    """
    from agenttrain.runs.sampling import server_inputs

    folder, port, host = args.folder, args.port, args.host or HOST
    for key in ("number", "parent", "wait"):
        if (value := getattr(args, key)) is not None:
            raise ConfigError(f"--{key} {value}: has no effect beside --port; leave it out")
    _check_free(host, port)
    config = _settings_for_server(args, overrides)
    # Download the models of an evaluation: unlike training, serving needs no teacher model.
    fetch(config, "eval")
    folder.mkdir(parents=True, exist_ok=True)
    inputs = server_inputs(config, folder.resolve(), on_gpu=count_gpus() > 0)
    serve_alone = spec_of(config.engine).serve_alone
    assert serve_alone is not None  # `_settings_for_server` has checked it
    return serve_alone(config.engine, inputs, host, port)


def check_server(args: Namespace, overrides: Sequence[str]) -> int:
    """Check the settings of a server for runs elsewhere; raises ConfigError."""
    _settings_for_server(args, overrides)
    print("these settings fit agenttrain engine-server")
    return 0


def _settings_for_server(args: Namespace, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of a server for runs elsewhere, checked; raises ConfigError."""
    if args.folder is not None and (args.folder / "config.yaml").exists():
        raise ConfigError(f"{args.folder}: holds a run; {ELSEWHERE}")
    if not any(text.startswith("engine=") for text in overrides):
        overrides = [names_with(fleet=True), *overrides]  # the engine that has servers
    source = source_of(args)
    with hydra_session(source):
        # `open_keys` admits keys that no YAML lists, as tools.sql.timeout_s. starts=False: no run
        # starts here, so that no experiment has to be named.
        config = compose_new(open_keys(overrides), source, starts=False).config
        validate(config)
    spec = spec_of(config.engine)
    if spec.serve_alone is None:
        raise ConfigError(f"engine={config.engine.name}: has no servers; leave it out")
    if config.servers.outside or config.servers.nodes or config.servers.count > 1:
        raise ConfigError(
            "servers.count, servers.nodes, servers.admin_urls: this is one server; leave them out"
        )
    machine_problems = spec.check_machine(config.engine, count_gpus)
    raise_config_error([*broadcast_problems(config, count_gpus), *machine_problems])
    return config


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError if nothing can listen on the address."""
    with socket() as probe:
        # As servers set it: a port whose last connections still close is free.
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: {error.strerror}; take another"
            ) from error
