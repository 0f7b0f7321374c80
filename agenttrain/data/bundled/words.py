"""2,048 common English words of three to eight letters, of which 555 have five.

They are the English list of BIP-39, under the MIT licence: `agenttrain/data/words/LICENSE`.
"""

from __future__ import annotations

from agenttrain.utils.files import PACKAGE

FILE = PACKAGE / "data" / "words" / "english.txt"
WORDS = tuple(FILE.read_text(encoding="utf-8").split())
"""All words, in alphabetical order."""
