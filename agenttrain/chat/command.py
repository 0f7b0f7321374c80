"""`agenttrain templates`: the table of known families, or the certificate of a tokenizer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from agenttrain.chat.certificate import certify
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.load import load_chat
from agenttrain.chat.table import EXAMPLE_TOOLS, markdown, plain, rows, to_json
from agenttrain.config.schema import ChatTemplateConfig, ResponseSchemaConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json", "tokenizer.model")
OF_A_FOLDER = ("chat_template", "path", "response_schema", "schema_path", "no_tools")
"""Options that say how a tokenizer is certified."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb. Exit code: 0, 1 for a template that is refused, 2 for one that cannot be read.

    Example: ``agenttrain templates my_model --chat-template hermes``
    """
    parser = argparse.ArgumentParser(prog="agenttrain templates", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of a tokenizer, to certify it")
    parser.add_argument("--chat-template", metavar="NAME", help="as in chat_template=… (auto)")
    parser.add_argument("--path", metavar="FILE", help="as in chat_template.path=…: a Jinja file")
    parser.add_argument("--response-schema", metavar="NAME", help="as in response_schema=… (auto)")
    parser.add_argument("--schema-path", metavar="FILE", help="as in response_schema.path=…: YAML")
    parser.add_argument("--no-tools", action="store_true", help="certify training without tools")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is found here")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args(list(arguments))
    try:
        _check(options)
        if options.folder is not None:
            return _certify(options)
        table = rows()
        print(markdown(table) if options.markdown else plain(table))
        if shipped := sorted({row.certified for row in table if row.certified}):
            families = [row.family for row in table if row.certified]
            print(
                f"\nNot certified now but on {shipped[0]}: {', '.join(families)}. "
                "pip install 'agenttrain[test]' brings the stock templates, to certify them here."
            )
        if options.json:
            options.json.write_text(to_json(table), encoding="utf-8")
    except (ChatError, OSError, ValueError) as error:
        print(f"agenttrain: {error}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ChatError for what can be known to be wrong before anything is certified."""
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ChatError(
            f"--json {options.json}: there is no folder {options.json.parent}; make it, or name "
            "another file"
        )
    if options.json is not None and options.json.is_dir():
        raise ChatError(f"--json {options.json}: is a folder; name a file in it")
    if options.folder is None:
        given = [name for name in OF_A_FOLDER if getattr(options, name)]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise ChatError(f"{option}: is for a tokenizer: agenttrain templates <folder> {option}")
        return
    if options.folder.is_file():
        raise ChatError(
            f"{options.folder}: is a file; a template is tried with the tokenizer that it is for: "
            f"agenttrain templates <tokenizer folder> --path {options.folder}"
        )
    if not options.folder.is_dir():
        raise ChatError(f"{options.folder}: there is no such folder")
    if not any((options.folder / name).is_file() for name in TOKENIZER_FILES):
        raise ChatError(
            f"{options.folder}: holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])})"
        )


def _certify(options: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    name = options.chat_template or ("file" if options.path else "auto")
    tools = EXAMPLE_TOOLS * (not options.no_tools)
    chat = load_chat(
        AutoTokenizer.from_pretrained(options.folder),
        ChatTemplateConfig(name=name, path=options.path),
        ResponseSchemaConfig(
            name=options.response_schema or ("file" if options.schema_path else "auto"),
            path=options.schema_path,
        ),
        tools=bool(tools),
    )
    certificate = certify(chat, tools)
    print(certificate.markdown() if options.markdown else "\n".join(certificate.lines()))
    if (changes := chat.fix.text()) and not options.markdown:
        print(f"\n{changes}", end="")
    if options.json:
        record = {"folder": str(options.folder), **certificate.as_json()}
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return 0 if certificate.passed else 1
