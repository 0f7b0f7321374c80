"""Permission for code that the config.yaml of a saved run names.

A run folder may come from somebody else: a `_target_` in it is imported and called, and an MCP
server's command started. Code that the installed groups (conf/) name may always run. Any other code
needs `trust=true`, or a yes on a terminal, unless the run is the user's own: every run signs the
sections that name code, with a key that only the user has.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from agenttrain.settings.components import REWARD_TARGET
from agenttrain.settings.components import SECTIONS as COMPONENT_SECTIONS
from agenttrain.tools.config import MCP_SERVER, without_password
from agenttrain.tools.sandbox.config import INTERPRETER
from agenttrain.types import ConfigError
from agenttrain.utils.files import PACKAGE, conf_folder
from agenttrain.utils.moved import MOVED
from agenttrain.utils.names import did_you_mean

ENGINE, TRACKER, ROLLOUT, AGENT, USER = "engine", "tracker", "rollout", "agent", "user"
SECTIONS = (*COMPONENT_SECTIONS, "algorithm", ENGINE, ROLLOUT, AGENT)
"""Sections that name code."""
SIGNATURE = "signature"
"""Key of `provenance` in config.yaml."""
DESTINATIONS = (("trackio", "space"), ("trackio", "server_url"), ("mlflow", "uri"))
"""Settings of trackers that send data to other machines."""
KEY_FILE = "AGENTTRAIN_KEY"
"""Environment variable with the file of the user's key, if it is not in the home folder."""
STARTS_A_PYTHON = (
    "agenttrain.environments.adapters.verifiers.Verifiers",
    "agenttrain.environments.adapters.verifiers.VerifiersRows",
)
ASKS_A_SERVER = (
    "agenttrain.rewards.builtin.judge.Judge",
    "agenttrain.environments.user.LlmUser",
)
TRUSTED = "trust=true"
NAMES_CODE = ("_target_", "connect", "look")
"""Arguments of components that name code by its dotted path; `sql` and `crop` have the last two."""
CODE_KEY = f"(?:{'|'.join(NAMES_CODE)})"
COMPONENTS = {"data": ("train", "test"), "algorithm": ("objective",)}
"""Sections in which only some keys are components."""


def named_code(plain: Mapping[str, Any], sections: Collection[str] = SECTIONS) -> list[str]:
    """Return the code that the sections would run and that is not bundled, as ``key=value``.

    Example: ``["tools.lookup._target_=my_agent.lookup", "tools.mcp.command=[npx, server]"]``.
    """
    code = []
    for section in (name for name in SECTIONS if name in sections):
        components = plain.get(section)
        if section == ENGINE:
            path = components.get("_target_") if isinstance(components, Mapping) else None
            if path is not None:
                code.append(f"{ENGINE}._target_={path}")
            continue
        if section == ROLLOUT:
            path = components.get("compaction") if isinstance(components, Mapping) else None
            if "." in str(path):
                code.append(f"{ROLLOUT}.compaction={path}")
            continue
        if section == AGENT:
            for key in ("command", "_target_", "env"):
                value = components.get(key) if isinstance(components, Mapping) else None
                if value:
                    words = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else value
                    code.append(f"{AGENT}.{key}={without_password(str(words))}")
            continue
        if section == TRACKER and isinstance(components, Mapping):
            for name, key in DESTINATIONS:
                value = (components.get(name) or {}).get(key)
                if value is not None:
                    place = f"{TRACKER}.{name}.{key}={without_password(str(value))}"
                    code.append(f"{place} (the run's data are sent there)")
            section, components = f"{TRACKER}.own", components.get("own")
        if section == USER:
            code += [f"{USER}.{text}" for text in _of_component(components)] if components else []
            continue
        for name, component in components.items() if isinstance(components, Mapping) else ():
            if name not in COMPONENTS.get(section, (name,)):
                continue
            if isinstance(component, Mapping):
                code += [f"{section}.{name}.{text}" for text in _of_component(component)]
    return code


def _of_component(component: Mapping[str, Any]) -> Iterator[str]:
    target = component.get("_target_")
    for argument in NAMES_CODE:
        path = component.get(argument)
        if path is not None and str(path) not in _bundled():
            yield f"{argument}={path}"
    errors = component.get("retry_on")
    if isinstance(errors, list) and not all(
        re.fullmatch(r"builtins\.\w+", str(error)) for error in errors
    ):
        yield f"retry_on=[{', '.join(map(str, errors))}]"
    if target == MCP_SERVER:
        # A server may get secrets of the environment: $NAME in `headers`.
        given = [name for name in ("command", "url") if component.get(name) is not None]
        for name in given or ["_target_"]:
            value = component.get(name)
            words = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
            yield f"{name}={without_password(words)}"
    if target in STARTS_A_PYTHON:
        yield f"python={component.get('python')} (imports {component.get('id')})"
    if target in ASKS_A_SERVER and component.get("api_key_env") is not None:
        yield (
            f"url={without_password(str(component.get('url')))} (is sent "
            f"${component['api_key_env']})"
        )
    if target == INTERPRETER and component.get("sandbox") != "required":
        yield f"sandbox={component.get('sandbox')} (the model's code runs as you)"


@cache
def _bundled() -> frozenset[str]:
    """Return the dotted paths that the installed groups name."""
    texts = (file.read_text(encoding="utf-8") for file in conf_folder().glob("*/*.yaml"))
    pattern = re.compile(rf"^\s*{CODE_KEY}:\s*(agenttrain\.[\w.]+)", re.MULTILINE)
    return frozenset({REWARD_TARGET, *(path for text in texts for path in pattern.findall(text))})


def _is_ours(path: str) -> bool:
    """Return True if a module of this package defines the name; nothing is imported."""
    parts = path.split(".")[1:]
    for used in range(len(parts), -1, -1):
        module = PACKAGE.joinpath(*parts[:used])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                return used == len(parts) or re.search(rf"\b{parts[used]}\b", text) is not None
    return False


def check_trusted(
    argument: str, code: Sequence[str], *, trust: bool, what: str = "its config.yaml"
) -> None:
    """Raise ConfigError with the code, unless there is none or the user lets it run.

    `argument` is the typed argument that leads to the code, `what` the file or section it is in.
    Raises it at once for a path inside agenttrain that this version does not have.
    """
    for text in code:
        ours = re.fullmatch(rf"[\w.]+\.{CODE_KEY}=(agenttrain(?:\.\w+)+)", text)
        if ours is not None and ours[1] not in MOVED and not _is_ours(ours[1]):
            hint = did_you_mean(ours[1], _bundled())
            raise ConfigError(
                f"{argument}: {text}: is no name of this version of agenttrain{hint}; write "
                f"today's name into {what.split()[-1]}, or use the version that wrote it"
            )
    if trust or not code:
        return
    listed = "\n".join(f"  {text}" for text in code)
    named = f"{argument}: {what} names code that is not bundled with agenttrain and that would run"
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"agenttrain: {named} as you:\n{listed}\nLet it run? [y/N] ", end="", file=sys.stderr)
        sys.stderr.flush()
        with suppress(EOFError):
            if input().strip().lower() in ("y", "yes"):
                return
        raise ConfigError(f"{argument}: not run")
    raise ConfigError(
        f"{named} as you:\n{listed}\nread it, and add {TRUSTED} if you trust who made this folder"
    )


def signature(plain: Mapping[str, Any]) -> str | None:
    """Return the user's signature of the code that a config.yaml would run; None if it would run
    none, or the user's key can be neither read nor made."""
    return sign(_signed(plain)) if named_code(plain) else None


def is_own(plain: Mapping[str, Any]) -> bool:
    """Return True if a run of this user wrote a config.yaml, given with its `provenance`."""
    provenance = plain.get("provenance")
    written = provenance.get(SIGNATURE) if isinstance(provenance, Mapping) else None
    return verifies(_signed(plain), written)


def _signed(plain: Mapping[str, Any]) -> Any:
    signed = {name: plain.get(name) for name in ("tools", "environment", "reward", "data")}
    # Only if they name code: signatures of earlier versions lack these sections.
    if named_code(plain, ("algorithm",)):
        signed["algorithm.objective"] = plain["algorithm"]["objective"]
    if named_code(plain, (ENGINE,)):
        signed[ENGINE] = plain.get(ENGINE)
    if named_code(plain, (ROLLOUT,)):
        signed["rollout.compaction"] = plain["rollout"]["compaction"]
    if named_code(plain, (AGENT,)):
        signed[AGENT] = plain.get(AGENT)
    if named_code(plain, (USER,)):
        signed[USER] = plain.get(USER)
    if named_code(plain, (TRACKER,)):
        signed[TRACKER] = plain.get(TRACKER)
    return signed


def sign(value: Any, *, make_key: bool = True) -> str | None:
    """Return the user's signature of JSON data; None without a key, which `make_key` may make."""
    key = _key(make=make_key)
    if key is None:
        return None
    text = json.dumps(value, sort_keys=True, default=str)
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def verifies(value: Any, written: object) -> bool:
    """Return True if `written` is the user's signature of JSON data."""
    if not isinstance(written, str):
        return False
    valid = sign(value, make_key=False)
    return valid is not None and hmac.compare_digest(valid, written)


def _key(*, make: bool) -> bytes | None:
    """Return the user's key; None if there is none that only the user can write."""
    named = os.environ.get(KEY_FILE)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(named) if named else Path(home) / "agenttrain" / "key"
    with suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            with suppress(FileExistsError):
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(32))
                # Not a rename: if two runs start together, the key of the first one stays.
                with suppress(FileExistsError):
                    os.link(part, path)
                part.unlink()
        status = path.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            key = path.read_bytes()
            return key if len(key) >= 32 else None
    return None
