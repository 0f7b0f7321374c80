"""A shop agent with smolagents; it knows nothing of training. In this folder::

    pip install 'smolagents[openai]'
    agenttrain agent=endpoint 'agent.command=[python,with_smolagents.py]' tools=[] stop_tools=[] \\
        agent.on_form=ask model=folder model.path=my_model

`ToolCallingAgent` demands a call in each turn, which `agent.on_form=ask` answers without forcing
it. Its prompt is too long for the bundled model. Both agents of smolagents replace their calls by
a text, so that each turn begins a trajectory.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing

from smolagents import OpenAIModel, ToolCallingAgent, tool

from agenttrain.data.bundled.shop import connect
from agenttrain.utils.sqlite import answer_query, restrict

TASK = json.loads(sys.stdin.readline())
MAX_RESULT_CHARACTERS = 2000


@tool
def sql(query: str) -> str:
    """Run a read-only SQL query.

    Args:
        query: One SELECT statement.
    """
    # A connection for each call: the library runs calls of a turn in threads, at once.
    with closing(connect(TASK["columns"])) as database:
        restrict(database)  # the model writes the queries
        return answer_query(database, query, max_characters=MAX_RESULT_CHARACTERS)


if __name__ == "__main__":
    model = OpenAIModel(model_id=TASK["model"], api_base=os.environ["OPENAI_BASE_URL"])
    agent = ToolCallingAgent(tools=[sql], model=model, max_steps=6, verbosity_level=0)
    print(agent.run(TASK["messages"][-1]["content"]))
