"""`agenttrain templates`: the table of known families, or the certificate of a tokenizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agenttrain.chat.certificate import certify
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.load import load_chat
from agenttrain.chat.originals import originals_folder
from agenttrain.chat.table import EXAMPLE_TOOLS, markdown, plain, rows, to_json
from agenttrain.config.schema import ChatTemplateConfig, ResponseSchemaConfig

NOT_INSTALLED = (
    "The stock templates come with the test extra (pip install 'agenttrain[test]'): without them "
    "this table says what is known and certifies nothing."
)


def main(arguments: Sequence[str]) -> int:
    """Run the verb. Exit code: 0, 1 for a template that is refused, 2 for one that cannot be read.

    Example: ``agenttrain templates my_model --chat-template hermes``
    """
    parser = argparse.ArgumentParser(prog="agenttrain templates", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of a tokenizer, to certify it")
    parser.add_argument("--chat-template", default="auto", help="as in chat_template=…")
    parser.add_argument("--no-tools", action="store_true", help="certify training without tools")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--markdown", action="store_true", help="print the README's table")
    parsed = parser.parse_args(list(arguments))
    if parsed.folder is not None:
        return _certify(parsed.folder, parsed.chat_template, tools=not parsed.no_tools)
    table = rows()
    print(markdown(table) if parsed.markdown else plain(table), end="\n")
    if originals_folder() is None:
        print(f"\n{NOT_INSTALLED}")
    if parsed.json:
        parsed.json.write_text(to_json(table), encoding="utf-8")
    return 0


def _certify(folder: Path, name: str, *, tools: bool) -> int:
    from transformers import AutoTokenizer

    try:
        if not folder.is_dir():
            raise ChatError(f"{folder}: there is no such folder")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chat = load_chat(tokenizer, ChatTemplateConfig(name=name), ResponseSchemaConfig())
    except (ChatError, OSError, ValueError) as error:
        print(f"agenttrain: {error}", file=sys.stderr)
        return 2
    certificate = certify(chat, EXAMPLE_TOOLS if tools else ())
    print("\n".join(certificate.lines()))
    if changes := chat.fix.text():
        print(f"\n{changes}", end="")
    return 0 if certificate.passed else 1
