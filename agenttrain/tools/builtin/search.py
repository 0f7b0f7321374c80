"""`search`: BM25 over the passages of a folder of text files, or of a file of rows."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agenttrain.tools.config import check_corpus, text_files
from agenttrain.types import ToolFailure
from agenttrain.utils.data_fields import Data
from agenttrain.utils.names import did_you_mean

# Scripts without blanks between words: each character counts as a word.
UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
NOTHING = "no passage matches"


class Search:
    """A tool that returns the passages of a corpus that match a query best.

    The corpus is a folder of .md and .txt files, or a JSONL, CSV or parquet file with a text in
    each row. A reply shows each passage below its id and title. Example::

        Search(path="docs/")(query="height of the tower")
        # [towers/north.md] North Tower
        # The tower is 41 m high.
    """

    def __init__(
        self,
        *,
        path: Data[str | None] = None,
        k: Data[int] = 3,
        max_chars: Data[int] = 500,
        text_column: Data[str] = "text",
        title_column: Data[str] = "title",
    ) -> None:
        """Read and index the corpus at `path`; the columns are those of a file of rows.

        A query returns at most `k` passages. A document of more than `max_chars` characters is
        split into passages. Raises ValueError for wrong settings and unreadable files.
        """
        import bm25s

        corpus = check_corpus(path, k, max_chars, text_column, title_column)
        self._k = k
        self._passages: list[Document] = []
        """Documents, long ones split into passages ``oss.md#1``, ``oss.md#2``, …"""
        for document in documents(corpus, text_column, title_column):
            texts = list(split(document.text, max_chars))
            for number, text in enumerate(texts, start=1):
                name = document.id if len(texts) == 1 else f"{document.id}#{number}"
                self._passages.append(replace(document, id=name, text=text))
        vocabulary: dict[str, int] = {}
        word_ids = [  # of each passage, its words
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in words(f"{passage.title}\n{passage.text}")
            ]
            for passage in self._passages
        ]
        if not vocabulary:
            raise ValueError(f"path={path}: there are no words in it")
        self._index = bm25s.BM25(method="lucene")
        self._index.index((word_ids, vocabulary), show_progress=False)

    def __call__(self, query: str) -> str:
        """Search the documents. Returns the best passages, each under [id] and title.

        Args:
            query: Words to look for.
        """
        terms = words(query)
        if not terms:
            raise ToolFailure("the query has no words")
        blocks = [
            f"[{passage.id}] {passage.title}".rstrip() + f"\n{passage.text}"
            for passage in self.find(terms)
        ]
        return "\n\n".join(blocks) or f"{NOTHING} {query!r}"

    def find(self, terms: list[str]) -> list[Document]:
        """Return at most k passages with any of the words, best first, ties in corpus order."""
        import numpy as np

        if not self._index.get_tokens_ids(terms):
            return []
        scores_P = self._index.get_scores(terms)  # P passages
        k = min(self._k, len(scores_P))
        # A partition leaves the order of ties undefined: sort all that tie with the k-th best. A
        # passage without any of the words has a score of 0, and is never one of them.
        threshold = max(np.partition(scores_P, -k)[-k], np.finfo(scores_P.dtype).tiny)
        candidates = np.flatnonzero(scores_P >= threshold)
        order = np.argsort(-scores_P[candidates], kind="stable")[:k]
        return [self._passages[position] for position in candidates[order]]


def words(text: str) -> list[str]:
    """Split a text into its words, without case and accents.

    Example: ``words("Óbidos, 北京!") == ["obidos", "北", "京"]``
    """
    plain = unicodedata.normalize("NFKD", text.casefold())
    folded = "".join(c for c in plain if not unicodedata.combining(c))
    return WORD.findall(unicodedata.normalize("NFKC", folded))


BREAKS = ("\n\n", "\n", ". ", " ")
"""Places to split a long text, best first."""
ID_COLUMN = "id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Text with a title: ``Document(id="rivers/oss.md", title="The Oss", text="A river in …")``."""

    id: str
    """Path within the folder; for a row its column `id`, or its number from 0."""
    title: str
    text: str


def documents(path: Path, text_column: str, title_column: str) -> list[Document]:
    """Read the documents at `path`, in order. Raises ValueError that names file and row."""
    if path.is_dir():
        files = sorted(text_files(path), key=lambda file: file.relative_to(path).as_posix())
        return [_text_file(file, file.relative_to(path).as_posix()) for file in files]
    if path.suffix not in (".jsonl", ".csv", ".parquet"):
        return [_text_file(path, path.name)]
    result = []
    for number, row in enumerate(_read_rows(path)):
        text, title = row.get(text_column), row.get(title_column)
        if not isinstance(text, str):
            columns = ", ".join(map(str, row))
            problem = "is no text" if text_column in row else "is no column"
            raise ValueError(
                f"text_column={text_column}: {problem} of row {number} of {path}"
                f"{did_you_mean(text_column, map(str, row))}; the row has: {columns}"
            )
        document_id = str(row.get(ID_COLUMN, number))
        title = "" if title is None else str(title)
        result.append(Document(id=document_id, title=title, text=text))
    return result


def split(text: str, max_chars: int) -> Iterator[str]:
    """Yield pieces of at most `max_chars`, cut at the end of a paragraph, line, sentence or word.

    Example: ``split("One two. Three four.", 12)`` gives ``One two.`` and ``Three four.``
    """
    text = text.strip()
    while len(text) > max_chars:
        cut = max_chars
        for mark in BREAKS:
            # From the middle on only, so that pieces are not tiny. The mark may end one character
            # beyond the limit: its last character, a blank or line break, is no part of the piece.
            position = text.rfind(mark, max_chars // 2, max_chars + 1)
            if position > 0:
                cut = position + 1 if mark == ". " else position  # the full stop stays
                break
        yield text[:cut].strip()
        text = text[cut:].strip()
    yield text


def _text_file(file: Path, name: str) -> Document:
    """Read a file; its title is a first line ``# Title``, else the file's name."""
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text: {error}") from error
    first, _, body = text.partition("\n")
    if first.startswith("# "):
        return Document(id=name, title=first.removeprefix("# ").strip(), text=body)
    return Document(id=name, title=file.stem, text=text)


def _read_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a .parquet, .csv or .jsonl file."""
    if file.suffix == ".parquet":
        import pyarrow.parquet  # comes with datasets

        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
        return
    if file.suffix == ".csv":
        with file.open(encoding="utf-8-sig", newline="") as lines:
            yield from csv.DictReader(lines)
        return
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f'{file}, line {number}: is no row such as {{"text": "…"}}')
            yield row
