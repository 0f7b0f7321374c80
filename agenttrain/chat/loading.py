"""Make a `Chat` from a tokenizer and two configuration groups: template and response schema.

The template is a file, or one that the tokenizer carries. A response schema is given by name, in a
file, or by the tokenizer. It is a mapping in one of three forms, recognised by their keys:

- our own (`format: marked`, the default, with the fields of `MarkedSpec`; `format: harmony`);
- `response_template` as transformers >= 5.13 reads it: the key `fields`;
- `response_schema`, the older dialect, which transformers drops: `properties` or ``x-…`` keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import yaml
from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.fixes import (
    REMEDY,
    Family,
    Fix,
    apply_fix,
    families,
    matches_source,
    parse_family,
    recognise,
)
from agenttrain.chat.parsers.base import CALL_ID, MAX_CALLS, ResponseSpec, parse_response
from agenttrain.chat.parsers.calls import READERS
from agenttrain.chat.parsers.export import response_template
from agenttrain.chat.parsers.harmony import HarmonySpec
from agenttrain.chat.parsers.marked import MarkedSpec
from agenttrain.chat.parsers.response_schema import make_schema_spec
from agenttrain.chat.parsers.response_template import TemplateSpec, make_template_spec
from agenttrain.chat.probing import USER, probe_behaviour, render, syntax_problem
from agenttrain.types import ConfigError, Message
from agenttrain.utils.files import conf_folder, parse_yaml
from agenttrain.utils.model_path import TOKENIZER_CONFIG, template_file
from agenttrain.utils.placeholders import Placeholders

DEFAULT_SCHEMA = "hermes"
"""Response schema for templates that render no calls."""
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that the user cannot set."""
CALL_ARGUMENTS = {"city": "Oslo", "days": 2}
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


def load_chat(
    tokenizer: Any,
    template: ChatTemplateConfig,
    response_schema: ResponseSchemaConfig,
    *,
    tools: bool = True,
    placeholders: Placeholders | str = "this model reads text only",
) -> Chat:
    """Make the chat that the groups `chat_template` and `response_schema` describe.

    `tools`: the run has tools; a tokenizer may carry a separate template for such runs.
    `placeholders` are those of the model's images, or the reason why the model reads none. Raises
    ChatError that names the group and the key to change.
    """
    all_families = dict(families())
    if template.family:
        all_families[template.name] = parse_family(template.name, template.family)
    source, template_note = _template_source(tokenizer, template, all_families, tools=tools)
    fix = replace(make_fix(tokenizer, source, template, all_families), chosen=template_note)
    _check_variables(fix.template, template.kwargs)
    family = all_families.get(fix.family or "")
    make_chat = partial(
        Chat,
        tokenizer,
        fix.template,
        kwargs=template.kwargs,
        eos_token_ids=_eos_token_ids(tokenizer),
        fix=fix,
        plain=_plain_tokens(source, family, all_families),
        placeholders=None if isinstance(placeholders, str) else placeholders,
        no_images=placeholders if isinstance(placeholders, str) else "",
        roles=template.roles,
    )
    format_name = family.response if family else None
    if format_name is None and not renders_calls(tokenizer, fix.template, template.kwargs):
        format_name = DEFAULT_SCHEMA  # any will do: this template writes no calls to read
    # The response schema that a tokenizer carries is for its own template, not for a tool format
    # that the fix has added to it. Only a family without `marks`, such as hermes, adds one.
    fix_added_format = family is not None and not family.marks and bool(fix.changes)
    spec = resolve_spec(None if fix_added_format else tokenizer, response_schema, format_name)
    if family is None or response_schema.name != "auto" or not isinstance(spec, TemplateSpec):
        return make_chat(spec)
    # The tokenizer carries a `response_template`, transformers' dialect. It may be the family's own
    # format, which checkpoints of ours are saved with in this dialect. The dialect can express
    # less, so the family's own format is used if a checkpoint would carry exactly this one for it.
    family_chat = make_chat(load_spec(family.response))
    is_saved_family_format = response_template(family_chat) == spec.source
    return family_chat if is_saved_family_format else make_chat(spec)


def _plain_tokens(
    source: str, family: Family | None, all_families: Mapping[str, Family]
) -> dict[str, str]:
    """Return the added tokens that are ordinary text in a template, with the reasons.

    They are those of `family` and of each family whose marks the template `source` contains. The
    two differ if the fix has added the tool format of another family, such as hermes.
    """
    matching = [f for f in all_families.values() if f == family or matches_source(source, f)]
    return {text: entry.why for f in matching for entry in f.plain for text in entry.tokens}


def make_fix(
    tokenizer: Any, source: str, config: ChatTemplateConfig, all_families: Mapping[str, Family]
) -> Fix:
    """Return the model's template (`Fix.stock`), and with the changes that its family needs.

    The setting `chat_template.name` decides on the family and the changes::

        name         family        changes
        auto         recognised    its fix; if that fails, none, and `Fix.problem` says why
        none, file   recognised    none: the family only decides the response schema
        a family     that family   its fix; raises ChatError if that fails or has no effect

    Marks are texts that stand in each template of a family. A family without marks only adds a
    tool format to a template.
    """

    def reads(family: Family, template: str) -> bool:
        """Return True if the family's parser reads a call that the template renders."""
        return reads_back(tokenizer, template, load_spec(family.response), config.kwargs)

    is_named = config.name in all_families
    name = config.name if is_named else recognise(source, all_families, reads)
    unchanged = Fix(family=name, stock=source, template=source)
    if name is None or config.name in ("none", "file"):
        return unchanged
    family = all_families[name]
    if not family.marks and reads(family, source):
        return unchanged  # the template has the family's tool format already
    try:
        fix = _apply_working_fix(name, family, source, reads)
        # A recognised family always matches. A named one may be wrong for the template.
        if is_named and family.marks and not matches_source(source, family):
            _check_effect(fix, family, all_families, reads)
        return fix
    except ChatError as error:
        if config.name != "auto":
            raise
        return replace(unchanged, problem=str(error))


def _apply_working_fix(
    name: str, family: Family, source: str, reads: Callable[[Family, str], bool]
) -> Fix:
    """Apply a family's fix; raise ChatError if none fits or it breaks the template's calls.

    `reads(family, template)` is True if the family's parser reads a call that the template renders.
    """
    fix = apply_fix(name, family, source)
    if family.tools and reads(family, source) and not reads(family, fix.template):
        # A fork may contain the text that an edit replaces, and lack the variables it uses.
        raise ChatError(
            f"chat_template={name}: with the fix of {name}, the model's template no longer "
            f"renders the calls that it renders without; {REMEDY}"
        )
    return fix


def _check_effect(
    fix: Fix,
    family: Family,
    all_families: Mapping[str, Family],
    reads: Callable[[Family, str], bool],
) -> None:
    """Raise ChatError if a family that the user named has no effect on the template.

    The template lacks texts that the family's templates have (`marks`): it may be a fork of them,
    or the name may be wrong. The family has an effect if its parser reads the fixed template's
    calls, and one of these holds:

    - the fix changed the template, or
    - the template, `fix.stock`, is of no known family: then only the name brings the family's
      response schema, also without a change.

    `reads(family, template)` is True if the family's parser reads a call that the template renders.
    """
    recognised = recognise(fix.stock, all_families, reads)
    reads_calls = family.tools and reads(family, fix.template)
    if reads_calls and (recognised is None or fix.changes):
        return
    kind = f"is of the family {recognised}" if recognised else "is of no known family"
    raise ChatError(
        f"chat_template={fix.family}: has no effect, because the model's template {kind}; set "
        "chat_template=auto, or chat_template=file with chat_template.path=<file.jinja>"
    )


def _template_source(
    tokenizer: Any, config: ChatTemplateConfig, all_families: Mapping[str, Family], *, tools: bool
) -> tuple[str, str | None]:
    """Return (the template before fixes, a note if the tokenizer carries several or None).

    The template is the user's, in `config.path`, or one that the tokenizer carries. Of several, a
    run with `tools` takes another than a run without. `config.name` is only checked here: it says
    how the template is changed afterwards (`make_fix`). Raises ChatError.
    """
    names = sorted(["auto", "none", "file", *all_families])
    if config.name not in names:
        close = get_close_matches(config.name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ChatError(
            f"chat_template.name={config.name} is not known: it is one of {', '.join(names)}{hint}"
        )
    if config.path is not None:
        return read_template(config.path, config.revision, tools=tools), None
    return template_of_tokenizer(getattr(tokenizer, "chat_template", None), tools=tools)


def renders_calls(tokenizer: Any, template: str, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a template renders the assistant's tool calls."""
    return probe_behaviour(partial(render, tokenizer, template, kwargs=kwargs)).renders_calls


def reads_back(
    tokenizer: Any, template: str, response: ResponseSpec, kwargs: Mapping[str, Any]
) -> bool:
    """Return True if the parser `response` reads a call out of the template's rendering of it.

    The parser reads completions, so the prompt before the call is cut off the rendering first.
    """
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefgh1",  # of the form SHORT_ID, which Mistral's templates demand
                "type": "function",
                "function": {"name": "forecast", "arguments": CALL_ARGUMENTS},
            }
        ],
    }
    try:
        rendering = render(tokenizer, template, [USER, call], kwargs=kwargs)
        # The prompt without the header of the assistant's turn is for templates whose header opens
        # reasoning: the call has no reasoning, so that its turn does not begin with such a header.
        prompts = [
            render(tokenizer, template, [USER], generation_prompt=with_header, kwargs=kwargs)
            for with_header in (True, False)
        ]
    except ChatError:
        return False
    completions = [rendering.removeprefix(p) for p in prompts if rendering.startswith(p)]
    # If the rendering begins with neither (the template adds to the prompt once an answer follows),
    # it is parsed whole: the text before the call is content then.
    for completion in completions or [rendering]:
        calls = parse_response(completion, response, turn=0, schemas=[FORECAST]).calls
        parsed = [(call.name, call.arguments, call.malformed) for call in calls]
        if parsed == [("forecast", CALL_ARGUMENTS, None)]:
            return True
    return False


def _eos_token_ids(tokenizer: Any) -> list[int]:
    """Return the tokenizer's end of sequence, then those in the generation config beside it."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    path = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    if tokenizer.name_or_path and path.is_file():
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if configured is not None:  # one id, or a list
            ids += configured if isinstance(configured, list) else [configured]
    return ids


def _check_variables(template: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ChatError for variables in `kwargs` that the template never reads."""
    words = set(re.findall(r"\w+", template))
    for key in kwargs:
        if key in RESERVED_VARIABLES:
            raise ChatError(f"chat_template.kwargs.{key}: agenttrain fills it in; remove it")
        if key not in words:
            close = get_close_matches(key, words, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise ChatError(
                f"chat_template.kwargs.{key}: the chat template reads no such variable; {hint}"
            )


TOOL_USE, DEFAULT = "tool_use", "default"
"""Names under which tokenizers carry templates for runs with and without tools."""
FILE_REMEDY = "set `chat_template=file chat_template.path=<file.jinja>`"
# The tags with which templates mark assistant text for transformers' masks; Jinja lacks them.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def template_of_tokenizer(carried: Any, *, tools: bool) -> tuple[str, str | None]:
    """Return (a template that a tokenizer carries, a note on its name or None if it has no name).

    `carried` is a text, a mapping, or a list of ``{"name": …, "template": …}``. As in transformers,
    a run with tools uses the template named `tool_use`, if there is one. Raises ChatError.
    """
    if isinstance(carried, str) and carried:
        return carried, None
    if isinstance(carried, list | tuple):
        carried = {entry["name"]: entry["template"] for entry in carried}
    if not carried:
        raise ChatError(f"model.path: the tokenizer carries no chat template; {FILE_REMEDY}")
    names = ", ".join(sorted(carried))
    for name in (TOOL_USE, DEFAULT) if tools else (DEFAULT,):
        if name in carried:
            no_other = "" if len(carried) > 1 else ", and no other"
            run = "a run with tools" if tools else "a run without tools"
            return carried[name], (
                f"of the templates that the tokenizer carries ({names}{no_other}), "
                f"{run} takes {name}; "
                "it is the one that is saved with checkpoints"
            )
    raise ChatError(
        f"model.path: the tokenizer carries the chat templates {names}, and none named default; "
        f"save the one to train with as a file and {FILE_REMEDY}"
    )


def read_template(path: str, revision: str | None = None, *, tools: bool = True) -> str:
    """Read `chat_template.path`: a Jinja file, or a model's template. Raises ChatError."""
    try:
        file = template_file(path, revision)
        text = file.read_text(encoding="utf-8")
        if file.name == TOKENIZER_CONFIG:
            carried = json.loads(text).get("chat_template")
            if not carried:
                raise ChatError(f"chat_template.path={path}: {file} has no chat template")
            text, _ = template_of_tokenizer(carried, tools=tools)
    except ConfigError as error:
        raise ChatError(str(error)) from error
    except (OSError, ValueError) as error:
        raise ChatError(f"chat_template.path={path} cannot be read: {error}") from error
    try:
        # Without the tags {% generation %}, which Jinja lacks: transformers' masks use them.
        _ENVIRONMENT.parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        raise ChatError(f"chat_template.path={path}: {syntax_problem(error)}") from error
    return text


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)


GROUP = "response_schema"
CHOICES = ("auto", "file")
"""Values of `response_schema.name` that are no format's name."""
_KINDS: dict[str, tuple[type, str]] = {
    "ignored": (list, "a list"),
    "controls": (list, "a list"),
    "lenient": (bool, "true or false"),
}
"""Key of MarkedSpec -> (type of its value, the type in words). All other values are text."""
_OPTIONAL = ("call_open_pattern", "call_open_also", "call_close", "header", "footer")


def spec_names() -> list[str]:
    """Return the names of the formats in conf/response_schema/, sorted."""
    names = (file.stem for file in (conf_folder() / GROUP).glob("*.yaml"))
    return sorted(name for name in names if name not in CHOICES)


@cache
def load_spec(name: str) -> ResponseSpec:
    """Load a format of conf/response_schema/ by name. Raises ChatError for an unknown name."""
    bundled = spec_names()
    if name not in bundled:
        close = get_close_matches(name, bundled, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        # The setting may also be one of CHOICES, for which `resolve_spec` does not call this.
        names = ", ".join(sorted([*CHOICES, *bundled]))
        raise ChatError(f"{GROUP}.name={name} is not known: it is one of {names}{hint}")
    content = _load_mapping(conf_folder() / GROUP / f"{name}.yaml", f"{GROUP}={name}")
    return make_spec(content.get("spec") or {}, source=f"{GROUP}={name}")


def server_parser(chat: Chat, config: ResponseSchemaConfig) -> str:
    """Return vLLM's name for a parser of the chat's calls; raises ChatError if none is known.

    The setting `response_schema.server_parser` goes first, then the file of the bundled format that
    equals the chat's.
    """
    if config.server_parser is not None:
        return config.server_parser
    # `lenient` is the user's choice, and no part of the format.
    strict = replace(cast(Any, chat.response), lenient=False)
    for name in spec_names():
        if load_spec(name) == strict:
            content = _load_mapping(conf_folder() / GROUP / f"{name}.yaml", f"{GROUP}={name}")
            if "server_parser" in content:
                return str(content["server_parser"])
    raise ChatError(
        f"{GROUP}={config.name}: calls in this format have no bundled parser in vLLM; name one of "
        f"vLLM's with {GROUP}.server_parser=…, or leave the engine out: agenttrain serve then "
        "reads the calls itself"
    )


def resolve_spec(tokenizer: Any, config: ResponseSchemaConfig, family: str | None) -> ResponseSpec:
    """Return the response schema that the group `response_schema` names.

    It is the user's file, a format in the settings, or a named one. `auto` takes the schema that
    the tokenizer carries, in either dialect, else `family`, the name of the family's format. Raises
    ChatError that names the key to set.
    """
    tokenizer_config = getattr(tokenizer, "init_kwargs", None) or {}
    carried = {
        key: content
        for key in ("response_template", "response_schema")
        if (content := getattr(tokenizer, key, None) or tokenizer_config.get(key))
    }
    if config.path is not None:
        spec = read_spec(Path(config.path))
    elif config.spec:
        spec = make_spec(config.spec, source=f"{GROUP}={config.name}")
    elif config.name != "auto":
        spec = load_spec(config.name)
    elif carried:
        key, content = next(iter(carried.items()))  # response_template goes first
        spec = make_spec(content, source=f"the tokenizer's {key}")
    elif family is not None:
        spec = load_spec(family)
    else:
        raise ChatError(
            f"{GROUP}=auto: the tokenizer carries no response schema, and the chat template "
            f"renders tool calls in no known format; set {GROUP} to one of "
            f"{', '.join(spec_names())}, or to a file with `{GROUP}=file {GROUP}.path=<file.yaml>`"
        )
    if not config.lenient:
        return spec
    try:
        _check_lenient(spec)
    except ValueError as error:
        raise ChatError(f"{GROUP}.lenient=true: {error}") from error
    # Casts: every spec is a dataclass, which the Protocol cannot say.
    return cast(ResponseSpec, replace(cast(Any, spec), lenient=True))


def read_spec(path: Path) -> ResponseSpec:
    """Read a schema from a user's file, where it may stand below the key `spec`, as in conf/."""
    source = f"{GROUP}.path={path}"
    content = _load_mapping(path.expanduser(), source)
    inner = content.get("spec", content)
    for key in ("response_template", "response_schema"):  # a whole tokenizer_config.json
        inner = content.get(key) or inner
    return make_spec(inner, source=source)


def _load_mapping(path: Path, source: str) -> dict[str, Any]:
    """Read a mapping from a JSON or YAML file. Raises ChatError that names `source`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ChatError(f"{source} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ChatError(f"{source} must hold a mapping, not {type(content).__name__}")
    return content


def make_spec(content: Any, *, source: str) -> ResponseSpec:
    """Make a response schema of a mapping: transformers' two dialects or agenttrain's own form.

    Raises ChatError for a mapping that cannot be used.
    """
    if not isinstance(content, Mapping):
        raise ChatError(f"{source} must hold a mapping, not {type(content).__name__}")
    try:
        if "fields" in content:  # a `response_template`
            return make_template_spec(content)
        is_schema = "properties" in content or any(str(key).startswith("x-") for key in content)
        if is_schema:  # a `response_schema`
            return make_schema_spec(content)
        return _make_own_spec(dict(content))
    except (ValueError, re.error) as error:  # re.error: patterns in our own form
        raise ChatError(f"{source}: {error}") from error


def _check_call_id(call_id: Any) -> None:
    """Raise ValueError for a format of call ids that does not give each call an id of its own."""
    # Twice as many ids as calls may be needed: an id that the model wrote itself is skipped.
    id_count = 2 * MAX_CALLS + 2
    try:
        ids = {call_id.format(turn=0, index=index) for index in range(id_count)}
        distinct = len(ids) == id_count
    except (AttributeError, LookupError, ValueError):
        distinct = False
    if not distinct:
        raise ValueError(f"call_id: {call_id!r} must be made of {{turn}} and {{index}}")


def _make_own_spec(settings: dict[str, Any]) -> ResponseSpec:
    """Make a spec of agenttrain's own form of response schemas, which names marks and a syntax.

    Raises ValueError and re.error for a setting that cannot work.
    """
    form = settings.pop("format", "marked")
    _check_call_id(settings.get("call_id", CALL_ID))
    if form == "harmony":
        _check_keys(settings, ["call_id", "lenient"])
        if not isinstance(settings.get("lenient", False), bool):
            raise ValueError(f"lenient: must be true or false, not {settings['lenient']!r}")
        return HarmonySpec(**settings)
    if form != "marked":
        raise ValueError(f"format: {form!r} is not known: it is marked or harmony")
    _check_keys(settings, [field.name for field in fields(MarkedSpec)])
    for key, value in settings.items():
        value_type, type_words = _KINDS.get(key, (str, "text"))
        is_unset = value is None and key in _OPTIONAL
        if not is_unset and not isinstance(value, value_type):
            raise ValueError(f"{key}: must be {type_words}, not {value!r}")
        if isinstance(value, list):
            settings[key] = tuple(str(item) for item in value)
    spec = MarkedSpec(**settings)
    _check_marked_spec(spec)
    return spec


def _check_marked_spec(spec: MarkedSpec) -> None:
    """Raise ValueError or re.error for settings that do not fit each other or the parser."""
    header = spec.header or ""
    if not spec.call_open and not spec.call_open_pattern:
        raise ValueError("call_open or call_open_pattern is missing: what does a call begin with?")
    if bool(spec.reasoning_open) != bool(spec.reasoning_close):
        raise ValueError("reasoning_open and reasoning_close go together")
    if spec.syntax not in READERS:
        raise ValueError(f"syntax: {spec.syntax!r} is not one of {', '.join(READERS)}")
    if spec.syntax == "named_json" and "(?P<name>" not in header:
        raise ValueError("header: the pattern must have the group (?P<name>…)")
    if spec.lenient:
        _check_lenient(spec)
    re.compile(header)  # raises re.error
    for key in ("call_open_pattern", "call_open_also"):
        pattern = getattr(spec, key)
        if not pattern:
            continue
        if re.search(pattern, "") is not None:
            raise ValueError(f"{key}: {pattern!r} matches everywhere, nothing included")
        if "_open" in re.compile(pattern).groupindex:  # MarkedSpec's own group around the pattern
            raise ValueError(f"{key}: the name of the group _open is taken; rename it")


def _check_keys(keys: Iterable[str], allowed: list[str]) -> None:
    for key in keys:
        if key not in allowed:
            close = get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{key} is no key of a response schema: they are {allowed}{hint}")


def _check_lenient(spec: ResponseSpec) -> None:
    """Raise ValueError if the spec's calls are not JSON, so that `lenient` has no effect."""
    if isinstance(spec, MarkedSpec) and spec.syntax in ("xml", "pairs", "gemma"):
        raise ValueError(
            f"lenient: has no effect on calls of syntax {spec.syntax}, which no JSON is"
        )
