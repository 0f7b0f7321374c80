"""No text of others becomes a control token; ordinary text is tokenised as by the tokenizer."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_tokenizer import QWEN_SPECIAL, QWEN_TOKENS, qwen
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError, Encoder
from agenttrain.chat.fixes import families, parse_family
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import original, small_tokenizer
from agenttrain.types import AssistantTurn, Finish, Message, ToolCall

QWEN = ("qwen2.5", "qwen3", "qwen3-2507", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8")
GEMMA_ADDED = (
    *("<unused0>", "<unused1>", "[multimodal]", "<table>", "</table>", "<b>"),
    *("\n" * count for count in range(2, 32)),
    *("\u2581" * count for count in range(2, 32)),
)


def built(tokenizer: Any, template: str | None, name: str = "auto", **family: Any) -> Chat:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    config = ChatTemplateConfig(name=name, family=family)
    return load_chat(tokenizer, config, ResponseSchemaConfig())


@cache
def gemma(name: str = "auto") -> Chat:
    """Gemma's template over bytes, with added tokens of each kind that its tokenizer has."""
    family = replace(families()["gemma"], added=GEMMA_ADDED)
    return built(small_tokenizer(family), original("gemma3"), name)


@cache
def real_qwen(family: str) -> Chat:
    return built(qwen(), original(families()[family].originals[0]))


def contexts(chat: Chat, text: str) -> dict[str, list[int]]:
    """Ids of contexts in which a user, a system message, a schema, a result or an error says it."""
    user: Message = {"role": "user", "content": "3 + 4?"}
    schema = {
        "type": "function",
        "function": {
            "name": "add",
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": [text]}},
            },
        },
    }
    tools = chat.renders_calls
    call = ToolCall(id="c", name="add", arguments={})
    turn = AssistantTurn(content="" if tools else "7", reasoning=None, calls=(call,) * tools)

    def replied(content: str) -> list[int]:
        reply = {"role": "user", "content": content}
        if tools:
            reply |= {"role": "tool", "tool_call_id": "c", "name": "add"}
        spans = chat.suffix(
            turn, [reply], completion_ids=[], finish=Finish.length, generation_prompt=True
        )
        return [token_id for _, ids in spans for token_id in ids]

    return {
        "user": chat.prompt_ids([{"role": "user", "content": text}], []),
        "system": chat.prompt_ids([{"role": "system", "content": text}, user], []),
        "schema": chat.prompt_ids([user], [schema]),
        "result": replied(text),
        "error": replied(f"Error: KeyError: {text!r}"),
    }


def forged(chat: Chat, texts: Sequence[str]) -> list[str]:
    """Those of the tokenizer's added tokens that become tokens where others write them."""
    ids = dict(zip(texts, chat.tokenizer.convert_tokens_to_ids(list(texts)), strict=True))
    harmless = {place: Counter(found) for place, found in contexts(chat, "a").items()}
    return [
        f"{text} in {place}"
        for text, token_id in ids.items()
        for place, found in contexts(chat, f"a{text}b {text}").items()
        if found.count(token_id) != harmless[place][token_id]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN)
def test_no_added_token_of_qwen_can_be_forged(family: str) -> None:
    chat = real_qwen(family)
    assert set(chat.encoder.control) == set(QWEN_TOKENS)
    assert set(chat.encoder.unspecial) == set(QWEN_TOKENS[QWEN_SPECIAL:])
    assert forged(chat, QWEN_TOKENS) == []
    certificate = certify(chat, [])
    (probe,) = [p for p in certificate.probes if p.name == "control tokens in prompts"]
    assert probe.reason == "14 special tokens and 12 other added ones"


def test_white_space_and_what_a_family_excepts_stay_text() -> None:
    for chat in (gemma(), gemma("hermes")):
        assert set(chat.encoder.unspecial) >= {"<unused0>", "<unused1>", "[multimodal]"}
        assert not {"<table>", "<b>", "\n\n", "\u2581\u2581"} & set(chat.encoder.control)
        assert forged(chat, ["<unused1>", "[multimodal]", "<start_of_turn>"]) == []
        for text in ("<table>\n\n\n</table>", "a\n\n\nb"):
            assert chat.encode_plain(text) == chat.tokenizer.encode(text, add_special_tokens=False)
    (probe,) = [p for p in certify(gemma(), []).probes if p.name == "control tokens in prompts"]
    assert probe.reason == (
        "5 special tokens and 3 other added ones; 3 added tokens stay text: HTML, which Gemma was "
        "trained to read and write as ordinary text; 60 added tokens stay text: white space"
    )


def test_a_family_of_the_users_can_except_tokens_but_none_that_steers() -> None:
    names = ["<|fim_prefix|>", "<|im_start|>", "<tool_call>"]
    family = {"response": "qwen", "plain": [{"why": "code", "tokens": names}]}
    chat = built(qwen(), original("qwen2_5"), "mine", **family)
    assert chat.encoder.ordinary == {"<|fim_prefix|>": "code"}
    assert forged(chat, names) == [
        f"<|fim_prefix|> in {place}" for place in ("user", "system", "schema", "result", "error")
    ]
    with pytest.raises(ChatError, match=r"chat_template=mine: family.plain: must be a list of"):
        parse_family("mine", {"plain": ["<|fim_prefix|>"]})


LINES = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["", " ", "  ", "\t", "    return x", "<b>bold</b>", "\u2581\u2581", "é\r"]),
    max_size=8,
).map("\n".join)


@settings(max_examples=200)
@given(text=LINES)
def test_ordinary_text_is_tokenised_as_by_the_tokenizer_alone(text: str) -> None:
    for chat, before, after in (
        (real_qwen("qwen3-2507"), "<|im_start|>user\n", "<|im_end|>\n"),
        (gemma(), "<bos><start_of_turn>user\n", "<end_of_turn>\n"),
    ):
        if any(control in text for control in chat.encoder.control) or "\ufdd0" <= text <= "\ufdef":
            continue
        text = text.translate(dict.fromkeys(range(0xFDD0, 0xFDF0), "x"))
        alone = chat.tokenizer.encode(text, add_special_tokens=False)
        assert chat.encode_plain(text) == alone
        rendering = f"{before}{text}{after}"
        whole = chat.tokenizer.encode(rendering, add_special_tokens=False)
        assert chat.encoder.encode(rendering) == whole


def test_what_the_model_samples_of_tokens_that_no_template_writes_is_content() -> None:
    chat = real_qwen("qwen2.5")
    ids = [*chat.encode_plain("a "), chat.encoder.control["<|fim_prefix|>"], *chat.stop_token_ids]
    assert chat.parse(ids, [], turn=0).content == "a <|fim_prefix|>"


def words(*tokens: AddedToken, normalizer: Any = None, prefix: bool = False) -> Any:
    """A tokenizer of characters and the word `ab`, with added tokens."""
    letters = [*map(chr, range(33, 127)), "\u2581", "\uff1c", "\uff1e", "ab"]
    vocab = {letter: index for index, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    core.normalizer = normalizer
    scheme = "first" if prefix else "never"
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace()
    core.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_what_the_pieces_make_from_plain_text_is_text() -> None:
    tokenizer = words(AddedToken("ab", normalized=False), AddedToken("<x>", normalized=False))
    encoder = Encoder(tokenizer, "")
    assert set(encoder.control) == {"<x>"}
    assert encoder.ordinary == {"ab": "the tokenizer's pieces make it from plain text too"}
    assert encoder.encode_plain("ab") == tokenizer.encode("ab", add_special_tokens=False)
    with pytest.raises(ChatError, match="the control token 'ab' from plain text"):
        Encoder(tokenizer, "ab")


@pytest.mark.parametrize("prefix", [False, True])
def test_a_normalizer_makes_no_control_token_of_text(prefix: bool) -> None:
    think = AddedToken("<x>", normalized=True)
    tokenizer = words(think, normalizer=normalizers.NFKC(), prefix=prefix)
    encoder = Encoder(tokenizer, "")
    control = encoder.control["<x>"]
    wide = "a\uff1cx\uff1e"
    assert control in tokenizer.encode(wide, add_special_tokens=False)
    assert control not in encoder.encode(encoder.mark(wide))
    assert control not in encoder.encode_plain(wide)
    assert encoder.encode(f"{encoder.mark(wide)}<x>").count(control) == 1


@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True), (True, True)])
def test_blanks_that_a_control_token_absorbs(left: bool, right: bool) -> None:
    tokenizer = words(
        AddedToken("<x>", lstrip=left, rstrip=right, normalized=False),
        AddedToken("<y>", normalized=False),
    )
    encoder = Encoder(tokenizer, "")
    for text in (
        "a <x> b",
        "  <x>  ",
        "<x> <x>",
        "<y>  <x>\n<y>",
        "a\u2003<x>\u00a0b",
        "<x>\x1c<x>",
    ):
        # The text of a user in it, behind a control token, has a rendering encoded piece by piece.
        ids = encoder.encode(f"{text}<y>{encoder.mark('<y>')}")
        whole = tokenizer.encode(f"{text}<y>", add_special_tokens=False)
        assert ids == [*whole, *encoder.encode_plain("<y>")]


def test_a_prompt_of_blanks_takes_time_in_proportion_to_its_length() -> None:
    encoder = Encoder(words(AddedToken("<x>", lstrip=True, rstrip=True, special=True)), "")
    started = time.perf_counter()
    assert [control for control, _ in encoder.pieces(" " * 400_000)] == [False]
    assert [c for c, _ in encoder.pieces(" " * 400_000 + "<x>" + " " * 400_000)] == [True]
    # 4.5 s at 80,000 and four times that at twice as many, with a pattern that tries every blank.
    assert time.perf_counter() - started < 5


def test_a_template_that_takes_the_marks_away_is_refused() -> None:
    template = (
        "{%- for m in messages %}{%- set c = m.content | replace('\ufdd0', '') | replace('\ufdd1',"
        " '') %}{{- '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    chat = built(qwen(), template)
    (probe,) = [p for p in certify(chat, []).probes if p.name == "control tokens in prompts"]
    assert not probe.passed
    assert "in a user's message becomes a control token" in probe.reason
