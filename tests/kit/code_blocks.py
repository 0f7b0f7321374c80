"""The code blocks of README, the skill and the pages under docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = (ROOT / "README.md", ROOT / "skills/agenttrain/SKILL.md", *DOCS)
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run): (?P<why>[^>]+) -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str | None
    mark: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The block's commands, with continued lines joined; of a transcript those after `$`."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if self.language == "console":
                if line.startswith("$ "):
                    yield line[2:]
            elif line.strip() and not line.startswith("#"):
                yield line


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("language")) + 1,
            language=match["language"],
            title=match["title"],
            mark=match["mark"],
            text=match["text"],
        )
        for match in BLOCK.finditer(text)
    ]


def file_on(page: str, title: str) -> str:
    """The file that a page of docs/ shows: ``file_on("contribute/add-an-engine.md", "x.py")``."""
    (text,) = (block.text for block in blocks(ROOT / "docs" / page) if block.title == title)
    return text
