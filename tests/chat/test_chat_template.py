from __future__ import annotations

import json

import pytest
from chat_cases import ADD, CALL, CALL_IDS, CALL_TEXT, EOS, TEMPLATES, chat, replies
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokenizer

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError, Encoder
from agenttrain.chat.loading import load_spec
from agenttrain.types import AssistantTurn, Finish, Message, Origin, ToolCall

TEMPLATE, TOOL = Origin.template, Origin.tool
CONTROL = list(chat().encoder.control)


def suffix(
    name: str,
    turn: AssistantTurn,
    messages: list[Message],
    sampled: list[int],
    finish: Finish = Finish.stop,
    generation_prompt: bool = True,
) -> list[tuple[Origin, list[int]]]:
    return chat(name).suffix(
        turn,
        messages,
        completion_ids=sampled,
        finish=finish,
        generation_prompt=generation_prompt,
    )


def flat(spans: list[tuple[Origin, list[int]]]) -> list[int]:
    return [token for _, ids in spans for token in ids]


def test_prompt_ids() -> None:
    ids = chat().prompt_ids([{"role": "user", "content": "3 + 4?"}], [ADD])
    assert ids == [
        # <s> system \n Tools  :\n  add   (a   ,   ␣b   )  </s> \n
        *(1, 315, 205, 311, 286, 278, 283, 18, 306, 15, 2, 205),
        # <s> user  \n   3   ␣+  ␣    4   ?  </s> \n  <s> assistant \n
        *(1, 274, 205, 25, 305, 227, 26, 37, 2, 205, 1, 281, 205),
    ]


def test_suffix_begins_with_the_separator_after_eos() -> None:
    assert suffix("eos", CALL, replies("7"), CALL_IDS) == [
        #          \n <s> user  \n <tr> \n
        (TEMPLATE, [205, 1, 274, 205, 5, 205]),
        #       7
        (TOOL, [29]),
        #          \n </tr> </s> \n <s> assistant \n
        (TEMPLATE, [205, 6, 2, 205, 1, 281, 205]),
    ]


def test_two_replies_are_one_user_turn_and_merge_with_the_glue() -> None:
    turn = AssistantTurn(content="", reasoning=None, calls=CALL.calls * 2)
    assert suffix("eos", turn, replies("7", "8\n"), CALL_IDS) == [
        #          \n <s> user  \n <tr> \n
        (TEMPLATE, [205, 1, 274, 205, 5, 205]),
        (TOOL, [29]),
        #          \n </tr> \n <tr> \n
        (TEMPLATE, [205, 6, 205, 5, 205]),
        #       8  \n\n: the reply's newline and the glue's are one token
        (TOOL, [30, 276]),
        #         </tr> </s> \n <s> assistant \n
        (TEMPLATE, [6, 2, 205, 1, 281, 205]),
    ]


def test_a_token_of_glue_and_reply_is_the_tools() -> None:
    spans = suffix("eos", CALL, replies("\n\n7"), CALL_IDS)
    #                              \n <s> user  \n <tr>
    assert spans[0] == (TEMPLATE, [205, 1, 274, 205, 5])
    #                         \n\n  \n  7: the glue's newline and the reply's first are one token
    assert spans[1] == (TOOL, [276, 205, 29])


def test_control_token_text_in_a_reply_stays_text() -> None:
    assert suffix("eos", CALL, replies("<|im_end|>"), CALL_IDS) == [
        (TEMPLATE, [205, 1, 274, 205, 5, 205]),
        #        <   |   i   m   _   e   n   d   |   >
        (TOOL, [34, 98, 79, 83, 69, 75, 84, 74, 98, 36]),
        (TEMPLATE, [205, 6, 2, 205, 1, 281, 205]),
    ]


def test_control_token_text_in_a_prompt_stays_text() -> None:
    prompt = chat().prompt_ids([{"role": "user", "content": "<|im_end|>"}], [])
    assert prompt == [
        # <s> user  \n   <   |   i   m   _   e   n   d   |   >
        *(1, 274, 205, 34, 98, 79, 83, 69, 75, 84, 74, 98, 36),
        # </s> \n <s> assistant \n
        *(2, 205, 1, 281, 205),
    ]
    schema = {"type": "function", "function": {**ADD["function"], "name": "<|im_end|>"}}
    ids = chat().prompt_ids([{"role": "user", "content": "u"}], [schema])
    assert ids.count(EOS) == 2  # after the tools and after the user


def test_marks_that_the_assistant_wrote_are_tokens_but_not_its_end() -> None:
    said = {"role": "assistant", "content": CALL_TEXT + "<|im_end|>"}
    ids = chat().prompt_ids([{"role": "user", "content": "u"}, said], [])
    # <tool_call> and </tool_call> once each; </s> after the user and after the assistant only
    assert [ids.count(token) for token in (3, 4, EOS)] == [1, 1, 2]


@pytest.mark.parametrize("finish", [Finish.length, Finish.abort])
def test_a_cut_completion_gets_its_end_of_turn_as_template(finish: Finish) -> None:
    spans = suffix("eos", CALL, replies("7"), CALL_IDS[:-1], finish)
    #                           </s> \n <s> user  \n <tr> \n
    assert spans[0] == (TEMPLATE, [2, 205, 1, 274, 205, 5, 205])
    assert spans[1:] == suffix("eos", CALL, replies("7"), CALL_IDS)[1:]


def test_another_stop_token_does_not_end_the_turn() -> None:
    other = [*CALL_IDS[:-1], 0]
    #                                                                   </s> \n
    assert suffix("eos", CALL, replies("7"), other)[0][1][:2] == [EOS, 205]


@pytest.mark.parametrize(
    ("name", "stops", "end", "glue"),
    [
        #                  </e>      \n <s> user  \n <tr> \n
        ("other", (2, 0), [0], [205, 1, 274, 205, 5, 205]),
        #                 <s>     user  \n <tr> \n
        ("none", (2, 1), [1], [274, 205, 5, 205]),
        #                 \n </s>     <s> user  \n <tr> \n
        ("blank", (2,), [205, 2], [1, 274, 205, 5, 205]),
    ],
)
def test_ends_of_turn_other_than_eos(
    name: str, stops: tuple[int, ...], end: list[int], glue: list[int]
) -> None:
    assert chat(name).stop_token_ids == stops
    assert chat(name).end_ids(CALL, replies("7"), generation_prompt=True) == tuple(end)
    ended = suffix(name, CALL, replies("7"), [*CALL_IDS[:-1], *end])
    cut = suffix(name, CALL, replies("7"), CALL_IDS[:-1], Finish.length)
    assert ended[0] == (TEMPLATE, glue)
    assert cut[0] == (TEMPLATE, [*end, *glue])
    assert cut[1:] == ended[1:]


def test_turns_that_end_in_mere_text_have_no_end() -> None:
    text = TEMPLATES["none"].replace("<|im_start|>", "## ")
    subject = Chat(tokenizer(), text, load_spec("hermes"), eos_token_ids=[EOS])
    assert subject.stop_token_ids == (EOS,)
    assert subject.end_ids(CALL, replies("7"), generation_prompt=True) == ()


def test_the_last_reply_has_no_generation_prompt() -> None:
    spans = suffix("eos", CALL, replies("7"), CALL_IDS, generation_prompt=False)
    #                            \n </tr> </s> \n
    assert spans[-1] == (TEMPLATE, [205, 6, 2, 205])


def test_a_user_reply() -> None:
    turn = AssistantTurn(content="It is 7.", reasoning=None, calls=())
    spans = suffix("eos", turn, [{"role": "user", "content": "4?"}], [47, 90, EOS])
    assert spans == [
        #          \n <s> user  \n
        (TEMPLATE, [205, 1, 274, 205]),
        #       4   ?
        (TOOL, [26, 37]),
        #         </s> \n <s> assistant \n
        (TEMPLATE, [2, 205, 1, 281, 205]),
    ]


def test_the_ledger_keeps_sampled_ids_that_re_tokenise_to_fewer() -> None:
    odd = chat().encoder.encode(
        CALL_TEXT.replace(": ", "  :  ").replace('"a"  :  3', '"a"   :3') + "<|im_end|>"
    )
    turn = chat().parse(odd, [ADD], turn=0)
    assert turn.calls[0].arguments == {"a": 3, "b": 4}
    prompt: list[Message] = [{"role": "user", "content": "3 + 4?"}]
    ids = chat().prompt_ids(prompt, [ADD])
    context = flat(suffix("eos", turn, replies("7"), odd))
    naive = chat().prompt_ids([*prompt, turn.message(), *replies("7")], [ADD])
    assert len(CALL_IDS) == 25
    assert len(odd) > 25
    # A loop that renders what it parsed gets back the canonical 25 and is that much shorter.
    assert len(naive) == len(ids) + 25 + len(context)
    assert naive[-len(context) :] == context


@pytest.mark.parametrize("name", ["trim", "tojson"])
def test_replies_that_the_template_changes(name: str) -> None:
    text = ' \n"7"\t<|im_end|> é '
    messages: list[Message] = [{"role": "user", "content": "u"}, CALL.message(), *replies(text)]
    full = chat(name).prompt_ids(messages, [ADD])
    spans = suffix(name, CALL, replies(text), CALL_IDS)
    assert full[-len(flat(spans)) :] == flat(spans)
    # The reply's last blank and the closing quote are one token.
    shown = {"trim": text.strip(), "tojson": json.dumps(text, ensure_ascii=False)[1:]}
    assert chat().decode(spans[1][1]) == shown[name]


def test_a_reply_that_changes_the_glue_is_refused() -> None:
    template = TEMPLATES["eos"].replace("'\\n</tool_response>'", "m.content + '</tool_response>'")
    broken = Chat(tokenizer(), template, load_spec("hermes"), eos_token_ids=[EOS])
    with pytest.raises(ChatError, match="does not show each of 1 replies once"):
        broken.suffix(
            CALL, replies("7"), completion_ids=[EOS], finish=Finish.stop, generation_prompt=True
        )


def test_images_are_refused() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    with pytest.raises(ChatError, match="part of type 'image': this model reads text only"):
        chat().prompt_ids([message], [])


def test_the_template_refuses_in_words() -> None:
    with pytest.raises(ChatError, match=r"roles \['user'\]"):
        chat().prompt_ids([{"role": "user"}], [])


def test_plain_rendering_is_the_tokenizers_own() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "what is 3 + 4?\n"},
        CALL.message(),
        *replies(" 7", "é\n"),
    ]
    expected = tokenizer().apply_chat_template(
        messages, tools=[ADD], add_generation_prompt=True, return_dict=False
    )
    assert chat().prompt_ids(messages, [ADD]) == expected


def test_a_tokenizer_that_makes_control_tokens_from_text_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"[end]": 0, "[unk]": 1}, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    forgeable = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[end]")
    with pytest.raises(ChatError, match=r"'\[end\]' from plain text"):
        Encoder(forgeable, "")


# Random conversations. What an assistant writes begins with a letter: a leading blank would merge
# with the generation prompt in a full rendering, which is what the ledger does not do.
blanks = st.sampled_from(["", " ", "\n", " \n\n", "\t"])
fragments = st.sampled_from(
    [*CONTROL, "7", " é", "東京", "🙂", "\n", "  ", '{"a": 1}', "\\", "\ufdd0"]
)
texts = st.one_of(st.text(max_size=12), st.lists(fragments, max_size=6).map("".join))
words = st.from_regex(r"[A-Za-z][A-Za-z0-9 ,.é東]{0,12}", fullmatch=True).map(str.strip)
arguments = st.dictionaries(words, st.one_of(st.integers(), words, st.booleans()), max_size=2)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[AssistantTurn, list[Message]]]:
    conversation = []
    for number in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 3))
        calls = tuple(
            ToolCall(id=f"call_{number}_{i}", name="add", arguments=draw(arguments))
            for i in range(count)
        )
        content = draw(words) if count == 0 or draw(st.booleans()) else ""
        turn = AssistantTurn(content=content, reasoning=None, calls=calls)
        answers = replies(*(draw(texts) for _ in calls))
        conversation.append((turn, answers or [{"role": "user", "content": draw(texts)}]))
    return conversation


def canonical(turn: AssistantTurn) -> str:
    """The text of a turn as the templates of the tests render it."""
    calls = [
        '<tool_call>\n{"name": "add", "arguments": '
        + json.dumps(call.arguments, ensure_ascii=False)
        + "}\n</tool_call>"
        for call in turn.calls
    ]
    return "\n".join([turn.content] * bool(turn.content) + calls)


@pytest.mark.parametrize("name", list(TEMPLATES))
@given(user=texts, conversation=steps())
@settings(max_examples=40)
def test_the_ledger_is_the_full_rendering(
    name: str, user: str, conversation: list[tuple[AssistantTurn, list[Message]]]
) -> None:
    subject = chat(name)
    messages: list[Message] = [{"role": "user", "content": user}]
    ledger = subject.prompt_ids(messages, [ADD])
    for number, (turn, answers) in enumerate(conversation):
        end = subject.end_ids(turn, answers, generation_prompt=True)
        text = canonical(turn) + subject.decode(end)
        sampled = tokenizer().encode(text, add_special_tokens=False)
        ledger += sampled
        assert [c.arguments for c in subject.parse(sampled, [ADD], turn=number).calls] == [
            c.arguments for c in turn.calls
        ]
        spans = suffix(name, turn, answers, sampled)
        assert all(ids for _, ids in spans)
        ledger += flat(spans)
        messages += [turn.message(), *answers]
        assert subject.prompt_ids(messages, [ADD]) == ledger


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("finish", list(Finish))
def test_wrapper_length_is_the_suffix_of_empty_replies(name: str, finish: Finish) -> None:
    turn = AssistantTurn(content="", reasoning=None, calls=CALL.calls * 2)
    length = chat(name).wrapper_length(
        turn, replies("long reply", "x"), completion_ids=CALL_IDS, finish=finish
    )
    empty = suffix(name, turn, replies("", ""), CALL_IDS, finish, True)
    assert length == len(flat(empty))


@given(text=texts)
def test_control_tokens_never_come_from_a_reply(text: str) -> None:
    control = set(chat().encoder.control.values())
    for origin, ids in suffix("eos", CALL, replies(text), CALL_IDS):
        assert origin is TEMPLATE or not control & set(ids)
    assert not control & set(chat().encode_plain(text))


@pytest.mark.parametrize(
    ("sampled", "missing"),
    [
        #  A   \n </s>: ended
        ([41, 205, 2], []),
        #  .\n </s>: ended, the line break is part of the text's last token
        ([99, 2], []),
        #  A   \n, stopped by a string: the line break is there
        ([41, 205], [2]),
        #  A, stopped by a string
        ([41], [205, 2]),
    ],
)
def test_what_is_missing_of_an_end_of_several_tokens(
    sampled: list[int], missing: list[int]
) -> None:
    turn = AssistantTurn(content="A", reasoning=None, calls=())
    spans = suffix("blank", turn, [{"role": "user", "content": "u"}], sampled)
    #                      <s>
    assert spans[0][1][: len(missing) + 1] == [*missing, 1]
