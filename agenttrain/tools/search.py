"""`search`: BM25 over local texts."""

from __future__ import annotations

import re
import unicodedata

from agenttrain.config.corpus import check_corpus
from agenttrain.tools.corpus import Document, documents, passages
from agenttrain.types import ToolFailure

# Scripts that are written without blanks: each of their characters is a word.
UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
NOTHING = "no passage matches"


class Search:
    """A tool that finds the passages of a corpus that match a query best.

    The corpus is a folder of .md and .txt files, or a JSONL, CSV or parquet file with a text in
    each row. The model reads each passage under its id and title. Example::

        Search(path="docs/")(query="height of the tower")
        # [towers/north.md] North Tower
        # The tower is 41 m high.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        k: int = 3,
        max_chars: int = 500,
        text_column: str = "text",
        title_column: str = "title",
    ) -> None:
        """Read and index the corpus at `path`, with the columns of a file of rows.

        A query finds at most `k` passages; a document of more than `max_chars` characters is
        several passages. Raises ValueError for settings and files that cannot be read.
        """
        import bm25s

        folder = check_corpus(path, k, max_chars, text_column, title_column)
        self._k = k
        self._passages = list(passages(documents(folder, text_column, title_column), max_chars))
        vocabulary: dict[str, int] = {}
        ids = [
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in words(f"{passage.title}\n{passage.text}")
            ]
            for passage in self._passages
        ]
        if not vocabulary:
            raise ValueError(f"path={path}: there are no words in it")
        self._index = bm25s.BM25(method="lucene")
        self._index.index((ids, vocabulary), show_progress=False)

    def __call__(self, query: str) -> str:
        """Search the documents. Returns the best passages, each under [id] and title.

        Args:
            query: Words to look for.
        """
        asked = words(query)
        if not asked:
            raise ToolFailure("the query has no words")
        blocks = [
            f"[{passage.id}] {passage.title}".rstrip() + f"\n{passage.text}"
            for passage in self.find(asked)
        ]
        return "\n\n".join(blocks) or f"{NOTHING} {query!r}"

    def find(self, asked: list[str]) -> list[Document]:
        """Return at most k passages with one of the words, best first, equals in corpus order."""
        import numpy as np

        if not self._index.get_tokens_ids(asked):
            return []
        scores_P = self._index.get_scores(asked)
        k = min(self._k, len(scores_P))
        # All that tie with the k-th: which of them a partition puts first is not defined.
        threshold = max(np.partition(scores_P, -k)[-k], np.finfo(scores_P.dtype).tiny)
        candidates = np.flatnonzero(scores_P >= threshold)
        order = np.argsort(-scores_P[candidates], kind="stable")[:k]
        return [self._passages[position] for position in candidates[order]]


def words(text: str) -> list[str]:
    """Split a text into the words that count, without case and accents.

    Example: ``words("Óbidos, 北京!") == ["obidos", "北", "京"]``
    """
    plain = unicodedata.normalize("NFKD", text.casefold())
    folded = "".join(c for c in plain if not unicodedata.combining(c))
    return WORD.findall(unicodedata.normalize("NFKC", folded))
