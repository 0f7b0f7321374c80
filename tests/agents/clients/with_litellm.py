"""LiteLLM's SDK, by Anthropic's messages; mini-swe-agent uses it by OpenAI's chat completions."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a list of prices
import litellm

task = json.loads(sys.stdin.readline())
messages = task["messages"]
parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
while True:
    answer = litellm.completion(model=f"anthropic/{task['model']}", messages=messages, tools=tools)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
print(message.content)
