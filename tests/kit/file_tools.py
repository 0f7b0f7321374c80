"""A class whose methods are tools, for the tests of tools and of settings."""

from __future__ import annotations

from agenttrain.types import ToolContext


class Files:
    """A store of texts."""

    closed = 0
    released: list[str] = []  # noqa: RUF012

    def __init__(self, readonly: bool = False) -> None:
        self._readonly = readonly
        self._texts: dict[str, str] = {}

    def write(self, name: str, text: str) -> str:
        """Write a file.

        Args:
            name: Of the file.
            text: What to write.
        """
        if self._readonly:
            raise PermissionError("read only")
        self._texts[name] = text
        return "ok"

    async def read(self, name: str, context: ToolContext) -> str:
        """Read a file.

        Args:
            name: Of the file.
        """
        return f"{self._texts[name]} for {context.rollout_id}"

    @staticmethod
    def suffix(name: str) -> str:
        """The ending of a name.

        Args:
            name: Of a file.
        """
        return name.rpartition(".")[2]

    @classmethod
    def of(cls, folder: str) -> Files:
        return cls()

    @property
    def size(self) -> int:
        return len(self._texts)

    def release(self, rollout_id: str) -> None:
        Files.released.append(rollout_id)

    def close(self) -> None:
        Files.closed += 1
