"""Images in a rollout: in its prompt, in tool replies, whole or replaced, and checked."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import parts
import pytest
import vision_kit
from parts import LIMITS, call

from agenttrain.chat.chat import Chat
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.demonstration import Demonstrator
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.tracking.pictures import with_pictures
from agenttrain.tracking.rollouts import read_rollout, read_step, write_step
from agenttrain.types import Image, LedgerError, Origin, PlacedImage, Rollout, Task, ToolError
from agenttrain.utils.content import content_of, images_in

PAD = vision_kit.pad()
SMALL, WIDE = vision_kit.picture(16, 8), vision_kit.picture(24, 8, seed=1)  # 2 and 3 placeholders
SEEN = Task(
    task_id="t", messages=({"role": "user", "content": content_of(["what is ", SMALL, "?"])},)
)


def ids(text: str) -> tuple[int, ...]:
    return tuple(vision_kit.tokenizer().encode(text, add_special_tokens=False))


def rollout(
    *answers: str, tools: Any = None, task: Task = SEEN, chat: Chat | None = None, **limits: Any
) -> tuple[Rollout, ScriptedEngine]:
    chat = chat or vision_kit.chat()
    tools = tools or parts.toolbox()
    engine = ScriptedEngine(lambda _, __, turn: ids(answers[turn]), reads_images=True)
    context = RolloutContext(
        engine=engine, chat=chat, toolbox=tools, limits=replace(LIMITS, **limits)
    )
    done = asyncio.run(run_rollout(RolloutRequest(task=task), context))
    verify(done, chat, tools.schemas(task.tools))
    return done, engine


def show(what: str) -> Any:
    """Show something.

    Args:
        what: It.
    """
    from PIL import Image as Pillow

    return {
        "picture": Pillow.fromarray(vision_kit.pixels(16, 8)),
        "array": vision_kit.pixels(16, 8),
        "file": vision_kit.file_bytes(16, 8),
        "mixed": [
            "left ",
            vision_kit.pixels(24, 8, 1),
            " right ",
            vision_kit.pixels(16, 8),
            "<|image_pad|>",
        ],
        "large": ["see: ", vision_kit.pixels(64, 64)],  # 64 placeholders
        "inside": {"image": vision_kit.pixels(16, 8)},
        "broken": vision_kit.file_bytes(64, 64)[:200],
    }[what]


def spans_of(done: Rollout) -> list[tuple[Origin, int]]:
    """(origin, number of placeholders) of the spans that know images."""
    return [(s.origin, s.token_ids.count(PAD)) for s in done.trajectories[0].spans if s.images]


TOOLS = parts.toolbox(show)


def call_of(what: str) -> str:
    return call("show", f'{{"what": "{what}"}}')


@pytest.mark.parametrize("what", ["picture", "array", "file"])
def test_a_tool_returns_an_image(what: str) -> None:
    done, engine = rollout(call_of(what), "It.<|im_end|>", tools=TOOLS)
    reply = done.trajectories[0].messages[2]
    assert reply["content"] == [{"type": "image", "image": SMALL}]
    assert done.tool_results[0].content == f"[{SMALL}]"
    assert spans_of(done) == [(Origin.prompt, 2), (Origin.tool, 2)]
    # The engine got each turn's images with the positions of their placeholders.
    assert [len(sent.images) for sent in engine.sent] == [1, 2]
    last = engine.sent[1]
    for one in last.images:
        assert [*last.ids[one.start : one.end]] == [PAD] * 2


def test_images_and_texts_of_a_reply_keep_their_order() -> None:
    done, _ = rollout(call_of("mixed"), "It.<|im_end|>", tools=TOOLS)
    contents = [
        part.get("text", part.get("image")) for part in done.trajectories[0].messages[2]["content"]
    ]
    assert contents == ["left ", WIDE, " right ", SMALL, "<|image_pad|>"]
    assert [one.image for one in done.trajectories[0].images] == [SMALL, WIDE, SMALL]
    assert spans_of(done) == [(Origin.prompt, 2), (Origin.tool, 3), (Origin.tool, 2)]
    assert not any(
        mask
        for mask, i in zip(
            done.trajectories[0].loss_mask, done.trajectories[0].own_ids, strict=True
        )
        if i == PAD
    )


def test_a_path_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "it.png").write_bytes(vision_kit.file_bytes(16, 8))

    def show() -> object:
        """Show it."""
        return tmp_path / "it.png"

    done, _ = rollout(call("show", "{}"), "It.<|im_end|>", tools=parts.toolbox(show))
    assert [one.image for one in done.trajectories[0].images] == [SMALL, SMALL]


def test_parallel_calls_show_their_images_in_call_order() -> None:
    both = call_of("mixed").removesuffix("<|im_end|>") + "\n" + call_of("array")
    done, _ = rollout(both, "It.<|im_end|>", tools=TOOLS)
    assert [one.image for one in done.trajectories[0].images] == [SMALL, WIDE, SMALL, SMALL]


def test_an_image_that_has_no_room_is_a_visible_marker() -> None:
    text = "see: [image of 64x64 pixels left out: max_result_tokens=40 is less than its 64 tokens]"
    done, _ = rollout(call_of("large"), "It.<|im_end|>", tools=TOOLS, max_result_tokens=40)
    assert done.trajectories[0].messages[2]["content"].startswith(text[:30])
    assert spans_of(done) == [(Origin.prompt, 2)]
    # 100 tokens for reply, wrapper and answer: not even the marker has all its text.
    done, _ = rollout(call_of("large"), "It.<|im_end|>", tools=TOOLS, max_completion_tokens=90)
    assert spans_of(done) == [(Origin.prompt, 2)]
    done, _ = rollout(call_of("large"), "It.<|im_end|>", tools=TOOLS)
    assert spans_of(done) == [(Origin.prompt, 2), (Origin.tool, 64)]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("inside", "Error: the tool returned a ndarray with an image inside of other values"),
        ("broken", "Error: the tool returned an image that cannot be read: it cannot be decoded"),
    ],
)
def test_what_is_no_readable_image_is_an_error_reply(what: str, text: str) -> None:
    done, _ = rollout(call_of(what), "It.<|im_end|>", tools=TOOLS)
    assert done.tool_results[0].error is ToolError.exception
    assert done.tool_results[0].content.startswith(text)


def test_a_model_that_reads_text_gets_an_error_that_is_logged_once(capsys: Any) -> None:
    done = [
        parts.rollout(call_of("array"), "It.<|im_end|>", tools=TOOLS).tool_results[0]
        for _ in range(2)
    ]
    assert [one.content for one in done] == [
        "Error: show returned an image, and this model reads text only"
    ] * 2
    assert capsys.readouterr().err.count("tool show: returns images") == 1


def test_broken_ledgers_are_refused() -> None:
    chat = vision_kit.chat()
    schemas = TOOLS.schemas(None)

    def broken(change: Any) -> str:
        done, _ = rollout(call_of("mixed"), "It.<|im_end|>", tools=TOOLS)
        trajectory = done.trajectories[0]
        change(trajectory)
        trajectory.images = tuple(
            replace(one, start=one.start + at)
            for at, span in zip(starts(trajectory), trajectory.spans, strict=True)
            for one in span.images
        )
        with pytest.raises(LedgerError) as error:
            verify(done, chat, schemas)
        return str(error.value)

    def starts(trajectory: Any) -> list[int]:
        lengths = [len(span.token_ids) for span in trajectory.spans]
        return [sum(lengths[:i]) for i in range(len(lengths))]

    def dropped(trajectory: Any) -> None:
        at = next(i for i, s in enumerate(trajectory.spans) if s.images and i)
        trajectory.spans[at] = replace(trajectory.spans[at], images=())

    def duplicated(trajectory: Any) -> None:
        at = next(i for i, s in enumerate(trajectory.spans) if s.images and i)
        twice = trajectory.spans[at].images * 2
        trajectory.spans[at] = replace(trajectory.spans[at], images=twice)

    def swapped(trajectory: Any) -> None:
        first, second = (i for i, s in enumerate(trajectory.spans) if s.images and i)
        for here, there in ((first, WIDE_OTHER), (second, SMALL_OTHER)):
            (own,) = trajectory.spans[here].images
            other = (PlacedImage(there, own.start, own.grid),)
            trajectory.spans[here] = replace(trajectory.spans[here], images=other)

    def of_another_size(trajectory: Any) -> None:
        at = next(i for i, s in enumerate(trajectory.spans) if s.images and i)
        other = (PlacedImage(vision_kit.picture(64, 8), 0, (1, 3)),)
        trajectory.spans[at] = replace(trajectory.spans[at], images=other)

    def lost_message(trajectory: Any) -> None:
        trajectory.messages[2]["content"] = "left"

    assert "7 placeholders of images, but its spans know images with 4" in broken(dropped)
    assert "its spans know images with" in broken(duplicated)
    assert "its messages hold the images" in broken(swapped)
    assert "has (1, 8) vectors, its span says (1, 3), and 3 placeholders stand there" in broken(
        of_another_size
    )
    assert "its messages hold the images" in broken(lost_message)


# Of the same sizes as WIDE and SMALL, with other pixels.
WIDE_OTHER, SMALL_OTHER = vision_kit.picture(24, 8, seed=7), vision_kit.picture(16, 8, seed=7)


def test_messages_hold_the_images_that_the_spans_know() -> None:
    done, _ = rollout(call_of("mixed"), "It.<|im_end|>", tools=TOOLS)
    (trajectory,) = done.trajectories
    shown: list[Image] = [*images_in(trajectory.messages)]
    assert shown == [one.image for one in trajectory.images]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_two_thousand_random_rollouts_break_no_ledger(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 250):
        random_rollout(seed, tmp_path)


def test_random_rollouts_break_no_ledger(tmp_path: Path) -> None:
    """0 to 4 images in random places of prompts and replies, under limits that clip and drop."""
    for seed in range(100):
        random_rollout(seed, tmp_path)


def random_rollout(seed: int, folder: Path) -> None:
    """Run a rollout whose ledger is checked, record it, and check what is read again."""
    rng = random.Random(seed)

    def mixed(most: int) -> list[str | Image]:
        """Texts with up to so many images among them."""
        texts = ["left ", " right ", "<|image_pad|>", "", "a " * rng.randint(0, 40)]
        values: list[str | Image] = [rng.choice(texts) for _ in range(rng.randint(0, 3))]
        for _ in range(rng.randint(0, most)):
            size = rng.choice([(16, 8), (24, 8), (8, 8), (32, 24)])
            picture = vision_kit.picture(*size, seed=rng.randrange(5))
            values.insert(rng.randint(0, len(values)), picture)
        return values

    def give(number: int) -> object:
        """Give something.

        Args:
            number: Its number.
        """
        return mixed(4)

    prompt = [{"role": "user", "content": content_of(["look: ", *mixed(4)])}]
    if rng.random() < 0.3:
        prompt.insert(0, {"role": "system", "content": content_of(["be ", *mixed(1)])})
    calls = "\n".join(
        call("give", f'{{"number": {n}}}').removesuffix("<|im_end|>")
        for n in range(rng.randint(1, 3))
    )
    turns = [calls + "<|im_end|>"] * rng.randint(0, 3)
    done, engine = rollout(
        *turns,
        "It.<|im_end|>",
        tools=parts.toolbox(give, stop_tools=["give"] if rng.random() < 0.1 else ()),
        task=Task(task_id="t", messages=tuple(prompt)),
        max_result_tokens=rng.choice([4, 20, 60, 200]),
        max_completion_tokens=rng.choice([60, 150, 400, 2000]),
        max_turns=5,
    )
    (trajectory,) = done.trajectories
    for sent in engine.sent:
        assert sent.images == tuple(one for one in trajectory.images if one.end <= len(sent.ids))
    write_step(folder, 1, [done])
    (record,) = read_step(folder, 1)
    again = read_rollout(with_pictures(record, folder / "rollouts"), done.task)
    assert again.trajectories[0].images == trajectory.images
    verify(again, vision_kit.chat(), parts.toolbox(give).schemas(None))


def test_a_demonstration_may_hold_images() -> None:
    chat = vision_kit.chat()
    demonstrator = Demonstrator(chat=chat, toolbox=TOOLS, limits=LIMITS)
    asked = {"function": {"name": "show", "arguments": {"what": "mixed"}}}
    messages = (
        *SEEN.messages,
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": content_of(["it: ", WIDE])},
        {"role": "assistant", "content": "It."},
        {"role": "user", "content": content_of([SMALL, "and?"])},
        {"role": "assistant", "content": "That."},
    )
    done = demonstrator(Task(task_id="d", messages=messages), "d0")  # its ledger is checked
    assert [one.image for one in done.trajectories[0].images] == [SMALL, WIDE, SMALL]
