"""A shop agent with Anthropic's client; it knows nothing of training.

The task is a line of JSON on standard input; the model is where ANTHROPIC_BASE_URL points.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys

from anthropic import Anthropic

from agenttrain.data.bundled.shop import connect
from agenttrain.utils.sqlite import QueryFailed, answer_query, restrict

TOOLS = [
    {
        "name": "sql",
        "description": "Run a read-only SQL query.",
        "input_schema": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "One SELECT statement."}},
            "required": ["query"],
        },
    },
    {
        "name": "final_answer",
        "description": "Give the answer and stop.",
        "input_schema": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
]
MAX_TURNS = 6
MAX_RESULT_CHARACTERS = 2000


def sql(database: sqlite3.Connection, query: str) -> dict[str, object]:
    """Return a tool result with the rows of a query, as ``3, lamp; 4, desk``."""
    try:
        return {"content": answer_query(database, query, max_characters=MAX_RESULT_CHARACTERS)}
    except (QueryFailed, TypeError) as error:
        return {"content": f"Error: {error}", "is_error": True}


def answer(messages: list, database: sqlite3.Connection) -> str | None:
    """Converse until the model hands in an answer; None if it never does."""
    client = Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
    for _ in range(MAX_TURNS):
        message = client.messages.create(
            model=os.environ["AGENTTRAIN_MODEL"], max_tokens=1024, messages=messages, tools=TOOLS
        )
        messages.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return None
        results = []
        for use in uses:
            if use.name == "final_answer":
                return use.input.get("answer")
            result = sql(database, use.input.get("query", ""))
            results.append({"type": "tool_result", "tool_use_id": use.id, **result})
        messages.append({"role": "user", "content": results})
    return None


if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    database = connect(task["columns"])
    restrict(database)  # the model writes the queries
    print(answer(task["messages"], database))
