"""strands-agents: OpenAI's model class, which streams."""

import json
import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


task = json.loads(sys.stdin.readline())
client = {name: os.environ[f"OPENAI_{name.upper()}"] for name in ("base_url", "api_key")}
agent = Agent(
    model=OpenAIModel(client_args=client, model_id=task["model"]),
    tools=[add],
    callback_handler=None,
)
print(agent(task["messages"][-1]["content"]))
