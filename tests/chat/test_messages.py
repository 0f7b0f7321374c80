"""Messages as datasets and clients write them: their normal form, and those a template drops."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.fixes import families
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import EXAMPLE_TOOLS, original, small_tokenizer
from agenttrain.data.tasks import to_task
from agenttrain.runs.teacher import teacher_prompt
from agenttrain.types import AssistantTurn, Finish, Message, Rollout, Task
from agenttrain.utils.messages import normal_message

FAMILIES = [name for name, family in families().items() if family.originals]


@cache
def chat_of(family: str, **template: Any) -> Chat:
    tokenizer = copy.copy(small_tokenizer(families()[family]))
    tokenizer.chat_template = original(families()[family].originals[0])
    return load_chat(tokenizer, ChatTemplateConfig(**template), ResponseSchemaConfig())


def prompt(family: str, messages: list[Message]) -> str:
    chat = chat_of(family)
    tools = EXAMPLE_TOOLS if families()[family].tools else ()
    return chat.decode(chat.prompt_ids(messages, tools))


def history(arguments: Any) -> list[Message]:
    call = {"id": "abcdefghi", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
    ]


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]


@pytest.mark.parametrize(
    ("calls", "normal"),
    [
        (None, None),
        ([], None),
        ('[{"function": {"name": "add", "arguments": "{\\"a\\": 3}"}}]', CALLS),
        ([{"function": {"name": "add", "arguments": '{"a": 3}'}}], CALLS),
        ([{"function": {"name": "add", "arguments": '"{\\"a\\": 3}"'}}], CALLS),
        ([{"name": "add", "arguments": '{"a": 3}'}], CALLS),
        ([{"name": "add", "parameters": {"a": 3}}], CALLS),
        (
            [{"id": "x", "function": {"name": "add", "arguments": " "}}],
            [{"type": "function", "id": "x", "function": {"name": "add", "arguments": {}}}],
        ),
    ],
)
def test_one_form_of_calls(calls: Any, normal: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    wanted: Message = {"role": "assistant", "content": ""}
    wanted |= {} if normal is None else {"tool_calls": normal}
    assert normal_message(message) == wanted
    row = {"messages": [{"role": "user", "content": "q"}, message]}
    assert to_task(row, 0).messages[1] == wanted


@pytest.mark.parametrize("calls", ["{", [3], [{"function": {}}], CALLS[0], 5])
def test_calls_that_cannot_be_read(calls: Any) -> None:
    row = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}
    with pytest.raises(ValueError, match=r"data row 7: .*tool_calls"):
        to_task(row, 7)


@pytest.mark.parametrize("arguments", ["{", "[1]", [1], 3])
def test_arguments_that_are_no_object(arguments: Any) -> None:
    with pytest.raises(ChatError, match="role assistant: the arguments of add"):
        prompt("qwen3", history(arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_may_be_json_text_and_lists_of_calls_empty(family: str) -> None:
    answered: list[Message] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]
    plain = prompt(family, answered)
    answered[1] = {**answered[1], "tool_calls": []}
    assert prompt(family, answered) == plain
    if families()[family].tools:
        assert prompt(family, history('{"a": 3, "b": 4}')) == prompt(
            family, history({"a": 3, "b": 4})
        )


ASKED: Message = {"role": "user", "content": "hello"}
ANSWERED: Message = {"role": "assistant", "content": "fine"}
TEXT_BESIDE = history({"a": 3})
TEXT_BESIDE[1] = {**TEXT_BESIDE[1], "content": "Let me see"}


@pytest.mark.parametrize(
    ("family", "messages", "index", "remedy"),
    [
        ("llama3.1", TEXT_BESIDE, 1, "remove the text beside its calls"),
        ("gpt-oss", [ASKED, ANSWERED, {"role": "system", "content": "brief"}, ASKED], 2, "first"),
        ("qwen3-vl", [ASKED, {"role": "system", "content": "hello"}, ASKED], 1, "first message"),
        ("gemma4", [ASKED, {"role": "tool", "content": "7 it is"}, ASKED], 1, "its call before it"),
        ("qwen3", [{"role": "narrator", "content": "a question"}], 0, "system, user, assistant"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    family: str, messages: list[Message], index: int, remedy: str
) -> None:
    role = messages[index]["role"]
    for _ in range(2):  # the second time its places are known
        with pytest.raises(ChatError) as raised:
            prompt(family, messages)
        assert f"messages[{index}]" in str(raised.value)
        assert f"role {role}" in str(raised.value)
        assert remedy in str(raised.value)
    chat = chat_of(family)
    assert chat.rendered_ids(messages, ())
    with pytest.raises(ChatError, match=rf"messages\[{index}\]"):
        chat.check_places(messages, ())


def test_a_teacher_reads_a_history_whose_texts_the_template_leaves_out() -> None:
    task = Task(task_id="0", messages=tuple(TEXT_BESIDE), columns={"hint": "seven"})
    rollout = Rollout(task=task, rollout_id="r")
    (trajectory,) = rollout.trajectories
    trajectory.messages, trajectory.prompt_messages = [*TEXT_BESIDE], len(TEXT_BESIDE)
    chat = chat_of("llama3.1")
    prompt_ids = teacher_prompt("It is {{ hint }}", chat, lambda task: [])
    assert prompt_ids is not None
    assert "It is seven" in chat.decode(prompt_ids(rollout, trajectory))


def test_a_later_part_that_the_template_leaves_out_is_refused() -> None:
    tokenizer = copy.copy(small_tokenizer(families()["chatml"]))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if m.content is "
        "string else m.content[0].text) + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert "first" in chat.decode(chat.prompt_ids([{**ASKED, "content": parts[:1]}], ()))
    with pytest.raises(ChatError, match=r"messages\[0\]"):
        chat.prompt_ids([{**ASKED, "content": parts}], ())


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen2.5-vl"])
def test_calls_that_the_template_leaves_out_are_refused(family: str) -> None:
    with pytest.raises(ChatError, match=r"messages\[1\].*leaves out the calls"):
        prompt(family, history({"a": 3, "b": 4}))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "value": "a question"},
        {"role": "user", "content": None},
        {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
    ],
)
def test_a_message_whose_text_stands_under_another_key(message: Message) -> None:
    with pytest.raises(ValueError, match="has no `content`"):
        to_task({"messages": [message]}, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("role", "usual"), [("human", "user"), ("User", "user"), ("developer", "system")]
)
def test_other_names_of_roles_where_the_template_has_none(
    family: str, role: str, usual: str
) -> None:
    messages: list[Message] = [{"role": role, "content": "a question"}]
    messages += [ASKED] if usual == "system" else []
    try:
        wanted = prompt(family, [{**messages[0], "role": usual}, *messages[1:]])
    except ChatError:  # Gemma has no system message at all
        with pytest.raises(ChatError, match=usual if role != "developer" else "developer"):
            prompt(family, messages)
        return
    shown = prompt(family, messages)
    assert "a question" in shown
    # A template that renders any role as it is has this one too.
    assert usual == "system" or shown == wanted or role in shown


def test_roles_of_the_setting_are_always_replaced() -> None:
    chat = chat_of("chatml")
    messages: list[Message] = [{"role": "human", "content": "hello"}]
    assert "<|im_start|>human" in chat.decode(chat.prompt_ids(messages, ()))
    chat = load_chat(
        chat.tokenizer, ChatTemplateConfig(roles={"human": "user"}), ResponseSchemaConfig()
    )
    assert chat.prompt_ids(messages, ()) == chat.prompt_ids([ASKED], ())


def test_a_row_whose_places_are_known_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("qwen3")
    chat.prompt_ids([{"role": "system", "content": "brief"}, ASKED], ())
    rendered = []
    render = Chat.render
    monkeypatch.setattr(
        Chat, "render", lambda self, *a, **k: rendered.append(1) or render(self, *a, **k)
    )
    chat.prompt_ids([{"role": "system", "content": " long\n"}, {**ASKED, "content": '"é"'}], ())
    chat.check_places([{"role": "system", "content": "x"}, ASKED], ())
    assert len(rendered) == 1


@pytest.mark.parametrize("name", ["gemma", "llama3.1", "gpt-oss", "lfm2.5", "qwen3.6"])
def test_a_named_family_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ChatError, match=f"chat_template={name}: "):
        chat_of("qwen2.5", name=name)


def test_roles_of_the_setting_hold_behind_a_turn() -> None:
    chat = chat_of("chatml")
    chat = load_chat(
        chat.tokenizer, ChatTemplateConfig(roles={"user": "human"}), ResponseSchemaConfig()
    )
    turn = AssistantTurn(content="hello", reasoning=None, calls=())
    ids = [*chat.encoder.encode("hello"), *chat.stop_token_ids[:1]]
    suffix = chat.suffix(
        turn, [ASKED], completion_ids=ids, finish=Finish.stop, generation_prompt=True
    )
    text = chat.decode([token for _, part in suffix for token in part])
    assert "human" in text and "user" not in text
