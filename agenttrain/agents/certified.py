"""Results of certifying the tools of requests, kept on disk: many tools take a second or more."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import transformers

import agenttrain.chat
from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.utils.files import write_atomically

FORM = 1
"""Number of the files' form."""
KEPT = 4096
"""Results that are kept, the last used: a file takes a block of the disk."""


def cache_folder() -> Path:
    """Return the folder of the results: below XDG_CACHE_HOME, by default ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "agenttrain" / "certified_tools"


class CertifiedTools:
    """Certifies that a chat's template can show tools, and keeps the results on disk.

    `Agents` has one, and calls `problem` in a thread for each new set of tools.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._chat_digest = ""

    def problem(self, schemas: Sequence[dict[str, Any]]) -> str | None:
        """Return why the template cannot show these tools, or None if it can."""
        path = cache_folder() / f"{self._cache_key(schemas)}.json"
        # Without a file, or with a damaged one, the tools are certified below.
        with suppress(OSError, ValueError, KeyError, TypeError):
            problem: str | None = json.loads(path.read_text(encoding="utf-8"))["problem"]
            with suppress(OSError):
                os.utime(path)  # `_prune` removes the results that were used longest ago
            return problem
        certificate = certify(self.chat, schemas)
        problem = None
        if not certificate.passed:
            lines = [line.strip() for line in certificate.lines()[1:]]  # without the heading
            problem = f"the chat template cannot show them: {'; '.join(lines)}"
        with suppress(OSError):  # a home that cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"problem": problem}))
            _prune(path.parent)
        return problem

    def _cache_key(self, schemas: Sequence[dict[str, Any]]) -> str:
        """Return a digest of everything that the result depends on."""
        if not self._chat_digest:
            self._chat_digest = _digest_of(self.chat)
        text = json.dumps([FORM, _code_digest(), self._chat_digest, schemas])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _prune(folder: Path) -> None:
    """Remove the results that were used longest ago, down to `KEPT`. Raises OSError."""
    paths = list(folder.iterdir())
    if len(paths) > KEPT:
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            path.unlink(missing_ok=True)


def _digest_of(chat: Chat) -> str:
    """Return a digest of a chat's tokenizer, templates and response schema."""
    backend = getattr(chat.tokenizer, "backend_tokenizer", None)
    # A tokenizer written in Python has no backend, and is known by its vocabulary.
    if backend is None:
        tokenizer = repr(sorted(chat.tokenizer.get_vocab().items()))
    else:
        tokenizer = backend.to_str()
    parts = [
        tokenizer,
        chat.template,
        chat.fix.stock,  # the model's own template, which is probed too
        repr(chat.response),
        repr(sorted(chat.kwargs.items())),
        repr(chat.roles),
        repr(chat.plain),  # added tokens that are ordinary text
        repr(chat.stop_token_ids),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


@cache
def _code_digest() -> str:
    """Return a digest of the code that renders and parses, and of the library behind it."""
    digest = hashlib.sha256(transformers.__version__.encode())
    for folder in agenttrain.chat.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
