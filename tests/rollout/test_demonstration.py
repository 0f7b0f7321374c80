"""Conversations of a dataset as rollouts: ids, mask and messages are those of the loop."""

from __future__ import annotations

import parts
import pytest
from family_chats import Conversation, conversations, small, texts
from hypothesis import given, settings

from agenttrain.chat.certificate import as_parsed
from agenttrain.chat.demonstrations import completion_ids
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.fixes import families
from agenttrain.commands.templates import EXAMPLE_TOOLS
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.demonstration import BadDemonstration, Demonstrator
from agenttrain.types import AssistantTurn, Message, Origin, Rollout, StopReason, Task

QUESTION = {"role": "user", "content": "what is 3 + 4?"}


def said(name: str, arguments: object, call_id: str | None = None) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {**call, "id": call_id}


def calling(*calls: dict, content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def reply(text: str, call_id: str | None = None) -> Message:
    message = {"role": "tool", "content": text}
    return message if call_id is None else {**message, "tool_call_id": call_id}


def demonstrate(*messages: Message, limits: RolloutConfig = parts.LIMITS) -> Rollout:
    tools = parts.toolbox(stop_tools=["final_answer"])
    task = Task(task_id="row-1", messages=(QUESTION, *messages))
    return Demonstrator(chat=parts.chat(), toolbox=tools, limits=limits)(task, "d")


def spans(rollout: Rollout) -> list[tuple[str, list[int]]]:
    return [(str(span.origin), list(span.token_ids)) for span in rollout.trajectories[0].spans]


def test_a_demonstration_is_the_rollout_of_a_model_that_did_the_same() -> None:
    """Token for token: two calls in one turn, an answer, the user's next words, a stop tool."""
    pair = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call><|im_end|>'
    )
    last = parts.call("final_answer", '{"answer": "7"}')
    task = Task(task_id="t", messages=(QUESTION,), user_turns=("hand it in",))
    tools = parts.toolbox(stop_tools=["final_answer"])
    acted = parts.rollout(pair, "7 and 2<|im_end|>", last, tools=tools, task=task)
    shown = demonstrate(
        calling(said("add", {"a": 3, "b": 4}), said("add", '{"a": 1, "b": 1}')),
        reply("7"),
        reply("2"),
        {"role": "assistant", "content": "7 and 2"},
        {"role": "user", "content": "hand it in"},
        calling(said("final_answer", {"answer": "7"})),
        reply("ok"),
    )
    assert spans(shown) == spans(acted)
    assert shown.trajectories[0].messages == acted.trajectories[0].messages
    assert shown.trajectories[0].loss_mask == acted.trajectories[0].loss_mask
    assert shown.stop_reason is acted.stop_reason is StopReason.stop_tool
    assert set(shown.trajectories[0].rollout_logprobs) == {0.0}
    assert shown.turns == 3


def test_what_stands_before_the_first_assistant_message_is_the_prompt() -> None:
    rollout = demonstrate({"role": "assistant", "content": "7"})
    assert [message["role"] for message in rollout.task.messages] == ["user"]
    #                           7 <|im_end|>
    sampled = parts.ids("7") + parts.ids("<|im_end|>")
    assert [list(s.token_ids) for s in rollout.trajectories[0].sampled_spans()] == [list(sampled)]
    assert rollout.stop_reason is StopReason.completed


def test_replies_are_put_in_the_order_of_the_calls_by_their_ids() -> None:
    rollout = demonstrate(
        calling(said("add", {"a": 3, "b": 4}, "x"), said("add", {"a": 1, "b": 1}, "y")),
        reply("2", "y"),
        reply("7", "x"),
        {"role": "assistant", "content": "done"},
    )
    assert [m["content"] for m in rollout.trajectories[0].messages if m["role"] == "tool"] == [
        "7",
        "2",
    ]


def test_a_long_reply_is_clipped_as_the_loop_clips_it() -> None:
    answer = {"role": "assistant", "content": "done"}
    call = calling(said("add", {"a": 3, "b": 4}))
    limits = RolloutConfig(max_result_tokens=12)
    rollout = demonstrate(call, reply("word " * 100), answer, limits=limits)
    tool = [
        len(span.token_ids) for span in rollout.trajectories[0].spans if span.origin is Origin.tool
    ]
    assert sum(tool) <= 12
    assert len(rollout.trajectories[0].messages[2]["content"]) < 100


ANSWER = {"role": "assistant", "content": "7"}
ADD = calling(said("add", {"a": 3, "b": 4}))
BAD = {
    "nothing is learnt": ([], "has nothing to learn"),
    "a reply is missing": (
        [calling(*ADD["tool_calls"] * 2), reply("7"), ANSWER],
        "turn 0: 2 calls have 1 replies",
    ),
    "a user between": ([ADD, {"role": "user", "content": "x"}, ANSWER], "of the role user follows"),
    "two answers": ([ANSWER, ANSWER], "one user message must follow an answer"),
    "an unanswered question": ([ANSWER, QUESTION], "unless it is the last message"),
    "arguments": ([calling(said("add", "{a: 3"))], "the arguments of add are no JSON"),
    "no name": ([calling({"function": {"arguments": {}}})], "is no call with a name"),
    "a stop tool in the middle": (
        [calling(said("final_answer", {"answer": "7"})), reply("ok"), ANSWER],
        "it calls a stop tool, and the conversation goes on",
    ),
    "a tool that the model is not shown": (
        [calling(said("ad", {"a": 3})), reply("7"), ANSWER],
        "turn 0: it calls the tool 'ad', which the model is not shown (did you mean 'add'?); its "
        "tools are: add, final_answer; add the tool to `tools` of the run, or of the row",
    ),
    "what the template cannot show": (
        [{**ANSWER, "reasoning_content": "Well."}],
        "turn 0: the chat template renders it as",
    ),
    "a call in the text": (
        [{"role": "assistant", "content": '<tool_call>\n{"name": "add"}\n</tool_call>'}],
        "which is read as",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_conversation_that_no_rollout_could_be_is_refused(name: str) -> None:
    messages, problem = BAD[name]
    with pytest.raises(BadDemonstration) as caught:
        demonstrate(*messages)
    assert str(caught.value).startswith("task row-1: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("family", "source"),
    [(name, s) for name, f in families().items() if f.tools for s in f.originals or ("gemma3",)],
)
@given(user=texts, conversation=conversations())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_every_familys_completions_are_read_as_what_was_demonstrated(
    family: str, source: str, user: str, conversation: Conversation
) -> None:
    chat = small(family, source)
    messages: list[Message] = [{"role": "user", "content": user}]
    for number, (turn, replies) in enumerate(conversation):
        after = messages[-1]["role"]
        shown, answered = chat.as_rendered(as_parsed(chat, turn, after), replies)
        ids = completion_ids(chat, messages, EXAMPLE_TOOLS, shown)
        assert ids[-1] in chat.stop_token_ids
        parsed = chat.parse(ids, EXAMPLE_TOOLS, turn=number, after=after)
        assert [(c.name, c.arguments, c.malformed) for c in parsed.calls] == [
            (c.name, c.arguments, None) for c in shown.calls
        ]
        if not shown.calls:
            assert parsed.content == shown.content
        messages += [shown.message(), *answered]


def test_a_turn_that_does_not_continue_its_prompt_is_refused() -> None:
    """DeepSeek-R1's prompt ends with <think>, and a turn without a thought has none."""
    chat = small("deepseek-r1", "deepseek_r1_distill")
    turn = AssistantTurn(content="7", reasoning=None, calls=())
    with pytest.raises(ChatError, match="does not continue the prompt"):
        completion_ids(chat, [QUESTION], (), turn)
