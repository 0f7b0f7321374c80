"""A shop agent with OpenAI's client; it knows nothing of training.

The task is a line of JSON on standard input; the model is where OPENAI_BASE_URL points.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys

from openai import OpenAI

from agenttrain.data.bundled.shop import connect
from agenttrain.utils.sqlite import QueryFailed, answer_query, restrict

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sql",
            "description": "Run a read-only SQL query.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "One SELECT statement."},
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "final_answer",
            "description": "Give the answer and stop.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The answer."}},
                "required": ["answer"],
            },
        },
    },
]
MAX_TURNS = 6
MAX_RESULT_CHARACTERS = 2000


def sql(database: sqlite3.Connection, query: str) -> str:
    """Return the rows of a query as ``3, lamp; 4, desk``."""
    try:
        return answer_query(database, query, max_characters=MAX_RESULT_CHARACTERS)
    except QueryFailed as error:
        return f"Error: {error}"


def answer(messages: list, database: sqlite3.Connection) -> str | None:
    """Converse until the model hands in an answer; None if it never does."""
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(
            model=os.environ["AGENTTRAIN_MODEL"], messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return None
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
                if call.function.name == "final_answer":
                    return arguments["answer"]
                reply = sql(database, arguments["query"])
            except (ValueError, TypeError, KeyError) as error:
                reply = f"Error: {type(error).__name__}: {error}"  # the model reads it
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})
    return None


if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    database = connect(task["columns"])
    restrict(database)  # the model writes the queries
    print(answer(task["messages"], database))
