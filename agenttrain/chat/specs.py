"""Response schemas by name, from a file, and from what a tokenizer carries.

A schema is a mapping in one of three forms, told apart by their keys:

- ours (`format: marked`, the default, with the fields of `MarkedSpec`; `format: harmony`);
- `response_template` as transformers >= 5.13 reads it: the key `fields`;
- `response_schema`, the older dialect, which transformers drops: `properties` or ``x-…`` keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.response_calls import READERS
from agenttrain.chat.response_harmony import HarmonySpec
from agenttrain.chat.response_marked import MarkedSpec
from agenttrain.chat.response_parts import CALL_ID, MAX_CALLS, ResponseSpec
from agenttrain.chat.response_schema import schema_spec
from agenttrain.chat.response_template import template_spec
from agenttrain.config.groups import conf_folder
from agenttrain.config.schema import ResponseSchemaConfig

GROUP = "response_schema"
CHOICES = ("auto", "file")
_KINDS: dict[str, tuple[type, str]] = {
    "ignored": (list, "a list"),
    "controls": (list, "a list"),
    "lenient": (bool, "true or false"),
}
_OPTIONAL = ("call_open_pattern", "call_close", "header", "footer")


def spec_names() -> list[str]:
    """Names of the formats in conf/response_schema/, sorted."""
    names = (file.stem for file in (conf_folder() / GROUP).glob("*.yaml"))
    return sorted(name for name in names if name not in CHOICES)


@cache
def load_spec(name: str) -> ResponseSpec:
    """The format of that name in conf/response_schema/. Raises ChatError for an unknown name."""
    known = spec_names()
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        names = ", ".join(sorted([*CHOICES, *known]))
        raise ChatError(f"{GROUP}.name={name} is not known: it is one of {names}{hint}")
    content = _load(conf_folder() / GROUP / f"{name}.yaml", f"{GROUP}={name}")
    return spec_of(content.get("spec") or {}, source=f"{GROUP}={name}")


def resolve_spec(tokenizer: Any, config: ResponseSchemaConfig, family: str | None) -> ResponseSpec:
    """The schema that the group asks for; `family`: the name of the format that the template shows.

    `auto` takes what the tokenizer carries, else the family's. Raises ChatError that names the key
    to set.
    """
    spec = _chosen_spec(tokenizer, config, family)
    if not config.lenient:
        return spec
    try:
        _check_lenient(spec)
    except ValueError as error:
        raise ChatError(f"{GROUP}.lenient=true: {error}") from error
    return cast(ResponseSpec, replace(cast(Any, spec), lenient=True))


def _chosen_spec(tokenizer: Any, config: ResponseSchemaConfig, family: str | None) -> ResponseSpec:
    if (config.path is not None) != (config.name == "file"):
        raise ChatError(
            f"{GROUP}.name={config.name} with {GROUP}.path={config.path}: a file is used by "
            f"`{GROUP}=file {GROUP}.path=<file.yaml>`, both together"
        )
    if config.path is not None:
        return read_spec(Path(config.path))
    if config.spec:
        return spec_of(config.spec, source=f"{GROUP}={config.name}")
    if config.name != "auto":
        return load_spec(config.name)
    carried = carried_spec(tokenizer)
    if carried is not None:
        return carried
    if family is None:
        raise ChatError(
            f"{GROUP}=auto: the tokenizer carries no response schema, and the chat template "
            f"renders tool calls in no known format; set {GROUP} to one of "
            f"{', '.join(spec_names())}, or to a file with `{GROUP}=file {GROUP}.path=<file.yaml>`"
        )
    return load_spec(family)


def carried_spec(tokenizer: Any) -> ResponseSpec | None:
    """The schema that a tokenizer's own configuration holds, in either dialect."""
    own = getattr(tokenizer, "init_kwargs", None) or {}
    for key in ("response_template", "response_schema"):
        carried = getattr(tokenizer, key, None) or own.get(key)
        if carried:
            return spec_of(carried, source=f"the tokenizer's {key}")
    return None


def read_spec(path: Path) -> ResponseSpec:
    """The schema in a file of the user's; it may stand below the key `spec`, as in conf/."""
    source = f"{GROUP}.path={path}"
    content = _load(path.expanduser(), source)
    inner = content.get("spec", content)
    for key in ("response_template", "response_schema"):  # a whole tokenizer_config.json
        inner = content.get(key) or inner
    return spec_of(inner, source=source)


def _load(path: Path, source: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ChatError(f"{source} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ChatError(f"{source} must hold a mapping, not {type(content).__name__}")
    return content


def spec_of(content: Any, *, source: str) -> ResponseSpec:
    """The schema that a mapping describes, in whichever of the forms. Raises ChatError."""
    if not isinstance(content, Mapping):
        raise ChatError(f"{source} must hold a mapping, not {type(content).__name__}")
    try:
        if "fields" in content:
            return template_spec(content)
        if "properties" in content or any(str(key).startswith("x-") for key in content):
            return schema_spec(content)
        return _ours(dict(content))
    except (ValueError, re.error) as error:  # the latter: our own patterns
        raise ChatError(f"{source}: {error}") from error


def _ours(settings: dict[str, Any]) -> ResponseSpec:
    form = settings.pop("format", "marked")
    call_id: Any = settings.get("call_id", CALL_ID)
    # Twice as many ids as there may be calls: those with ids of the model's are skipped.
    most = 2 * MAX_CALLS + 2
    try:
        distinct = len({call_id.format(turn=0, index=index) for index in range(most)}) == most
    except (AttributeError, LookupError, ValueError):
        distinct = False
    if not distinct:
        raise ValueError(f"call_id: {call_id!r} must be made of {{turn}} and {{index}}")
    if form == "harmony":
        _known(settings, ["call_id", "lenient"])
        if not isinstance(settings.get("lenient", False), bool):
            raise ValueError(f"lenient: must be true or false, not {settings['lenient']!r}")
        return HarmonySpec(**settings)
    if form != "marked":
        raise ValueError(f"format: {form!r} is not known: it is marked or harmony")
    _known(settings, [field.name for field in fields(MarkedSpec)])
    for key, value in settings.items():
        kind, word = _KINDS.get(key, (str, "text"))
        if not isinstance(value, kind) and (value is not None or key not in _OPTIONAL):
            raise ValueError(f"{key}: must be {word}, not {value!r}")
        if isinstance(value, list):
            settings[key] = tuple(str(item) for item in value)
    spec = MarkedSpec(**settings)
    if not spec.call_open and not spec.call_open_pattern:
        raise ValueError("call_open or call_open_pattern is missing: what does a call begin with?")
    if bool(spec.reasoning_open) != bool(spec.reasoning_close):
        raise ValueError("reasoning_open and reasoning_close go together")
    if spec.syntax not in READERS:
        raise ValueError(f"syntax: {spec.syntax!r} is not one of {', '.join(READERS)}")
    if spec.syntax == "named_json" and "(?P<name>" not in (spec.header or ""):
        raise ValueError("header: the pattern must have the group (?P<name>…)")
    if spec.lenient:
        _check_lenient(spec)
    re.compile(spec.header or "")
    if re.search(pattern := spec.call_open_pattern or "x", "") is not None:
        raise ValueError(f"call_open_pattern: {pattern!r} matches everywhere, nothing included")
    if "_open" in re.compile(pattern).groupindex:
        raise ValueError("call_open_pattern: the name of the group _open is taken; rename it")
    return spec


def _known(keys: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for key in keys:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{key} is no key of a response schema: they are {known}{hint}")


def _check_lenient(spec: ResponseSpec) -> None:
    if isinstance(spec, MarkedSpec) and spec.syntax in ("xml", "pairs", "gemma"):
        raise ValueError(
            f"lenient: has no effect on calls of syntax {spec.syntax}, which no JSON is"
        )
