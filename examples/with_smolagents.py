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

from smolagents import OpenAIModel, ToolCallingAgent, tool

from agenttrain.data.bundled.shop import connect

TASK = json.loads(sys.stdin.readline())
DATABASE = connect(TASK["columns"])


@tool
def sql(query: str) -> str:
    """Run a read-only SQL query.

    Args:
        query: One SELECT statement.
    """
    rows = DATABASE.execute(query).fetchall()
    return "; ".join(", ".join(map(str, row)) for row in rows) or "no rows"


if __name__ == "__main__":
    model = OpenAIModel(model_id=TASK["model"], api_base=os.environ["OPENAI_BASE_URL"])
    agent = ToolCallingAgent(tools=[sql], model=model, max_steps=6, verbosity_level=0)
    print(agent.run(TASK["messages"][-1]["content"]))
