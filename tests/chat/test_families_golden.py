"""The completion of TRL's pull request 5145, on the Qwen tokenizer: 47 ids stay 47 ids.

A loop that decodes, parses and renders again trains on another, shorter sequence.
"""

from __future__ import annotations

import asyncio

from family_chats import real_qwen
from parts import LIMITS, add, toolbox

from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.types import Rollout, Task


def multiply_tool(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


# fmt: off
SAMPLED = (
    # <tool_call> \n  {\n  …  "   name  "      …
    151657,       198, 515, 6656, 330, 606, 1, 286,
    # :   …    "    multiply _tool  ",\n …     "   arguments " …  :
    549, 338, 330, 64648, 22785, 756, 6656, 330, 16370, 1, 256, 549,
    # …  {\n  …     "    a  "  …    :    _    _    3   ,\n
    338, 341, 6374, 330, 64, 1, 256, 549, 220, 220, 18, 345,
    # …   "    b   "  …    :    _    _    4   \n   …     }\n   }\n
    6374, 330, 65, 1, 256, 549, 220, 220, 19, 198, 4569, 456, 532,
    # </tool_call> <|im_end|>
    151658,        151645,
)
# fmt: on


def run() -> Rollout:
    chat = real_qwen("qwen3")
    done = (*chat.encode_plain("12"), 151645)
    task = Task(task_id="t", messages=({"role": "user", "content": "What is 3 times 4?"},))
    tools = toolbox(multiply_tool, add)
    rollout = asyncio.run(
        run_rollout(
            RolloutRequest(task=task),
            RolloutContext(
                engine=ScriptedEngine([SAMPLED, done]), chat=chat, toolbox=tools, limits=LIMITS
            ),
        )
    )
    verify(rollout, chat, tools.schemas())
    return rollout


def test_the_47_sampled_ids_survive_with_mask_and_logprobs():
    rollout = run()
    start = rollout.trajectories[0].prompt_length
    assert len(SAMPLED) == 47
    assert tuple(rollout.trajectories[0].token_ids[start : start + 47]) == SAMPLED
    assert rollout.trajectories[0].loss_mask[start : start + 48] == [1] * 47 + [0]
    assert rollout.trajectories[0].rollout_logprobs[start : start + 48] == [-0.5] * 47 + [0.0]
    assert [result.content for result in rollout.tool_results] == ["12"]
    assert rollout.tool_results[0].call.arguments == {"a": 3, "b": 4}


def test_rendering_the_parsed_call_again_would_give_fewer():
    rollout, chat = run(), real_qwen("qwen3")
    text = chat.render(rollout.trajectories[0].messages[:2], [], generation_prompt=False)
    rendered = chat.encoder.encode(text)
    opening = len(rendered) - 1 - rendered[::-1].index(151657)
    closing = rendered.index(151645, opening)
    assert len(rendered[opening : closing + 1]) < 47
