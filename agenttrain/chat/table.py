"""The table of known families: what `agenttrain templates` prints and the README shows."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
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
"""Tools to certify a family with when no run's own are at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family of the table."""

    family: str
    models: str
    tools: bool
    prefix_preserving: bool | None
    """The stock template renders past turns always the same; None where it is not at hand."""
    fix: str
    """Changes of the fix; empty: none."""
    parser: str
    reasoning: str
    """Fate of past reasoning: kept, dropped, `kept by the fix`, or none."""
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
    shipped = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"rows": []}
    versions = ", ".join(f"{name} {text}" for name, text in shipped.get("versions", {}).items())
    certified = f"{shipped.get('date')} with {versions}"
    return {row["family"]: Row(**row, certified=certified) for row in shipped["rows"]}


def record() -> None:
    """Certify all families and write the table to be shipped. Raises ChatError without the stock
    templates."""
    for name, family in families().items():
        for source in _sources(family):
            if original(source) is None:
                raise ChatError(f"{name}: the template {source} is missing; install the test extra")
    certified = [asdict(_row(name, family)) for name, family in families().items()]
    content = {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "rows": [{k: v for k, v in row.items() if k != "certified"} for row in certified],
    }
    RECORD.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _row(name: str, family: Family) -> Row:
    certificates: list[Certificate] = []
    reasoning: dict[str, None] = {}
    for source, owner in _sources(family).items():
        if (text := original(source)) is None:
            continue
        tokenizer = copy.copy(small_tokenizer(owner))
        tokenizer.chat_template = text
        template = ChatTemplateConfig(name="auto" if family.marks else name)
        chat = load_chat(tokenizer, template, ResponseSchemaConfig())
        certificate = certify(chat, EXAMPLE_TOOLS if family.tools else ())
        certificates.append(certificate)
        reasoning[_reasoning_of(chat, certificate)] = None
    changes = dict.fromkeys(change for c in certificates for change in c.changes)
    why = dict.fromkeys(edit.why for edit in (family.fixes or ((),))[0] if edit.why)
    status = max((c.status for c in certificates), key=list(Status).index, default=UNKNOWN)
    note = ", one call per turn" if any(c.one_call_per_turn for c in certificates) else ""
    note += ", on templates of ours" if any(source in OWN for source in family.originals) else ""
    return Row(
        family=name,
        models=family.models,
        tools=family.tools,
        prefix_preserving=all(c.preserving for c in certificates) if certificates else None,
        fix="; ".join(changes or ({} if certificates else why)),
        parser=family.response,
        reasoning=" or ".join(reasoning) if reasoning else "unknown",
        certificate=str(status) + note,
    )


def _sources(family: Family) -> dict[str, Family]:
    """The templates to certify a family with, and whose they are. One without marks is for any
    template: it is tried on those that have no tools."""
    if family.marks:
        return dict.fromkeys(family.originals, family)
    others = [other for other in families().values() if not other.tools]
    return {source: other for other in others for source in other.originals}


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
    families = [{k: v for k, v in asdict(row).items() if k != "models"} for row in table]
    return json.dumps(families, indent=2, ensure_ascii=False) + "\n"
