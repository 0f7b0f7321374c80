"""Prepare the rows of a dataset: transform them by the settings, check them, hold some out.

`RowTransform` applies `data.where`, `data.map`, `data.prompt` and `data.system` to a row.
`check_rows` separates the rows that can become tasks from the others, with reasons.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.data.config import DataConfig, OnBadRow
from agenttrain.data.files import BadRow
from agenttrain.data.images import ImageLimits
from agenttrain.data.tasks import Rows, to_task, with_executor
from agenttrain.types import Message, Task
from agenttrain.utils.content import images_in
from agenttrain.utils.expressions import compiled
from agenttrain.utils.text_templates import TextTemplate


class RowTransform:
    """Maps the columns of a row, fills in the prompt and puts the system message before it.

    Example: with ``map: {answer: "split(solution, '#### ')[-1]"}``, ``prompt: "{{ question }}
    Think."`` and ``system: Be brief.`` the row ``{"question": "2+2?", "solution": "#### 4"}``
    becomes ``{"question": …, "solution": …, "answer": "4", "messages": [{"role": "system",
    "content": "Be brief."}, {"role": "user", "content": "2+2? Think."}]}``.
    """

    def __init__(self, config: DataConfig) -> None:
        """Raises ValueError for an expression or a text that cannot be read."""
        self._map = {k: compiled(text, f"data.map.{k}") for k, text in config.map.items()}
        self._prompt = None
        if config.prompt is not None:
            self._prompt = TextTemplate(config.prompt, "data.prompt")
        self._system = config.system
        self.where = None if config.where is None else compiled(config.where, "data.where")
        self.mapped = dict(config.map)
        """Column -> text of its expression, for messages."""
        self._executor = config.executor

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the transformed row. Raises BadRow that names the setting that does not fit it."""
        check_mapping(row)
        columns = dict(row)
        for name, expression in self._map.items():
            try:
                # Of the row as it was read: no expression sees another one's result.
                columns[name] = expression.search(row)
            except ValueError as error:
                raise BadRow(f"data.map.{name}={error}") from error
        # None counts as missing, as in `to_task`: an expression gives it for what it does not find.
        columns = {name: value for name, value in columns.items() if value is not None}
        messages = self._messages(columns)
        # Anything else stays in its own column, where `to_task` refuses it.
        if isinstance(messages, list | tuple):
            columns["messages"] = [_join_texts(message) for message in messages]
        if self._executor is not None and "tools" in columns:
            columns["tools"] = with_executor(columns["tools"], self._executor)
        return columns

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Return True if `data.where` is true of a row as it was read, or is not set.

        Raises BadRow if it cannot be computed, or is neither true nor false nor null.
        """
        if self.where is None:
            return True
        try:
            value = self.where.search(row)
        except ValueError as error:
            raise BadRow(f"data.where={error}") from error
        if not isinstance(value, bool | None):
            raise BadRow(
                f"data.where={self.where.text!r}: gives {value!r:.100}, neither true nor false; "
                "compare it: hops > `2`"
            )
        return bool(value)

    def _messages(self, row: Mapping[str, Any]) -> Any:
        """Return a row's messages, made by `data.prompt` or its own, after the system message.

        A value that is no list of messages is returned as it is: `to_task` refuses it.
        """
        messages = row.get("messages", row.get("prompt"))
        if self._prompt is not None:
            try:
                messages = self._prompt.fill(row)
            except ValueError as error:
                raise BadRow(str(error)) from error
        elif isinstance(messages, str) and _is_json_list(messages):
            name = "messages" if "messages" in row else "prompt"
            raise BadRow(
                f"{name} is a text that holds a list; read it with "
                f"data.map.messages='from_json({name})'"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self._system is None or not isinstance(messages, list | tuple) or not messages:
            return messages
        start = messages[0]
        if isinstance(start, Mapping) and start.get("role") == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]


def check_mapping(row: object) -> None:
    """Raise BadRow for a row of a user's function that has no columns."""
    if not isinstance(row, Mapping):
        raise BadRow(f"is a {type(row).__name__}, not a mapping of columns to values: {row!r:.100}")


def _is_json_list(text: str) -> bool:
    """Return True if a text is JSON of a list of objects, not a text that only begins like it."""
    if not text.lstrip().startswith("[{"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _join_texts(message: Any) -> Any:
    """Join a message's content if it is a list of texts, and drop keys without a value."""
    if not isinstance(message, Mapping):
        return message
    result = {k: value for k, value in message.items() if value is not None or k == "content"}
    parts = result.get("content")
    if not isinstance(parts, list) or not parts:
        return result
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            return result
        if not isinstance(part.get("text"), str):
            return result
    result["content"] = "".join(part["text"] for part in parts)
    return result


MAX_LISTED = 10
"""Bad rows that a message lists."""


@dataclass(frozen=True, slots=True)
class TransformedRows:
    """The rows of a dataset after `data.map`, `data.prompt` and `data.system`."""

    rows: Rows
    transform: RowTransform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.transform(self.rows[index])

    def where(self, index: int) -> str:
        """Return the row's place for error messages."""
        where = getattr(self.rows, "where", None)
        return f"row {index + 1}" if where is None else where(index)

    def question(self, index: int) -> Sequence[Message] | None:
        """Return the messages before a recorded answer. None: the rows were not recorded."""
        question = getattr(self.rows, "question", None)
        return None if question is None else question(index)


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Some rows of a dataset. A row without a `task_id` gets its number in the whole dataset."""

    rows: TransformedRows
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = self.indices[index]
        return {"task_id": number, **self.rows[number]}

    def where(self, index: int) -> str:
        """Return the row's place for error messages."""
        return self.rows.where(self.indices[index])


@dataclass(slots=True)
class RowCheck:
    """Result of `check_rows`: the rows that can become tasks, and what is wrong with others."""

    good: list[int] = field(default_factory=list)
    """Number of each row that can become a task."""
    bad: list[str] = field(default_factory=list)
    """Place and reason of each bad row."""
    kept: int = 0
    """Rows of which `data.where` is true, or all without it."""
    left_out: int = 0
    """Rows of which `data.where` is not true."""
    keys: list[str] = field(default_factory=list)
    """A key of each good row's question. Rows with equal keys ask the same."""


def check_rows(
    rows: TransformedRows,
    key: str,
    *,
    needs_prompt: bool,
    images: ImageLimits | None = None,
) -> RowCheck:
    """Make a task of every row of the dataset at `key`; return which rows could become one.

    Without `needs_prompt`, a row may lack messages. Raises ValueError for a `data.where` that is
    true of no row, for a `data.map.…` that finds nothing in any row, because it is probably
    misspelt, and for more images than `images.total`.
    """
    usable, transform = RowCheck(), rows.transform
    # The columns that any row has, as it was read and after the transform.
    source_columns, columns = set[str](), set[str]()
    limits, image_count = images or ImageLimits(), 0
    for index in range(len(rows)):
        try:
            source_row = rows.rows[index]
            check_mapping(source_row)
            source_columns.update(source_row)
            if not transform.keeps(source_row):
                usable.left_out += 1
                continue
            usable.kept += 1
            row = transform(source_row)
            columns.update(row)
            task = to_task(row, index, needs_prompt=needs_prompt, images=limits)
        except ValueError as error:
            reason = str(error).removeprefix(f"data row {index}: ")
            usable.bad.append(f"{rows.where(index)}: {reason}")
            continue
        usable.good.append(index)
        image_count += sum(1 for _ in images_in(task.messages))
        if image_count > limits.total:
            raise ValueError(
                f"data.max_total_images={limits.total}: the first {index + 1} rows of {key} have "
                f"{image_count} images, each of which is read before the run starts; raise it, or "
                f"take fewer rows: {key}.limit={index}"
            )
        usable.keys.append(_question_key(task, recorded_question=rows.question(index)))
    if transform.where is not None and usable.left_out == len(rows):
        raise ValueError(
            f"data.where={transform.where.text}: is true of none of the {len(rows)} rows of {key}; "
            f"their columns are: {', '.join(sorted(source_columns)) or 'none'}"
        )
    # Without a good row the reasons of the bad ones say more than a column that is missing.
    mapped_names = list(transform.mapped) if usable.good else []
    for name in mapped_names:
        if name not in columns:  # the expression gave null in every row: the transform drops nulls
            raise ValueError(
                f"data.map.{name}={transform.mapped[name]}: finds nothing in any row of {key}; "
                f"their columns are: {', '.join(sorted(columns)) or 'none'}"
            )
    return usable


def _question_key(task: Task, *, recorded_question: Sequence[Message] | None) -> str:
    """Return a text that is equal for tasks that ask the same: `hold_out` keeps them together.

    Without messages an environment makes the question from the columns.
    """
    question = recorded_question or _question(task.messages)
    identity = [question or dict(task.columns), task.user_turns]
    return json.dumps(identity, default=str, sort_keys=True)


def _question(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages before the first answer of a demonstration, else all messages.

    A demonstration is a conversation that ends with an answer, or with the reply to a call.
    """
    if not messages or messages[-1]["role"] not in ("assistant", "tool"):
        return messages
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


def report_bad_rows(usable: RowCheck, total: int, key: str, policy: OnBadRow) -> str | None:
    """Return a message about bad rows if `policy` skips them. Otherwise raise ValueError."""
    if not usable.bad:
        return None
    lines = [f"  {line}" for line in usable.bad[:MAX_LISTED]]
    if len(usable.bad) > MAX_LISTED:
        lines.append(f"  … and {len(usable.bad) - MAX_LISTED} more")
    text = "\n".join(lines)
    if policy is OnBadRow.skip and usable.good:
        count = f"{len(usable.bad)} of {total} rows"
        return f"{key}: {count} are left out (data.on_bad_row=skip)\n{text}"
    remedy = "correct them, or leave them out with data.on_bad_row=skip"
    if not usable.good:
        remedy = "data.map.…=… and data.prompt=… make tasks of other columns"
    raise ValueError(f"{key}: {len(usable.bad)} of {total} rows cannot be used; {remedy}\n{text}")


def hold_out(usable: RowCheck, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the rows for training, and a share of about `fraction` held out for evaluation.

    A row's side depends on its question only. So rows with the same question stay together, and a
    new row moves no other. Raises ValueError if a side would be empty.
    """
    training: list[int] = []
    held_out: list[int] = []
    for index, key in zip(usable.good, usable.keys, strict=True):
        # The digest is a number in [0, 2**64): a fair draw that depends on the question alone.
        digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
        if int.from_bytes(digest[:8]) < fraction * 2**64:
            held_out.append(index)
        else:
            training.append(index)
    if not training or not held_out:
        side = "evaluation" if training else "training"
        raise ValueError(
            f"data.test_fraction={fraction}: leaves no row for {side}, of {len(usable.good)}; "
            "change it, or data.test_seed"
        )
    return training, held_out
