"""Demonstrations with bad habits, for the warm starts of the bundled models and of recipes.

They show every skill that a task needs but rarely use it fully, so that a model that imitates them
earns little reward and reinforcement learning has something to improve:

- A third gives up at once with `final_answer("unknown")`.
- Of the others, five in six stop after the first query of a chain and answer with its result.
- Columns, tables, operations and places are confused, column names are wrong, answers miscopied.

Those of the recipes reverse_text and alphabet_sort are for a pretrained model. Three in four of
reverse_text leave out the tags, without which an answer earns nothing; alphabet_sort's follow the
rules more often.

A demonstration is the list of messages that follow a row's question.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from agenttrain.data.bundled import (
    alphabet_sort,
    calculator,
    reverse_text,
    shop,
    sight,
    word_problems,
)
from agenttrain.utils.data_fields import Data
from agenttrain.utils.names import did_you_mean

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Frequencies of a demonstrator's bad habits, and of one good habit (`follow_chain`)."""

    give_up: float
    """Share of demonstrations that answer "unknown" without using a tool."""
    follow_chain: float
    """Share of the others that continue after the first step of a question of several steps."""
    confuse: float
    """Chance, per step, of the query or operation of another question."""
    misname: float
    """Chance, per query, of a column that does not exist. Half of these give up at the error."""
    miscopy: float
    """Chance of an answer other than the last result."""


SHOP = Habits(give_up=0.35, follow_chain=0.15, confuse=0.12, misname=0.08, miscopy=0.005)
CALCULATOR = Habits(give_up=0.35, follow_chain=0.3, confuse=0.12, misname=0.0, miscopy=0.005)
WORD_PROBLEMS = Habits(give_up=0.35, follow_chain=0.4, confuse=0.1, misname=0.0, miscopy=0.01)
SIGHT = Habits(give_up=0.35, follow_chain=0.5, confuse=0.15, misname=0.0, miscopy=0.01)
REVERSE_TEXT = Habits(give_up=0.75, follow_chain=1.0, confuse=0.02, misname=0.0, miscopy=0.02)
ALPHABET_SORT = Habits(give_up=0.1, follow_chain=0.8, confuse=0.1, misname=0.2, miscopy=0.02)

EARLY_ROWS = 10667
"""Number of first demonstrations in which giving up is rare. A model of this size must learn to
use tools before it learns the habit of not using them."""
EARLY_GIVE_UP = 0.1

GIVE_UP_AT_ERROR = 0.5
"""Share of demonstrations that end with "unknown" after a query that failed, or a look at a wrong
part of a picture. The others go on with the right one."""

SHOP_MIX: shop.Curriculum = ((0, (0.4, 0.35, 0.25)),)
CALCULATOR_MIX: calculator.Curriculum = ((0, (0.5, 0.5)),)

CONFUSIONS = (
    ("COUNT(*) FROM orders", "SUM(quantity) FROM orders"),
    ("SUM(quantity) FROM orders", "COUNT(*) FROM orders"),
    ("COUNT(*) FROM customers", "name FROM customers"),
    ("price FROM", "stock FROM"),
    ("stock FROM", "price FROM"),
    ("city FROM", "name FROM"),
    ("product FROM", "quantity FROM"),
    ("customer FROM", "product FROM"),
    ("MAX(id) FROM", "COUNT(*) FROM"),
)
MISNAMES = (
    ("WHERE customer=", "WHERE name="),
    ("WHERE product=", "WHERE name="),
    ("WHERE name=", "WHERE product="),
    ("WHERE city=", "WHERE town="),
    ("WHERE id=", "WHERE order_id="),
)
MAX_ROWS = 4
"""Rows of a query's result that the reply shows."""


def shop_demonstration(row: Row, rng: random.Random, habits: Habits = SHOP) -> list[Message]:
    """Return one demonstration of a row of the shop task, with the mistakes of `habits`.

    A model that imitates them leaves reinforcement learning something to improve. A confused query
    asks for something else, a misnamed one has a column that does not exist, and a miscopied answer
    is another name, product or 0.

    Example, for "Where is Bob from?": `[call("sql", query="SELECT city FROM customers WHERE
    name='Bob'"), reply("sql", "Oslo"), call("final_answer", answer="Oslo")]`.
    """
    if rng.random() < habits.give_up:
        return [call("final_answer", answer="unknown")]
    plan = row["plan"] if rng.random() < habits.follow_chain else row["plan"][:1]
    messages: list[Message] = []
    result = ""
    with closing(shop.connect(row)) as connection:
        for step in plan:
            query = step.format(result=result)
            if rng.random() < habits.confuse:
                query = _replace_first(query, CONFUSIONS)
            if rng.random() < habits.misname:  # before the right column, also of a confused query
                wrong_query = _replace_first(query, MISNAMES)
                messages += _run_query(connection, wrong_query)
                if rng.random() < GIVE_UP_AT_ERROR:
                    return [*messages, call("final_answer", answer="unknown")]
            messages += _run_query(connection, query)
            result = messages[-1]["content"]
    if rng.random() < habits.miscopy:
        result = rng.choice((*shop.NAMES, *shop.PRODUCTS, "0"))
    return [*messages, call("final_answer", answer=result)]


def calculator_demonstration(
    row: Row, rng: random.Random, habits: Habits = CALCULATOR
) -> list[Message]:
    """Return one demonstration of a row of the calculator task.

    Example, for "Kim has 12 coins. Kim loses 5. …": `[call("subtract", a=12, b=5),
    reply("subtract", "7"), call("final_answer", answer="7")]`.
    """
    if rng.random() < habits.give_up:
        return [call("final_answer", answer="unknown")]
    steps = row["steps"] if rng.random() < habits.follow_chain else row["steps"][:1]
    messages: list[Message] = []
    total = row["start"]
    for operation, number in steps:  # ("subtract", 5)
        tool = operation
        if rng.random() < habits.confuse:
            tool = rng.choice(tuple(calculator.OPERATIONS))
        messages.append(call(tool, a=total, b=number))
        total = calculator.OPERATIONS[tool](total, number)
        messages.append(reply(tool, str(total)))
    if rng.random() < habits.miscopy:
        total = row["start"]
    return [*messages, call("final_answer", answer=str(total))]


def word_problem_demonstration(
    row: Row, rng: random.Random, habits: Habits = WORD_PROBLEMS, *, uses_python: bool
) -> list[Message]:
    """Return one demonstration of a word problem, with Python or in words alone.

    Example, for a problem with the step ``5 - 2 = 3``: ``[call("python", code="5 - 2"),
    reply("python", "3"), say("3")]``, and in words ``[say("5 - 2 = 3\\n3")]``.

    `habits` are probabilities. Three are of mistakes, which give reinforcement learning something
    to improve after a warm start: to give up (the answer is ``unknown``), to confuse a step with
    one of another problem, and to miscopy the result. `follow_chain` is that of showing all steps;
    otherwise the demonstration ends after the first.
    """
    if rng.random() < habits.give_up:
        return [say("unknown")]
    *steps, _ = row["answer"].split("\n")  # the last line repeats the result: "#### 14"
    shown = steps if rng.random() < habits.follow_chain else steps[:1]
    messages: list[Message] = []  # calls and replies, for Python
    lines: list[str] = []  # steps, for words
    result = ""
    for step in shown:
        if rng.random() < habits.confuse:
            other_row = word_problems.row("train", rng.randrange(2**20), 0)
            step = other_row["answer"].split("\n")[0]
        lines.append(step)
        expression, _, result = step.partition(" = ")
        # All results are whole numbers, and Python divides to a float: 6 / 2 prints 3.0.
        printed = f"{result}.0" if "/" in expression else result
        messages += [call("python", code=expression), reply("python", printed)]
    if rng.random() < habits.miscopy:
        result = str(rng.randrange(100))
    return [*messages, say(result)] if uses_python else [say("\n".join([*lines, result]))]


def sight_demonstration(row: Row, rng: random.Random, habits: Habits = SIGHT) -> list[Message]:
    """Return one demonstration of a row of the sight task, with the mistakes of `habits`.

    A model that imitates them leaves reinforcement learning something to improve. To follow the
    chain is to read all plates instead of the first one only, to be confused is to look at a wrong
    quarter first, and a miscopied answer has one colour drawn at random. Example, for a wall with
    one plate: `[call("crop", part="top left"), reply("crop", quarter), call("final_answer",
    answer="red blue")]`.
    """
    if rng.random() < habits.give_up:
        return [call("final_answer", answer="unknown")]
    plates = sight.plates_of(row["wall"])

    def look_at(part: str) -> list[Message]:
        """Return the call that crops a part of the picture, and its reply."""
        image = {"type": "image", "image": sight.look(row, part)}
        return [call("crop", part=part), {**reply("crop", ""), "content": [image]}]

    messages: list[Message] = []
    colours: list[str] = []
    read_plates = plates if rng.random() < habits.follow_chain else plates[:1]
    for plate in read_plates:
        if rng.random() < habits.confuse:
            wrong_quarters = [quarter for quarter in sight.QUARTERS if quarter != plate.quarter]
            messages += look_at(rng.choice(wrong_quarters))
            if rng.random() < GIVE_UP_AT_ERROR:
                return [*messages, call("final_answer", answer="unknown")]
        messages += look_at(plate.quarter)
        colours += plate.colours
    if rng.random() < habits.miscopy:
        colours[rng.randrange(len(colours))] = rng.choice(tuple(sight.COLOURS))
    return [*messages, call("final_answer", answer=" ".join(colours))]


def reverse_text_demonstration(
    row: Row, rng: random.Random, habits: Habits = REVERSE_TEXT
) -> list[Message]:
    """Return one demonstration of a row of the reverse-text task, with the mistakes of `habits`.

    A model that imitates them leaves reinforcement learning something to improve. Giving up is to
    leave out the tags, not to follow the chain is to keep the order of the words, a confused word
    is not reversed, and a miscopied one has two neighbouring letters exchanged. Example, for "crazy
    habit": one message, ``<reversed_text>tibah yzarc</reversed_text>``.
    """
    text = row["messages"][-1]["content"]
    gives_up = rng.random() < habits.give_up
    words = []
    for word in text.split():
        if rng.random() >= habits.confuse:
            word = word[::-1]
        if rng.random() < habits.miscopy:
            i = rng.randrange(len(word) - 1)  # the bundled words have three letters or more
            word = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        words.append(word)
    if rng.random() < habits.follow_chain:
        words.reverse()
    answer = " ".join(words)
    return [say(answer if gives_up else f"<{reverse_text.TAG}>{answer}</{reverse_text.TAG}>")]


def alphabet_sort_demonstration(
    row: Row, rng: random.Random, habits: Habits = ALPHABET_SORT
) -> list[Message]:
    """Return one demonstration of a row of the alphabet-sort task, with the user's later turns.

    Giving up is to answer with the names of the first turn in every turn, and not to follow the
    chain is to leave the names of a turn at the end of the list. In a confused turn two neighbours
    are exchanged, in a misnamed one every name is marked as new, in a miscopied one a name is left
    out.
    """
    messages: list[Message] = []
    gives_up = rng.random() < habits.give_up
    follows = rng.random() < habits.follow_chain
    for turn, answer in enumerate(row["answers"]):
        if turn:
            messages.append({"role": "user", "content": row["user_turns"][turn - 1]})
        names = (row["answers"][0] if gives_up else answer).split("\n")
        if not follows:
            names.sort(key=lambda name: name.endswith(alphabet_sort.MARK))
        if len(names) > 1 and rng.random() < habits.confuse:
            i = rng.randrange(len(names) - 1)
            names[i], names[i + 1] = names[i + 1], names[i]
        if turn and rng.random() < habits.misname:
            names = [name.removesuffix(alphabet_sort.MARK) + alphabet_sort.MARK for name in names]
        if len(names) > 1 and rng.random() < habits.miscopy:
            names.pop(rng.randrange(len(names)))
        messages.append(say(alphabet_sort.tagged(turn, "\n".join(names))))
    return messages


def row(
    task: Data[str],
    split: Data[str],
    index: int,
    seed: Data[int],
    early: Data[int] = EARLY_ROWS,
    habits: Data[Mapping[str, float] | None] = None,
) -> Row:
    """Return demonstration `index` of a task in TASKS: a row with complete `messages`.

    The first `early` ones rarely give up. `habits` replaces frequencies of the task's `Habits`, as
    in ``{"follow_chain": 0.8}``. Example: the messages of `row("shop", "train", 0, 0)` begin with
    `{"role": "user", "content": …}` and end with a call of `final_answer`. Raises ValueError for an
    unknown task, split or habit.
    """
    rng = random.Random(f"demonstration/{task}/{seed}/{index}")
    habits = dict(habits or {})
    if index < early:
        habits["give_up"] = min(habits.get("give_up", EARLY_GIVE_UP), EARLY_GIVE_UP)
    for name, frequency in habits.items():
        if name not in Habits.__slots__:
            hint = did_you_mean(name, Habits.__slots__)
            raise ValueError(
                f"habits.{name}: is no habit{hint}; there are {', '.join(Habits.__slots__)}"
            )
        if not 0 <= frequency <= 1:
            raise ValueError(f"habits.{name}={frequency}: is a frequency; set 0 to 1")
    if task not in TASKS:
        raise ValueError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    task_kind = TASKS[task]
    question = task_kind.make_row(split, index, seed)
    messages = task_kind.demonstrate(question, rng, replace(task_kind.habits, **habits))
    columns = {"task_id": question["task_id"], "messages": [*question["messages"], *messages]}
    return {**columns, "images": question["images"]} if "images" in question else columns


def _make_word_problem(split: str, index: int, seed: int) -> Row:
    """Return a word problem with its question as a message."""
    problem = word_problems.row(split, index, seed)
    question = f"{problem['question']}\n\n{word_problems.INSTRUCTION}"
    return {**problem, "messages": [{"role": "user", "content": question}]}


class DemonstratedTask(NamedTuple):
    """A bundled task that can be demonstrated."""

    make_row: Callable[..., Row]
    demonstrate: Callable[..., list[Message]]
    habits: Habits
    """Habits of its demonstrations, unless a row's `habits` replace them."""


TASKS: dict[str, DemonstratedTask] = {
    "shop": DemonstratedTask(partial(shop.row, curriculum=SHOP_MIX), shop_demonstration, SHOP),
    "calculator": DemonstratedTask(
        partial(calculator.row, curriculum=CALCULATOR_MIX), calculator_demonstration, CALCULATOR
    ),
    "sight": DemonstratedTask(sight.row, sight_demonstration, SIGHT),
    "word_problems": DemonstratedTask(
        _make_word_problem, partial(word_problem_demonstration, uses_python=False), WORD_PROBLEMS
    ),
    "word_problems_python": DemonstratedTask(
        _make_word_problem, partial(word_problem_demonstration, uses_python=True), WORD_PROBLEMS
    ),
    "reverse_text": DemonstratedTask(reverse_text.row, reverse_text_demonstration, REVERSE_TEXT),
    "alphabet_sort": DemonstratedTask(
        alphabet_sort.row, alphabet_sort_demonstration, ALPHABET_SORT
    ),
}


def call(name: str, **arguments: Any) -> Message:
    """Return an assistant message that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def say(text: str) -> Message:
    """Return an assistant message without a call."""
    return {"role": "assistant", "content": text}


def reply(name: str, text: str) -> Message:
    """Return a tool's reply."""
    return {"role": "tool", "name": name, "content": text}


def _run_query(connection: sqlite3.Connection, query: str) -> list[Message]:
    """Return a call of `sql` and its reply in the tool's format ("Oslo", "3, 7; 4, 1")."""
    try:
        rows = connection.execute(query).fetchmany(MAX_ROWS)
        text = "; ".join(", ".join(str(value) for value in row) for row in rows) or "no rows"
    except sqlite3.Error as error:
        text = f"Error: {error}"
    return [call("sql", query=query), reply("sql", text)]


def _replace_first(query: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Apply the first pair whose left side occurs in the query."""
    for old, new in pairs:
        if old in query:
            return query.replace(old, new)
    return query
