"""A proxy of LiteLLM before the endpoint: a conversation by chat completions, one by responses."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

KEY = "sk-of-the-proxy-itself-0123456789abcdef"  # it refuses to start with a short one, or none
PARAMETERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}


@contextmanager
def proxy(task: dict) -> Iterator[str]:
    """Yield the URL of a proxy of the task's model, once it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = {"model": f"openai/{task['model']}", "api_base": task["base_url"]}
    settings = {
        "model_list": [{"model_name": task["model"], "litellm_params": served}],
        "general_settings": {"master_key": KEY},
    }
    config = Path(tempfile.mkdtemp()) / "config.yaml"
    config.write_text(json.dumps(settings))
    process = subprocess.Popen(
        [Path(sys.executable).with_name("litellm"), "--config", config, "--port", str(port)],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=sys.stderr,
    )
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def chat(client: OpenAI, model: str, prompt: str) -> str:
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": prompt}]
    while True:
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})


def respond(client: OpenAI, model: str, prompt: str) -> str:
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
    items = [{"role": "user", "content": prompt}]
    while True:
        answer = client.responses.create(model=model, input=items, tools=tools)
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        if not calls:
            return answer.output_text
        for call in calls:
            total = str(sum(json.loads(call.arguments).values()))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})


def main() -> None:
    task = json.loads(sys.stdin.readline())
    prompt = task["messages"][-1]["content"]
    with proxy(task) as url:
        client = OpenAI(base_url=url, api_key=KEY)
        chat(client, task["model"], prompt)
        print(respond(client, task["model"], f"Once more: {prompt}"))


if __name__ == "__main__":
    main()
