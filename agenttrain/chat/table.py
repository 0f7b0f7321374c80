"""The table of known families: what `agenttrain templates` prints and the README shows."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

from agenttrain.chat.certificate import REASONING_PROBES, Certificate, Status, certify
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.families import Family, families
from agenttrain.chat.load import load_chat
from agenttrain.chat.originals import OWN, original, small_tokenizer
from agenttrain.chat.template import Chat
from agenttrain.config.schema import ChatTemplateConfig, ResponseSchemaConfig

UNKNOWN = "not run: the original comes with the test extra"
RECORD = Path(__file__).with_name("table.json")
"""The table as it was when its date and versions were written: `scripts/certify_templates`."""
PACKAGES = ("transformers", "trl", "mistral_common")
"""Whose versions say which stock templates were certified, and by what they were rendered."""
COLUMNS = {
    "family": "`chat_template=`",
    "models": "models",
    "tools": "tools",
    "prefix_preserving": "keeps past turns as they were (stock)",
    "fix": "fix",
    "parser": "parser",
    "reasoning": "past reasoning",
    "certificate": "certificate",
}


def _tool(name: str, **types: str) -> dict:
    properties = {key: {"type": kind} for key, kind in types.items()}
    function = {
        "name": name,
        "description": f"The tool {name}.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    return {"type": "function", "function": function}


EXAMPLE_TOOLS = (
    _tool("add", a="integer", b="number"),
    _tool("search", query="string", exact="boolean", fields="array", options="object"),
)
"""What a family is certified with when no run's own tools are at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family of the table."""

    family: str
    models: str
    tools: bool
    prefix_preserving: bool | None
    """Of the stock template; None where it is not at hand."""
    fix: str
    """What the fix changes; empty: nothing."""
    parser: str
    reasoning: str
    """What becomes of past reasoning: kept, dropped, `kept by the fix`, or none."""
    certificate: str
    certified: str | None = None
    """When and with which versions, where that was not now but in the table that is shipped."""


def rows() -> list[Row]:
    """All known families, by name: certified now, or as shipped where a template is missing."""
    shipped = recorded()
    return [
        shipped[name]
        if name in shipped and any(original(source) is None for source in _sources(family))
        else _row(name, family)
        for name, family in families().items()
    ]


@cache
def recorded() -> dict[str, Row]:
    """The shipped table, by family."""
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"rows": []}
    versions = ", ".join(f"{name} {text}" for name, text in found.get("versions", {}).items())
    certified = f"{found.get('date')} with {versions}"
    return {row["family"]: Row(**row, certified=certified) for row in found["rows"]}


def record() -> None:
    """Certify all families and write the table to be shipped. Raises ChatError without the stock
    templates."""
    for name, family in families().items():
        for source in _sources(family):
            if original(source) is None:
                raise ChatError(f"{name}: the template {source} is missing; install the test extra")
    certified = [asdict(_row(name, family)) for name, family in families().items()]
    found = {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "rows": [{k: v for k, v in row.items() if k != "certified"} for row in certified],
    }
    RECORD.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _row(name: str, family: Family) -> Row:
    found = [(chat, certify(chat, _tools(family))) for chat in _chats(name, family)]
    certificates = [certificate for _, certificate in found]
    changes = dict.fromkeys(change for c in certificates for change in c.changes)
    worst = max((c.status for c in certificates), key=list(Status).index, default=UNKNOWN)
    why = dict.fromkeys(edit.why for edit in (family.fixes or ((),))[0] if edit.why)
    return Row(
        family=name,
        models=family.models,
        tools=family.tools,
        prefix_preserving=all(c.preserving for c in certificates) if certificates else None,
        fix="; ".join(changes or ({} if certificates else why)),
        parser=family.response,
        reasoning=_reasoning(found),
        certificate=str(worst) + _note(family, certificates),
    )


def _tools(family: Family) -> Sequence[dict]:
    return EXAMPLE_TOOLS if family.tools else ()


def _note(family: Family, certificates: Sequence[Certificate]) -> str:
    one = ", one call per turn" if any(c.one_call_per_turn for c in certificates) else ""
    return one + ", on templates of ours" * any(source in OWN for source in family.originals)


def _sources(family: Family) -> dict[str, Family]:
    """The templates to certify a family with, and whose they are. One without marks is for any
    template: it is tried on those that have no tools."""
    if family.marks:
        return dict.fromkeys(family.originals, family)
    others = [other for other in families().values() if not other.tools]
    return {source: other for other in others for source in other.originals}


def _chats(name: str, family: Family) -> Iterator[Chat]:
    """The family's templates, each with a small tokenizer; those that are not installed are left
    out."""
    for source, owner in _sources(family).items():
        if (text := original(source)) is not None:
            yield _chat(owner, text, "auto" if family.marks else name)


def _chat(family: Family, template: str, name: str) -> Chat:
    tokenizer = copy.copy(small_tokenizer(family))
    tokenizer.chat_template = template
    return load_chat(tokenizer, ChatTemplateConfig(name=name), ResponseSchemaConfig())


def _reasoning(found: Sequence[tuple[Chat, Certificate]]) -> str:
    words = {_reasoning_of(chat, certificate): None for chat, certificate in found}
    return " or ".join(words) if words else "unknown"


def _reasoning_of(chat: Chat, certificate: Certificate) -> str:
    if not chat.renders_reasoning:
        return "none"
    probes = [p for p in certificate.probes if p.name in REASONING_PROBES]
    if any("leaves out reasoning" in probe.reason for probe in probes):
        return "dropped"
    return "kept by the fix" if any(p.status is Status.fixed for p in probes) else "kept"


def markdown(table: Sequence[Row]) -> str:
    """The table for the README."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|---" * len(COLUMNS) + "|"]
    for row in table:
        cells = [f"`{row.family}`", *(_cell(getattr(row, key)) for key in list(COLUMNS)[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plain(table: Sequence[Row]) -> str:
    """The table for a terminal."""
    heads = {
        "family": "family",
        "tools": "tools",
        "prefix_preserving": "stock keeps turns",
        "parser": "parser",
        "reasoning": "past reasoning",
        "certificate": "certificate",
        "fix": "fix",
    }
    cells = [list(heads.values())]
    cells += [[_cell(getattr(row, key)) for key in heads] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cell(value: object) -> str:
    words = {True: "yes", False: "no", None: "?", "": "–"}
    return words.get(value, str(value)) if isinstance(value, bool | str | None) else str(value)


def to_json(table: Sequence[Row]) -> str:
    """The table as a list of objects, of the fields of `Row` but `models`."""
    found = [asdict(row) for row in table]
    for row in found:
        del row["models"]
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"
