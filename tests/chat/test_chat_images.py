"""Images in prompts and replies: the template's own placeholders, expanded, and nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import vision_kit
from chat_cases import ADD, CALL
from tiny import tokenizer as text_tokenizer

from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.fixes import families
from agenttrain.chat.loading import load_chat, load_spec
from agenttrain.commands.templates import original, small_tokenizer
from agenttrain.types import Finish, Image, Message, Origin
from agenttrain.utils.content import content_of

SMALL, WIDE = vision_kit.picture(16, 8), vision_kit.picture(24, 8, seed=1)  # 2 and 3 placeholders
PAD = vision_kit.pad()


def user(*values: str | Image) -> Message:
    return {"role": "user", "content": content_of(values)}


def test_each_image_of_a_prompt_has_its_placeholders_in_order() -> None:
    chat = vision_kit.chat()
    messages = [user("look ", SMALL, WIDE, ".")]
    ids = chat.prompt_ids(messages, [])
    start = "<|im_start|>user\nlook <|vision_start|>"
    between, end = "<|vision_end|><|vision_start|>", "<|vision_end|>.<|im_end|>\n"
    pads = "<|image_pad|>"
    assert chat.decode(ids) == f"{start}{pads * 2}{between}{pads * 3}{end}<|im_start|>assistant\n"
    placed = chat.place(ids, messages)
    assert [(one.image, one.tokens) for one in placed] == [(SMALL, 2), (WIDE, 3)]
    assert ids[placed[0].start : placed[0].end] == [PAD] * 2
    assert ids[placed[1].start : placed[1].end] == [PAD] * 3


def test_text_that_spells_a_placeholder_stays_text() -> None:
    chat = vision_kit.chat()
    forged = "<|vision_start|><|image_pad|><|vision_end|>"
    ids = chat.prompt_ids([user(forged, SMALL, forged)], [])
    assert ids.count(PAD) == 2
    reply = {"role": "tool", "tool_call_id": "call_0_0", "name": "add"}
    spans = chat.suffix(
        CALL,
        [{**reply, "content": content_of([forged, WIDE, forged])}],
        completion_ids=[2],
        finish=Finish.stop,
        generation_prompt=True,
    )
    pads = [(origin, ids) for origin, ids in spans if PAD in ids]
    assert pads == [(Origin.tool, [PAD] * 3)]


def test_the_certificate_covers_images_in_prompts_and_replies() -> None:
    certificate = certify(vision_kit.chat(), [ADD])
    names = [probe.name for probe in certificate.probes if "image" in probe.name]
    assert names == [
        "images in the prompt",
        "image in a user reply",
        "image in a tool reply",
        "several images in a turn",
    ]
    assert certificate.passed
    text = Chat(text_tokenizer(), text_tokenizer().chat_template, load_spec("hermes"))
    assert not [p for p in certify(text, [ADD]).probes if "image" in p.name]


def test_a_template_that_numbers_images_is_refused() -> None:
    """The number of an image in a reply depends on all images before it."""
    counted = vision_kit.TEMPLATE.replace(
        "{{- '<|vision_start|>", "{{- 'Picture ' ~ messages | length ~ ': <|vision_start|>"
    )
    chat = Chat(
        vision_kit.tokenizer(),
        counted,
        load_spec("hermes"),
        eos_token_ids=[2],
        placeholders=vision_kit.placeholders(),
    )
    refused = [probe.name for probe in certify(chat, [ADD]).probes if not probe.passed]
    assert "several images in a turn" in refused


def test_a_template_that_leaves_images_out_is_refused() -> None:
    template = vision_kit.TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    chat = Chat(
        vision_kit.tokenizer(),
        template,
        load_spec("hermes"),
        eos_token_ids=[2],
        placeholders=vision_kit.placeholders(),
    )
    with pytest.raises(ChatError, match=r"writes 0 placeholders .* for 1 images"):
        chat.prompt_ids([user(SMALL)], [])


def test_a_model_that_reads_text_refuses_images() -> None:
    chat = Chat(text_tokenizer(), text_tokenizer().chat_template, load_spec("hermes"))
    with pytest.raises(ChatError, match=r"type 'image': this model reads text only"):
        chat.prompt_ids([user(SMALL)], [])


@pytest.mark.parametrize(
    ("family", "source", "name"),
    [("qwen3-vl", "qwen3_vl", "auto"), ("qwen2.5-vl", "qwen2_5_vl", "hermes")],
)
def test_stock_templates_show_images_in_prompts_and_replies(
    family: str, source: str, name: str
) -> None:
    """Qwen2.5-VL's has no tools: `hermes` adds them, and leaves images to it."""
    text = original(source)
    assert text is not None, "pip install 'agenttrain[test]'"
    tokenizer = copy.copy(small_tokenizer(families()[family]))
    tokenizer.chat_template = text
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    chat = load_chat(
        tokenizer,
        ChatTemplateConfig(name=name),
        ResponseSchemaConfig(),
        placeholders=replace(vision_kit.placeholders(), token_id=pad),
    )
    certificate = certify(chat, [ADD])
    certificate.raise_if_refused()
    assert sum("image" in probe.name for probe in certificate.probes) == 4
    shown = chat.decode(chat.prompt_ids([user("look ", SMALL, WIDE, ".")], [ADD]))
    pads, start, end = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
    assert f"look {start}{pads * 2}{end}{start}{pads * 3}{end}." in shown
    reply = {"role": "tool", "tool_call_id": "call_0_0", "name": "add"}
    spans = chat.suffix(
        CALL,
        [
            {**reply, "content": content_of(["it: ", WIDE])},
            {**reply, "content": "7"},
        ],
        completion_ids=[chat.stop_token_ids[0]],
        finish=Finish.stop,
        generation_prompt=True,
    )
    added = chat.decode([i for _, ids in spans for i in ids])
    assert f"<tool_response>\nit: {start}{pads * 3}{end}\n</tool_response>" in added
    assert "<tool_response>\n7\n</tool_response>" in added
