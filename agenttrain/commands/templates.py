"""`agenttrain templates`: the table of known families, or the certificate of a tokenizer.

The table is also in `docs/reference/families.md`. It certifies stock templates with small
tokenizers. The templates are data files of the test dependency `trl`, which are read without an
import, and for Mistral those that `mistral_common` generates. For families whose templates are in
no package, `OWN` has templates that write the same turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agenttrain.chat.certificate import REASONING_PROBES, Certificate, certify
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import Status
from agenttrain.chat.fixes import Family, families
from agenttrain.chat.loading import load_chat
from agenttrain.commands.verb import STDOUT, write_report
from agenttrain.utils.hub import is_hub_id, snapshot

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json", "tokenizer.model")
TOKENIZER_OPTIONS = ("chat_template", "path", "response_schema", "schema_path", "no_tools")
"""Options for the certificate of a tokenizer."""


def templates(options: argparse.Namespace) -> int:
    """Print the table, or a tokenizer's certificate.

    With a folder: the certificate of its tokenizer. Without: the table that the package ships
    (`read_shipped`), or with --certify a table made now (`rows`). A row whose stock template is not
    installed then comes from the shipped table. `certified` of shipped rows is the date and the
    versions with which they were made; it is None for rows made now. Exit code: 0, 1 for a template
    without certificate, 2 if it cannot be read.
    """
    try:
        _check_options(options)
        if options.folder is not None:
            return _certify(options)
        table = rows() if options.certify else list(read_shipped().values())
        write_report(json_rows(table), options.json)
        if options.json == STDOUT:  # the JSON takes the place of the text
            return 0
        print(markdown(table) if options.markdown else plain(table))
        # Dates and versions of the rows that were not certified now: the same for all of them.
        shipped = sorted({row.certified for row in table if row.certified})
        if not options.certify:
            print(f"\nCertified on {shipped[0]}; agenttrain templates --certify does it here.")
        elif shipped:
            families = [row.family for row in table if row.certified]
            print(
                f"\nNot certified now but on {shipped[0]}: {', '.join(families)}. "
                "pip install 'agenttrain[test]' brings the stock templates, to certify them here."
            )
    except (ChatError, OSError, ValueError) as error:
        print(f"agenttrain: {error}", file=sys.stderr)
        return 2
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise ChatError for options that are wrong, before anything is certified.

    Without a folder the command prints the table of known templates, which --certify makes anew.
    With one it certifies the template of the folder's tokenizer. A hub id in `options.folder`
    becomes the folder of its snapshot, which is downloaded.
    """
    if options.folder is None:
        names = [name for name in TOKENIZER_OPTIONS if getattr(options, name)]
        if names:
            option = f"--{names[0].replace('_', '-')}"
            raise ChatError(f"{option}: is for a tokenizer: agenttrain templates <folder> {option}")
        return
    if options.certify:
        raise ChatError("--certify: is for the table; a tokenizer is always certified")
    if options.folder.is_file():
        raise ChatError(
            f"{options.folder}: is a file; a template is certified with its tokenizer: "
            f"agenttrain templates <tokenizer folder> --path {options.folder}"
        )
    if is_hub_id(str(options.folder)):
        options.folder = snapshot(str(options.folder), options.revision, "templates")
    if not options.folder.is_dir():
        raise ChatError(f"{options.folder}: there is no such folder")
    if not any((options.folder / name).is_file() for name in TOKENIZER_FILES):
        raise ChatError(
            f"{options.folder}: holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])})"
        )


def _certify(options: argparse.Namespace) -> int:
    """Print the certificate of a tokenizer's template; return the exit code."""
    from transformers import AutoTokenizer

    name = options.chat_template or ("file" if options.path else "auto")
    tools = () if options.no_tools else EXAMPLE_TOOLS
    chat = load_chat(
        AutoTokenizer.from_pretrained(options.folder),
        ChatTemplateConfig(name=name, path=None if options.path is None else str(options.path)),
        ResponseSchemaConfig(
            name=options.response_schema or ("file" if options.schema_path else "auto"),
            path=None if options.schema_path is None else str(options.schema_path),
        ),
        tools=bool(tools),
    )
    certificate = certify(chat, tools)
    write_report({"folder": str(options.folder), **certificate.as_json()}, options.json)
    if options.json == STDOUT:  # the JSON takes the place of the text
        return 0 if certificate.passed else 1
    print(certificate.markdown() if options.markdown else "\n".join(certificate.lines()))
    if (changes := chat.fix.text()) and not options.markdown:
        print(f"\n{changes}", end="")
    return 0 if certificate.passed else 1


UNKNOWN = "not run: the original comes with the test extra"
RECORD = Path(__file__).with_name("templates.json")
"""The shipped table, with its date and versions; `scripts/certify_templates` writes it."""
PACKAGES = ("transformers", "trl", "mistral_common")
"""Packages that contain or render the stock templates; the table has their versions."""
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
EXAMPLE_TOOLS: tuple[dict, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in types.items()},
                "required": list(types),
            },
        },
    }
    for name, types in {
        "add": {"a": "integer", "b": "number"},
        "search": {"query": "string", "exact": "boolean", "fields": "array", "options": "object"},
    }.items()
)
"""Tools to certify a family with, where there is no run that has tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Row of the table of chat templates: one family of models."""

    family: str
    models: str
    """Names of models that have the template."""
    tools: bool
    """True if the models call tools."""
    prefix_preserving: bool | None
    """True if the stock template never changes past turns; None if it is not installed."""
    fix: str
    """Changes of the fix; empty: none."""
    parser: str
    """Response schema that reads the model's turns."""
    reasoning: str
    """Fate of past reasoning: kept, dropped, `kept by the fix`, or none."""
    certificate: str
    """Worst status of the stock templates, with notes."""
    certified: str | None = None
    """Date and versions of a row of the shipped table; None: certified now."""


def rows() -> list[TableRow]:
    """Return a row for each known family: certified now, or as shipped if a template is missing."""
    shipped = read_shipped()
    table = []
    for name, family in families().items():
        has_originals = all(original(source) is not None for source in _sources(family))
        is_shipped_row = name in shipped and not has_originals
        table.append(shipped[name] if is_shipped_row else _certify_family(name, family))
    return table


@cache
def read_shipped() -> dict[str, TableRow]:
    """Return the shipped table, by family."""
    shipped = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"rows": []}
    versions = ", ".join(f"{name} {text}" for name, text in shipped.get("versions", {}).items())
    certified = f"{shipped.get('date')} with {versions}"
    return {row["family"]: TableRow(**row, certified=certified) for row in shipped["rows"]}


def record() -> None:
    """Certify all families and write the shipped table; raises ChatError without a template."""
    for name, family in families().items():
        for source in _sources(family):
            if original(source) is None:
                raise ChatError(f"{name}: the template {source} is missing; install the test extra")
    rows_of_families = []
    for name, family in families().items():
        row = asdict(_certify_family(name, family))
        del row["certified"]  # one date and one list of versions serve all rows
        rows_of_families.append(row)
    content = {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "rows": rows_of_families,
    }
    RECORD.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _certify_family(name: str, family: Family) -> TableRow:
    """Certify a family with its stock templates, and return its row of the table.

    Stock templates that are not installed are left out; without any the row says so.
    """
    certificates: list[Certificate] = []
    # Fates of past reasoning, "kept" or "dropped", each once: keys of an ordered set.
    reasoning_fates: dict[str, None] = {}
    for source, owner in _sources(family).items():
        text = original(source)
        if text is None:  # it comes with a package that is not installed
            continue
        tokenizer = copy.copy(small_tokenizer(owner))
        tokenizer.chat_template = text
        # A family with marks has to be recognised by its template's source.
        template = ChatTemplateConfig(name="auto" if family.marks else name)
        chat = load_chat(tokenizer, template, ResponseSchemaConfig())
        certificate = certify(chat, EXAMPLE_TOOLS if family.tools else ())
        certificates.append(certificate)
        fate = _describe_past_reasoning(certificate) if chat.renders_reasoning else "none"
        reasoning_fates[fate] = None
    # The worst status: they are declared from best to worst.
    status = max((c.status for c in certificates), key=list(Status).index, default=UNKNOWN)
    note = ", one call per turn" if any(c.one_call_per_turn for c in certificates) else ""
    # OWN: templates that this package brings in place of a model's.
    note += ", on templates of ours" if any(source in OWN for source in family.originals) else ""
    return TableRow(
        family=name,
        models=family.models,
        tools=family.tools,
        prefix_preserving=all(c.preserving for c in certificates) if certificates else None,
        fix="; ".join(_fix_texts(family, certificates)),
        parser=family.response,
        reasoning=" or ".join(reasoning_fates) if reasoning_fates else "unknown",
        certificate=str(status) + note,
    )


def _fix_texts(family: Family, certificates: Sequence[Certificate]) -> Iterable[str]:
    """Return the changes of a family's fix, each once.

    They are those of its certificates or, if there are none, the reasons that its first fix names.
    """
    if certificates:
        return dict.fromkeys(change for c in certificates for change in c.changes)
    first_fix = family.fixes[0] if family.fixes else ()
    return dict.fromkeys(edit.why for edit in first_fix if edit.why)


def _describe_past_reasoning(certificate: Certificate) -> str:
    """Return whether past reasoning is kept, dropped or ``kept by the fix``."""
    probes = [probe for probe in certificate.probes if probe.name in REASONING_PROBES]
    if any("leaves out reasoning" in probe.reason for probe in probes):
        return "dropped"
    return "kept by the fix" if any(p.status is Status.fixed for p in probes) else "kept"


def _sources(family: Family) -> dict[str, Family]:
    """Map the names of the templates to certify a family with to the families that own them.

    Marks are texts by which a family's template is recognized. A family without marks suits any
    template: it is certified with those of the families without tools.
    """
    if family.marks:
        return dict.fromkeys(family.originals, family)
    owners = [owner for owner in families().values() if not owner.tools]
    return {source: owner for owner in owners for source in owner.originals}


def markdown(table: Sequence[TableRow]) -> str:
    """Return the table as Markdown."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|---" * len(COLUMNS) + "|"]
    for row in table:
        cells = [f"`{row.family}`", *(_cell(getattr(row, key)) for key in list(COLUMNS)[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plain(table: Sequence[TableRow]) -> str:
    """Return the table for a terminal, its columns padded to equal width."""
    heads = {  # field of TableRow -> heading
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
    """Return a field of a row as text."""
    words = {True: "yes", False: "no", None: "?", "": "–"}
    return words.get(value, str(value)) if isinstance(value, bool | str | None) else str(value)


def json_rows(table: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Return the rows as `--json` writes them: the fields of `TableRow` without `models`."""
    return [{k: v for k, v in asdict(row).items() if k != "models"} for row in table]


TRL = "trl"
TEMPLATES = "chat_templates"
MISTRAL = "mistral_common:"
OWN = {
    # A turn begins on a new line; if there is no system message, the model adds its own.
    "own:dbrx": (
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}"
        "{%- endif %}{%- for message in messages %}{{- '' if loop.first else '\n' }}"
        "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '\n<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # A turn ends with a line break.
    "own:falcon_mamba": (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
        "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # The model's own, literally.
    "own:smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
"""Templates by their names in `originals` of the families."""


def originals_folder() -> Path | None:
    """Return the folder of the stock templates; None if they are not installed."""
    package = find_spec(TRL)
    folders = list(package.submodule_search_locations or ()) if package else []
    folder = Path(folders[0]) / TEMPLATES if folders else None
    return folder if folder and folder.is_dir() else None


def original(name: str) -> str | None:
    """Return the text of a stock template, or None if it is not installed.

    Examples of names: `qwen3`, `mistral_common:v7`, `own:dbrx`.
    """
    if name in OWN:
        return OWN[name]
    folder = originals_folder()
    if folder is None:
        return None
    if not name.startswith(MISTRAL):
        file = folder / f"{name}.jinja"
        return file.read_text(encoding="utf-8") if file.is_file() else None
    if find_spec("mistral_common") is None:
        return None
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    # `v7`, or with thinking `v13:thinking`; `v1` is that of SentencePiece.
    version, _, thinking = name.removeprefix(MISTRAL).partition(":")
    return generate_chat_template(
        spm=version == "v1",
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=bool(thinking),
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


@cache
def small_tokenizer(family: Family) -> Any:
    """Return a tokenizer of single bytes with the family's control tokens, to try a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in family.control])
    core.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=family.control[0],
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
    )
