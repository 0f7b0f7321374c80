"""`agenttrain engine-server`: one of the servers that a run samples from."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agenttrain.commands.arguments import parse_folder
from agenttrain.engines.registry import names_with, specs
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean

USAGE = "engine-server: give the folder of a run with servers: engine-server <run folder> number=0"
KEYS = ("number", "parent")
PLAN = "servers/plan.json"


def engine_server(arguments: Sequence[str]) -> int:
    """Run `engine-server <run folder> number=N [parent=PID]`; raises ConfigError.

    A run starts its servers by this command, with itself as their parent. Typed, it replaces one
    that has used up its restarts.
    """
    typed = parse_folder(arguments, KEYS, USAGE)
    if typed.overrides:
        key = typed.overrides[0].partition("=")[0]
        hint = did_you_mean(key, KEYS)
        raise ConfigError(f"{typed.overrides[0]}: is not an option of engine-server{hint}; {USAGE}")
    for key, text in typed.words.items():
        if not text.isdecimal():
            raise ConfigError(f"{key}={text}: is no number; {USAGE}")
    try:
        plan = json.loads((typed.folder / PLAN).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{typed.folder / PLAN}: {error.strerror}: no run with servers is going on in this "
            f"folder; a run with {names_with(fleet=True)} starts them itself"
        ) from error
    number, count = int(typed.words.get("number", 0)), plan["servers"]["count"]
    if number >= count:
        raise ConfigError(
            f"number={number}: this run has servers.count={count}, numbered from 0; {USAGE}"
        )
    parent = typed.words.get("parent")
    run_server = specs()[plan["engine"]["name"]].run_server
    assert run_server is not None
    return run_server(typed.folder, number, None if parent is None else int(parent))
