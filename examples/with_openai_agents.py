"""A shop agent with openai-agents; it knows nothing of training. In this folder::

    pip install openai-agents
    agenttrain agent=endpoint 'agent.command=[python,with_openai_agents.py]' tools=[] stop_tools=[]

The task is a line of JSON on standard input; the model is where OPENAI_BASE_URL points.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

from agents import Agent, Runner, StopAtTools, function_tool, set_tracing_disabled

from agenttrain.data.bundled.shop import connect
from agenttrain.utils.sqlite import QueryFailed, answer_query, restrict

TASK = json.loads(sys.stdin.readline())
MAX_RESULT_CHARACTERS = 2000
set_tracing_disabled(True)  # traces go to OpenAI, with the rollout's key


@function_tool
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
        return f"Error: {error}"  # by default the model does not read what went wrong


@function_tool
def final_answer(answer: str) -> str:
    """Give the answer and stop.

    Args:
        answer: The answer.
    """
    return answer


if __name__ == "__main__":
    agent = Agent(
        name="shop",
        model=TASK["model"],
        tools=[sql, final_answer],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["final_answer"]),
    )
    print(Runner.run_sync(agent, TASK["messages"], max_turns=6).final_output)
