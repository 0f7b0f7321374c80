"""A shop agent with pydantic-ai; it knows nothing of training. In this folder::

    pip install 'pydantic-ai-slim[openai]'
    agenttrain agent=endpoint 'agent.command=[python,with_pydantic_ai.py]' tools=[] stop_tools=[]

The task is a line of JSON on standard input; the model is where OPENAI_BASE_URL points.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

from pydantic_ai import Agent, ModelRetry, ToolOutput

from agenttrain.data.bundled.shop import connect
from agenttrain.utils.sqlite import QueryFailed, answer_query, restrict

TASK = json.loads(sys.stdin.readline())
MAX_RESULT_CHARACTERS = 2000


def sql(query: str) -> str:
    """Run a read-only SQL query.

    Args:
        query: One SELECT statement.
    """
    try:
        # A connection for each call: the library runs calls of a turn in threads, at once.
        with closing(connect(TASK["columns"])) as database:
            restrict(database)  # the model writes the queries
            return answer_query(database, query, max_characters=MAX_RESULT_CHARACTERS)
    except QueryFailed as error:
        raise ModelRetry(str(error)) from error  # the model reads it


def final_answer(answer: str) -> str:
    """Give the answer and stop.

    Args:
        answer: The answer.
    """
    return answer


if __name__ == "__main__":
    # With `str` the model may answer without a call, so that none has to be forced.
    output = [ToolOutput(final_answer, name="final_answer"), str]
    agent = Agent(f"openai:{TASK['model']}", tools=[sql], output_type=output, retries=5)
    print(agent.run_sync(TASK["messages"][-1]["content"]).output)
