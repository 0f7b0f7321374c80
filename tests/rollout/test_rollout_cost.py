"""What keeps a thousand rollouts at once cheap must change nothing: proofs, ids and settings."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from array import array
from dataclasses import replace

import parts
import pytest
from chat_cases import chat as family_chat
from hypothesis import given
from hypothesis import strategies as st
from parts import LIMITS, call, script, toolbox
from reward_cases import made

from agenttrain.chat.parsers.patterns import Pattern
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rewards.config import OnUnavailable
from agenttrain.rewards.function import FunctionScorer
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import ParsedTurns, verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.monitoring import YOUNG, _Heap, light_gc
from agenttrain.rollout.request import RolloutContext
from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.types import LedgerError, Rollout

DROP = {"it": OnUnavailable.drop}


def read() -> tuple[Rollout, ParsedTurns]:
    """A rollout of two turns and what the loop noted of it."""
    parsed_turns = ParsedTurns()
    answers = script(call("add", '{"a": 3, "b": 4}'), "It is 7.<|im_end|>")
    done = asyncio.run(
        run_rollout(
            RolloutRequest(task=parts.TASK),
            RolloutContext(
                engine=ScriptedEngine(answers, max_context=4096),
                chat=parts.chat(),
                toolbox=toolbox(),
                limits=LIMITS,
                parsed_turns=parsed_turns,
            ),
        )
    )
    assert done.turns == 2
    return done, parsed_turns


class Unasked:
    """A chat that fails when it must parse again."""

    stop_token_ids = parts.chat().stop_token_ids
    placeholders = None


def test_what_the_loop_has_parsed_is_not_parsed_again():
    done, parsed_turns = read()
    verify(done, Unasked(), [], parsed_turns)
    with pytest.raises(AttributeError, match="parse"):
        verify(done, Unasked(), [])


def spoil_arguments(done: Rollout) -> None:
    done.trajectories[0].messages[1]["tool_calls"][0]["function"]["arguments"]["a"] = 4


def spoil_content(done: Rollout) -> None:
    done.trajectories[0].messages[-1]["content"] += "."


def spoil_ids(done: Rollout) -> None:
    place = next(i for i, span in enumerate(done.trajectories[0].spans) if span.logprobs)
    *said, end = done.trajectories[0].spans[place].token_ids
    done.trajectories[0].spans[place] = replace(
        done.trajectories[0].spans[place], token_ids=(*said[::-1], end)
    )
    start = done.trajectories[0].prompt_length
    done.trajectories[0]._ids[start : start + len(said)] = array("q", said[::-1])


@pytest.mark.parametrize("spoil", [spoil_arguments, spoil_content, spoil_ids])
def test_what_has_changed_since_is_found(spoil):
    done, parsed_turns = read()
    spoil(done)
    with pytest.raises(LedgerError, match=r"rollout rollout trajectory 0 turn [01] position"):
        verify(done, parts.chat(), toolbox().schemas(), parsed_turns)


def test_the_heap_that_was_there_is_set_aside_and_given_back():
    before = gc.get_threshold(), gc.get_freeze_count()
    with light_gc():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (YOUNG, *before[0][1:])
        with light_gc():  # another collect at the same time
            pass
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_heap_that_its_owner_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch):
    # Restored afterwards, for the tests that follow.
    monkeypatch.setattr(_Heap, "frozen_elsewhere", False)
    gc.freeze()
    try:
        for _ in range(2):
            with light_gc():
                assert gc.get_threshold()[0] < YOUNG
            assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(
                ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "\n", " "]
            ),
            st.text(max_size=12),
        ),
        max_size=12,
    )
)
def test_a_rendering_has_the_ids_that_the_tokenizer_gives(pieces):
    chat = family_chat()
    text = "".join(pieces).translate({0xFDD0: None, 0xFDD1: None})
    text = text.encode("utf-8", "replace").decode()  # no lone surrogates: no tokenizer takes them
    for _ in range(2):  # what is kept is what was found
        assert chat.encoder.encode(text) == chat.encoder._full.encode(text).ids


def test_short_rewards_share_a_visit_to_a_thread_and_keep_their_order():
    threads = []

    def number(rollout: Rollout, number: int) -> float:
        threads.append((number, threading.get_ident()))
        return number

    rows = [made("", number=n) for n in range(50)]
    asyncio.run(Rubric({"it": number}).score(rows))
    assert [row.reward for row in rows] == [float(n) for n in range(50)]
    assert [n for n, _ in threads] == list(range(50))
    assert threading.get_ident() not in {thread for _, thread in threads}


def test_a_reward_that_hangs_after_others_of_its_visit_is_the_only_one_given_up():
    go = threading.Event()
    ran = []

    def waits(rollout: Rollout, number: int) -> float:
        ran.append(number)
        if number == 2:
            go.wait(30)
        return number

    rows = [made("", number=n) for n in range(5)]
    rubric = Rubric({"it": FunctionScorer("it", waits, timeout_s=0.2)}, on_unavailable=DROP)
    asyncio.run(rubric.score(rows))
    go.set()
    assert [row.reward for row in rows] == [0.0, 1.0, None, 3.0, 4.0]
    assert ran == [0, 1, 2, 3, 4]


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])


@given(types=st.lists(TYPES, min_size=1, max_size=2, unique=True), value=VALUES)
def test_a_schema_of_types_alone_is_checked_as_by_the_validator(types, value):
    plain = {"type": "object", "properties": {"a": {"type": types}}, "required": ["a"]}
    # A keyword that asks for nothing here, and that only the validator knows.
    whole = {**plain, "minProperties": 0}

    def told(schema: dict) -> str:
        try:
            return json.dumps(ArgumentSchema(schema).read({"a": value}))
        except InvalidArguments as error:
            return str(error)

    assert told(plain) == told(whole)


@pytest.mark.parametrize(
    ("source", "text"), [(r"</tool_call>\s*", None), ("<tool_call>", "<tool_call>"), ("a|ab", None)]
)
def test_marks_are_found_as_any_expression_finds_them(source, text):
    pattern = Pattern(source, "key", text=text)
    for searched in ("", "x</tool_call> \n<tool_call>", "<tool_call><tool_call>", "ab a"):
        whole = list(pattern._compiled.finditer(searched))
        assert pattern.starts(searched) == [match.start() for match in whole]
        found = pattern.search(searched)
        assert (found and (found.start, found.end)) == (whole[0].span() if whole else None)
