"""`crop`: a closer look at a quarter of the picture that belongs to the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from agenttrain.types import ToolContext
from agenttrain.utils.locate import locate

Part = Literal["top left", "top right", "bottom left", "bottom right"]
Look = Callable[[Mapping[str, Any], str], Any]
"""(columns of the row, part) -> image of that part."""


class Crop:
    """A tool that returns a part of a picture as an image.

    Example: ``Crop(look="agenttrain.data.bundled.sight.look")``.
    """

    def __init__(self, *, look: str | Look) -> None:
        """Takes a function (row's columns, part) -> image, or its dotted path."""
        self._look: Look = look if callable(look) else locate(look, key="look")

    def __call__(self, part: Part, context: ToolContext) -> Any:
        """Look closer at a part of the picture.

        Args:
            part: A quarter of it.
        """
        return self._look(context.task.columns, part)
