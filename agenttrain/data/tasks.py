"""Make Tasks of dataset rows, in an order that depends on the seed only.

The n-th task of a run is a function of (seed, n), so a data cursor is one number: the tasks that
the finished steps have used.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agenttrain.data.config import at_source
from agenttrain.data.images import COLUMN, ImageLimits, with_images
from agenttrain.types import AgenttrainError, Message, RowTool, Task
from agenttrain.utils.locate import error_with_line
from agenttrain.utils.messages import REASONING_KEYS, normal_message
from agenttrain.utils.names import did_you_mean

RESERVED = ("task_id", "messages", "tools", "user_turns", COLUMN)
COLUMN_SAMPLE = 20
"""First rows from which the columns of a dataset are collected. Single rows may lack some."""


class RowError(AgenttrainError, ValueError):
    """A row that cannot be a task of this run. The message names its key and its place."""


class Rows(Protocol):
    """A dataset of rows by number. A row holds `messages`, and other columns for rewards."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class GeneratedRows:
    """Rows without end, each computed on access by a function of its `index`.

    Example: ``GeneratedRows(shop.row, split="test", seed=0)[17]`` is row 17 of the shop.
    """

    def __init__(self, function: Callable[..., Mapping[str, Any]], **arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._function(index=index, **self._arguments)


class TaskSource:
    """Tasks by occurrence: the n-th of a run is row n, or the n-th row of a seeded shuffle.

    Three counts of rows:

    - occurrence: the n-th task of the run; it goes on over the epochs (`tasks`, `index`);
    - index: the n-th row in the dataset's order, without those that `leave_out` removed (`row`,
      `where`);
    - number: the n-th row of the whole dataset. It is a task's default id, and private here.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        shuffle: bool = False,
        seed: int = 0,
        needs_prompt: bool = True,
        may_be_empty: bool = False,
        images: ImageLimits | None = None,
        source: str = "",
        key: str = "",
    ) -> None:
        """Without `needs_prompt`, rows may lack a prompt, because an environment makes one.

        `source` is the name of a mixture's source, which its tasks get. `key` (data.train) begins
        messages about rows. Raises ValueError for an empty dataset unless it `may_be_empty`, and
        for shuffling one without end.
        """
        if len(rows) == 0 and not may_be_empty:
            raise ValueError("data: the dataset has no rows: check data.train and data.test")
        if shuffle and len(rows) == sys.maxsize:
            raise ValueError(
                "data.shuffle=true: rows without end have no shuffled order; leave it out"
            )
        self._rows, self._shuffle, self._seed = rows, shuffle, seed
        self._needs_prompt, self._images = needs_prompt, images
        self.source, self._key = source, key
        self._epoch: tuple[int, Sequence[int]] = (-1, ())
        """(number of an epoch, its row indices in shuffled order); -1: none yet."""
        self._kept: Sequence[int] | None = None
        """Numbers of the rows that `leave_out` has kept; None: all."""
        self.note: str | None = None
        """Rows that were left out, and why, for the user."""

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else len(self._kept)

    @property
    def endless(self) -> bool:
        """True if the rows have no end: `GeneratedRows` give this as their number."""
        return len(self._rows) == sys.maxsize

    def tasks(self, start: int, count: int) -> list[Task]:
        """Return `count` tasks from occurrence `start` on. After the last row comes a new epoch."""
        return [self.row(self.index(n)) for n in range(start, start + count)]

    def index(self, occurrence: int) -> int:
        """Return the index of the row that the `occurrence`-th task of a run uses."""
        epoch, position = divmod(occurrence, len(self))
        if not self._shuffle:
            return position
        if self._epoch[0] != epoch:  # the order of one epoch is kept
            order = list(range(len(self)))
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1][position]

    def row(self, index: int) -> Task:
        """Return the task of the row at an index. Raises RowError if it cannot become one.

        Rows without end are made here for the first time, by a function that may raise anything.
        """
        number = self._number(index)
        try:
            row, needs_prompt = self._rows[number], self._needs_prompt
            task = to_task(row, number, needs_prompt=needs_prompt, images=self._images)
        except ValueError as error:
            reason = str(error).removeprefix(f"data row {number}: ")
            raise self._row_error(index, reason) from error
        except Exception as error:
            raise self._row_error(index, error_with_line(error)) from error
        return replace(task, source=self.source) if self.source else task

    def _row_error(self, index: int, reason: str) -> RowError:
        """Return the error of a row: ``data.train: rows.jsonl, line 3: …``.

        For a mixture's source shop it begins with ``data.sources.shop.train``.
        """
        place = self.where(index)
        message = f"{self._key}: {place}: {reason}" if self._key else f"{place}: {reason}"
        return RowError(at_source(self.source, own_keys=(), text=message))

    def where(self, index: int) -> str:
        """Return the place of the row at an index, for error messages.

        Rows that know their place, such as a file and a line, have a method `where`.
        """
        where, number = getattr(self._rows, "where", None), self._number(index)
        return f"data row {number}" if where is None else where(number)

    def place_of(self, task: Task) -> str | None:
        """Return the place of a task's row; None if the task is not of this source.

        Rows without end cannot be searched: only the one whose number is the task's id is compared.
        """
        indices: Iterable[int] = range(len(self))
        if self.endless:
            # No row of these was ever left out, so that the index is the number.
            indices = (int(task.task_id),) if task.task_id.isdecimal() else ()
        return next((self.where(index) for index in indices if self.row(index) == task), None)

    def leave_out(self, indices: Collection[int], note: str) -> None:
        """Remove rows; the others keep their ids. The source must have an end.

        `note` says which rows, and why.
        """
        self.note = note
        self._kept = [self._number(i) for i in range(len(self)) if i not in indices]
        self._epoch = (-1, ())

    def _number(self, index: int) -> int:
        """Return the number in the dataset of the `index`-th row that was not left out."""
        return index if self._kept is None else self._kept[index]


def column_names(source: TaskSource) -> list[str]:
    """Return the columns of the first rows together, because single rows may lack some."""
    names: dict[str, None] = {}  # an ordered set
    for task in source.tasks(0, min(len(source), COLUMN_SAMPLE)):
        names.update(dict.fromkeys(task.columns))
    return list(names)


def check_columns(source: TaskSource, names: Mapping[str, str | None]) -> None:
    """Raise ValueError if a setting names a column that the first held-out rows lack.

    `source` has the rows of data.test. None names no column. Example:
    ``check_columns(tasks, {"eval.group_by": "hops"})``.
    """
    for key, name in names.items():
        if name is not None and name not in (columns := column_names(source)):
            raise ValueError(
                f"{key}={name}: the rows of data.test have no such column"
                f"{did_you_mean(name, columns)}; they have: {', '.join(columns)} ({key}=null: none)"
            )


def to_task(
    row: Mapping[str, Any],
    index: int,
    *,
    needs_prompt: bool = True,
    images: ImageLimits | None = None,
) -> Task:
    """Make a Task from a row.

    The row holds `messages` or `prompt`, perhaps `task_id`, `tools` (see `read_tools`), `images`
    (see `with_images`) and `user_turns`. Its other columns are the task's. A column whose value is
    None counts as missing. Rows may share a `task_id`: it is a name, and each occurrence is a
    separate group.

    Example: ``to_task({"prompt": "2+2?", "answer": "4"}, 0)`` has one user message and the column
    `answer`. Raises ValueError that names the row and what it lacks.
    """
    row = {key: value for key, value in row.items() if value is not None}
    default = None if needs_prompt else ()  # an environment makes the prompt
    messages = row.get("messages", row.get("prompt", default))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple) or (needs_prompt and not messages):
        raise ValueError(
            f"data row {index}: needs `messages` (a list of chat messages) or `prompt` (a text or "
            f"such a list), found columns {sorted(row)}"
        )
    messages = _normal_messages(messages, index)
    if COLUMN in row or any(isinstance(m.get("content"), list | tuple) for m in messages):
        try:
            messages = with_images(messages, row.get(COLUMN), images or ImageLimits())
        except ValueError as error:
            raise ValueError(f"data row {index}: {error}") from error
    tools = read_tools(row.get("tools"), index)
    turns = row.get("user_turns", ())
    if not isinstance(turns, list | tuple) or not all(isinstance(text, str) for text in turns):
        raise ValueError(
            f"data row {index}: user_turns={turns!r}: give a list of texts, one for each later turn"
        )
    return Task(
        task_id=str(row.get("task_id", index)),
        messages=tuple(messages),
        columns={key: value for key, value in row.items() if key not in RESERVED},
        tools=tools,
        user_turns=tuple(turns),
    )


def _normal_messages(messages: Sequence[Any], index: int) -> list[Message]:
    """Return a row's messages in `normal_message`'s form.

    Raises ValueError for a value that is no chat message.
    """
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"data row {index}: {message!r} is no chat message with a `role`")
        if not isinstance(message.get("content"), str | list | tuple | None):
            raise ValueError(
                f"data row {index}: the content of the {message['role']} message is a "
                f"{type(message['content']).__name__}, neither a text nor a list of parts"
            )
    try:
        normal = [normal_message(message) for message in messages]
    except ValueError as error:
        raise ValueError(f"data row {index}: {error}") from error
    for message in normal:
        if message["role"] != "tool" and all(message.get(key) is None for key in CONTENT_KEYS):
            present_keys = sorted(key for key, value in message.items() if value is not None)
            raise ValueError(
                f"data row {index}: the {message['role']} message has no `content`, only "
                f"{', '.join(present_keys)}; write its text as `content`, calls as `tool_calls`"
            )
    return normal


CONTENT_KEYS = ("content", "tool_calls", REASONING_KEYS[0])
"""Keys of a message, of which at least one has a value. Only a tool may reply with nothing."""
KEYS = ("name", "description", "parameters", "executor")
IGNORED_KEYS = ("type", "function", "strict", "return")
"""Further keys of a tool in OpenAI's form and of transformers' `get_json_schema`, which the model
does not see."""
NO_PARAMETERS = {"type": "object", "properties": {}}


def read_tools(value: Any, index: int) -> tuple[str | RowTool, ...] | None:
    """Return the tools that a row's column `tools` lists. None: the row has no such column.

    It lists names of tools of the run and the environment, and tools that only this row has::

        ["sql", {"name": "lookup_city", "description": "Find a city.", "executor": "lookup",
                 "parameters": {"type": "object", "properties": {"name": {"type": "string"}},
                                "required": ["name"]}}]

    The model sees ``lookup_city(name)``, and its calls go to the run's tool `lookup`. Without an
    executor they go to the run's tool of the same name. OpenAI's form, ``{"type": "function",
    "function": {…}}``, is read too. CSV and parquet have one type per column, so the list, one of
    the tools, or a tool's parameters may be JSON text.

    Raises ValueError that names the row and the mistake.
    """
    if value is None:
        return None
    where = f"data row {index}: tools"
    items = _parse_json_text(value, where)
    if not isinstance(items, list | tuple):
        raise ValueError(f"{where}={value!r:.200}: give a list of names, or of tools of its own")
    tools: list[str | RowTool] = []
    for item in items:
        is_name = isinstance(item, str) and not item.lstrip().startswith("{")
        tools.append(item if is_name else _row_tool(_parse_json_text(item, where), where))
    return tuple(tools)


def _row_tool(item: Any, where: str) -> RowTool:
    """Make a tool of an entry that describes one. Raises ValueError."""
    keys = f"{', '.join(KEYS[:-1])} and {KEYS[-1]}"
    if not isinstance(item, Mapping):
        raise ValueError(f"{where}: {item!r:.200} is neither a name nor a tool with {keys}")
    function = _parse_json_text(item.get("function"), where)
    fields = {**item, **function} if isinstance(function, Mapping) else item
    for key in fields:
        if key not in (*KEYS, *IGNORED_KEYS):
            raise ValueError(f"{where}: {key!r} is no key of a tool{did_you_mean(key, KEYS)}")
    name, description = fields.get("name"), fields.get("description") or fields.get("name")
    executor = fields.get("executor") or name
    parameters = _parse_json_text(fields.get("parameters") or NO_PARAMETERS, where)
    are_texts = all(isinstance(text, str) and text for text in (name, description, executor))
    if not are_texts or not isinstance(parameters, Mapping):
        raise ValueError(
            f"{where}: {item!r:.200} needs a name, and may have description, parameters (a JSON "
            "schema) and executor; they are texts but for the parameters"
        )
    return RowTool(
        name=str(name),
        description=str(description),
        executor=str(executor),
        parameters=dict(parameters),
    )


def with_executor(tools: Any, executor: str) -> Any:
    """Return a row's column `tools`, with this executor for each tool of the row that names none.

    `executor` is the tool of the run that does the work of the row's tools. A column that cannot be
    read is returned as it is: `read_tools` refuses it and names the row.
    """
    try:
        # A text among the tools is the name of one, or the JSON of one.
        items = [
            _parse_json_text(item, "tools")
            if isinstance(item, str) and item.lstrip().startswith("{")
            else item
            for item in _parse_json_text(tools, "tools")
        ]
    except (ValueError, TypeError):
        return tools
    return [
        {**item, "executor": item.get("executor") or executor}
        if isinstance(item, Mapping)
        else item
        for item in items
    ]


def _parse_json_text(value: Any, where: str) -> Any:
    """Return the value of JSON text; a value that is no text is returned as it is.

    `where` begins the message of the ValueError.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{where}: {value!r:.200} is not JSON: {error}") from error
