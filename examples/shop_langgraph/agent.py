"""A shop agent as a LangGraph program; it knows nothing of training.

The task is a line of JSON on standard input; the model is where OPENAI_BASE_URL points.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agenttrain.data.bundled.shop import connect
from agenttrain.utils.sqlite import answer_query, restrict

TASK = json.loads(sys.stdin.readline())
MAX_RESULT_CHARACTERS = 2000


@tool(parse_docstring=True)
def sql(query: str) -> str:
    """Run a read-only SQL query.

    Args:
        query: One SELECT statement.
    """
    # A connection for each call: the library runs calls of a turn in threads, at once.
    with closing(connect(TASK["columns"])) as database:
        restrict(database)  # the model writes the queries
        return answer_query(database, query, max_characters=MAX_RESULT_CHARACTERS)


@tool(parse_docstring=True)
def final_answer(answer: str) -> str:
    """Give the answer and stop.

    Args:
        answer: The answer.
    """
    return answer


TOOLS = [sql, final_answer]
MODEL = ChatOpenAI(model=os.environ["AGENTTRAIN_MODEL"]).bind_tools(TOOLS)


def model(state: MessagesState) -> dict:
    """Ask the model for its next message."""
    return {"messages": [MODEL.invoke(state["messages"])]}


def after_tools(state: MessagesState) -> str:
    """Go on with the model, unless an answer was handed in."""
    return END if state["messages"][-1].name == "final_answer" else "model"


def graph() -> StateGraph:
    """Return the agent: the model and its tools in turn."""
    agent = StateGraph(MessagesState)
    agent.add_node("model", model)
    agent.add_node("tools", ToolNode(TOOLS, handle_tool_errors=True))
    agent.add_edge(START, "model")
    agent.add_conditional_edges("model", tools_condition)
    agent.add_conditional_edges("tools", after_tools, ["model", END])
    return agent


if __name__ == "__main__":
    limit = {"recursion_limit": 13}  # of six turns: each is a step of the model and one of tools
    state = graph().compile().invoke({"messages": TASK["messages"]}, limit)
    print(state["messages"][-1].content)
