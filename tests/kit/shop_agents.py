"""The shop agent as programs of others: the loop's rules over HTTP, in four clients' shapes.

Each answers calls with the run's own tools, and ends when the model calls `final_answer`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx

from agenttrain import AgentTask
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import Task, ToolCall, ToolContext

if TYPE_CHECKING:
    import aiohttp

SECTIONS = {
    "sql": {
        "_target_": "agenttrain.tools.builtin.sql.Sql",
        "connect": "agenttrain.data.bundled.shop.connect",
    },
    "final_answer": {"_target_": "agenttrain.tools.builtin.final_answer.final_answer"},
}


@cache
def toolbox() -> Toolbox:
    return build_toolbox(SECTIONS, ["final_answer"], threads=8, max_stuck=8)


async def run_calls(agent: AgentTask, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The texts of the calls' replies."""
    made = [
        ToolCall(id=f"{index}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate(calls)
    ]
    context = lambda call: ToolContext(  # noqa: E731
        rollout_id=agent.rollout_id, task=agent.task, turn=0, call_id=call.id, tool=call.name
    )
    return [result.content for result in await toolbox().execute(made, context)]


def http(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    """A client without certificates, which take longer to load than a rollout."""
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60, verify=False)


async def with_httpx(agent: AgentTask) -> None:
    """Plain requests over the network."""
    async with http(agent.url, {}) as client:
        await converse(agent, by_httpx(client))


async def in_process(agent: AgentTask) -> None:
    """Plain requests by the run's own HTTP client."""
    async with agent.http_client() as client:
        await converse(agent, by_httpx(client))


Post = Callable[[str, dict[str, str], dict[str, Any]], Awaitable[tuple[int, Any]]]
"""Sends headers and a body as JSON to an address; returns the answer's status and its JSON."""


def by_httpx(client: httpx.AsyncClient) -> Post:
    async def post(url: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        response = await client.post(url, json=body, headers=headers)
        return response.status_code, response.json()

    return post


def by_aiohttp(client: aiohttp.ClientSession) -> Post:
    async def post(url: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        async with client.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    return post


async def converse(agent: AgentTask, post: Post) -> None:
    """A rollout in OpenAI's shape."""
    schemas, messages = toolbox().schemas(), agent.messages
    headers = {"authorization": f"Bearer {agent.api_key}"}
    while True:
        asked = {"model": agent.model, "messages": messages, "tools": schemas}
        status, answer = await post(f"{agent.base_url}/chat/completions", headers, asked)
        if status == 403:  # a limit of the run
            return
        assert status == 200, answer
        (choice,) = answer["choices"]
        messages.append(choice["message"])
        calls = choice["message"].get("tool_calls")
        if choice["finish_reason"] == "length" or not calls:
            return
        try:
            made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        except ValueError:  # a malformed call
            return
        texts = await run_calls(agent, made)
        for call, text in zip(calls, texts, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if any(name == "final_answer" for name, _ in made):
            await post(f"{agent.url}/finish", headers, {"messages": messages})
            return


async def with_openai(agent: AgentTask) -> None:
    """OpenAI's client, streaming."""
    import openai

    schemas, messages = toolbox().schemas(), agent.messages
    plain = httpx.AsyncClient(verify=False)  # certificates take longer to load than a rollout
    async with openai.AsyncOpenAI(
        base_url=agent.base_url, api_key=agent.api_key, http_client=plain
    ) as client:
        while True:
            try:
                stream = await client.chat.completions.create(
                    model=agent.model, messages=messages, tools=schemas, stream=True
                )
            except openai.PermissionDeniedError:  # a limit of the run
                return
            content, calls, finish = "", {}, None
            async for chunk in stream:
                choice = chunk.choices[0]
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(
                        part.index, {"id": part.id, "name": "", "arguments": ""}
                    )
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
                finish = choice.finish_reason or finish
            shown = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls.values()
            ]
            if finish == "length" or not shown:
                return
            messages.append({"role": "assistant", "content": content, "tool_calls": shown})
            try:
                made = [(call["name"], json.loads(call["arguments"])) for call in calls.values()]
            except ValueError:  # a malformed call
                return
            texts = await run_calls(agent, made)
            for call, text in zip(shown, texts, strict=True):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            if any(name == "final_answer" for name, _ in made):
                headers = {"authorization": f"Bearer {agent.api_key}"}
                closing = {"messages": messages}
                await plain.post(f"{agent.url}/finish", json=closing, headers=headers)
                return


def anthropics_beginning(agent: AgentTask) -> tuple[list[Any], str, list[Any]]:
    """Tools, system text and messages of the first request, as Anthropic's API takes them."""
    tools = [
        {
            "name": schema["function"]["name"],
            "description": schema["function"]["description"],
            "input_schema": schema["function"]["parameters"],
        }
        for schema in toolbox().schemas()
    ]
    system = "".join(m["content"] for m in agent.messages if m["role"] == "system")
    messages: list[Any] = [m for m in agent.messages if m["role"] != "system"]
    return tools, system, messages


async def in_anthropics_shape(agent: AgentTask) -> None:
    """Anthropic's messages, as plain requests."""
    tools, system, messages = anthropics_beginning(agent)
    headers = {"x-api-key": agent.api_key, "anthropic-version": "2023-06-01"}
    async with http(agent.url, headers) as client:
        while True:
            asked = {"model": agent.model, "messages": messages, "tools": tools, "max_tokens": 4096}
            if system:
                asked["system"] = system
            response = await client.post("/v1/messages", json=asked)
            if response.status_code == 403:  # a limit of the run
                return
            answer = response.raise_for_status().json()
            messages.append({"role": "assistant", "content": answer["content"]})
            uses = [block for block in answer["content"] if block["type"] == "tool_use"]
            if answer["stop_reason"] != "tool_use":
                return
            texts = await run_calls(agent, [(use["name"], use["input"]) for use in uses])
            results = [
                {"type": "tool_result", "tool_use_id": use["id"], "content": text}
                for use, text in zip(uses, texts, strict=True)
            ]
            messages.append({"role": "user", "content": results})
            if any(use["name"] == "final_answer" for use in uses):
                closing = {"messages": messages, "api": "anthropic"}
                await client.post("/finish", json=closing)
                return


async def with_anthropic(agent: AgentTask) -> None:
    """Anthropic's client, streaming."""
    import anthropic

    tools, system, messages = anthropics_beginning(agent)
    client = anthropic.AsyncAnthropic(
        base_url=agent.url, api_key=agent.api_key, http_client=anthropics_http()
    )
    while True:
        asked = {"system": system} if system else {}
        try:
            async with client.messages.stream(
                model=agent.model, messages=messages, tools=tools, max_tokens=4096, **asked
            ) as stream:
                answer = await stream.get_final_message()
        except anthropic.PermissionDeniedError:  # a limit of the run
            return
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if answer.stop_reason != "tool_use":
            return
        texts = await run_calls(agent, [(use.name, dict(use.input)) for use in uses])
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": text}
            for use, text in zip(uses, texts, strict=True)
        ]
        messages.append({"role": "user", "content": results})
        if any(use.name == "final_answer" for use in uses):
            for message in messages[1::2]:  # the assistant's
                message["content"] = [b.model_dump(exclude_none=True) for b in message["content"]]
            closing = {"messages": messages, "api": "anthropic"}
            headers = {"x-api-key": agent.api_key}
            await anthropics_http().post(f"{agent.url}/finish", json=closing, headers=headers)
            return


@cache
def anthropics_http() -> Any:
    """The HTTP client of all rollouts; one that reads certificates takes longer than a rollout."""
    import anthropic

    return anthropic.DefaultAsyncHttpxClient(verify=False)


def main() -> None:
    """Attempt the tasks on standard input, a line each and all at once, until its end.

    The argument `anthropic` is for Anthropic's client.
    """

    async def attempt(line: str, solve: Callable[[AgentTask], Awaitable[None]]) -> None:
        given = json.loads(line)
        names = ("rollout_id", "url", "api_key", "model")
        task = Task(
            task_id=given["task_id"], messages=tuple(given["messages"]), columns=given["columns"]
        )
        await solve(AgentTask(task=task, **{name: given[name] for name in names}))
        print(json.dumps({"rollout_id": given["rollout_id"]}), flush=True)

    async def serve(solve: Callable[[AgentTask], Awaitable[None]]) -> None:
        lines = asyncio.StreamReader(limit=2**24)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with asyncio.TaskGroup() as group:  # one that raises ends the program
            while line := await lines.readline():
                group.create_task(attempt(line.decode(), solve))

    async def with_aiohttp() -> None:
        """Its client takes a tenth of the CPU of httpx's."""
        import aiohttp  # the environment of Anthropic's client lacks it

        connector = aiohttp.TCPConnector(limit=0)  # its default is 100 connections at once
        async with aiohttp.ClientSession(connector=connector) as client:
            await serve(lambda agent: converse(agent, by_aiohttp(client)))

    asyncio.run(serve(with_anthropic) if sys.argv[1:] == ["anthropic"] else with_aiohttp())


if __name__ == "__main__":
    main()
