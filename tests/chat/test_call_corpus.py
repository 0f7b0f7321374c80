"""Our parsers on the corpus of calls that models write, and the docs' table of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from call_corpus import CORPUS, MALFORMED, TOOLS, Row, differences

from agenttrain.chat.loading import load_spec, spec_names
from agenttrain.chat.parsers.base import parse_response

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "response-schemas.md"


@pytest.mark.parametrize("row", CORPUS, ids=lambda row: f"{row.format}/{row.what}")
def test_a_completion_is_read_as_the_corpus_says(row: Row) -> None:
    calls = parse_response(row.text, load_spec(row.format), turn=0, schemas=TOOLS).calls
    read = [(c.name, c.arguments) if c.malformed is None else MALFORMED for c in calls]
    assert read == ([MALFORMED] if row.ours == MALFORMED else row.ours)


def test_the_corpus_has_every_format_but_one() -> None:
    # vLLM's reader of harmony needs a vocabulary that it downloads.
    assert {row.format for row in CORPUS} == {*spec_names()} - {"gpt_oss"}


def test_the_docs_show_where_vllm_reads_otherwise() -> None:
    """If the corpus changes: `PYTHONPATH=tests/kit python -m call_corpus` prints the table."""
    assert differences() in PAGE.read_text(encoding="utf-8")
