"""The scripted engine: what users test their tools and rewards with."""

import asyncio

import pytest

from agenttrain.engines.base import EngineError, ImagesRefused
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.types import Completion, Finish

STOP = Sampling(max_tokens=9, stop_token_ids=(2, 3))


def ask(engine, ids=(1,), sampling=STOP, session="a"):
    return asyncio.run(engine.generate(ids, sampling, session=session))


def test_answers_come_by_turn_and_end_at_the_first_stop_id():
    engine = ScriptedEngine([[41, 2, 42], [43, 3]])
    assert [ask(engine), ask(engine, (1, 41, 2)), ask(engine, session="b")] == [
        Completion(token_ids=ids, logprobs=(-0.5,) * 2, finish=Finish.stop, versions=((0, 2),))
        for ids in ((41, 2), (43, 3), (41, 2))
    ]
    assert [(s.session, s.turn, s.token_ids) for s in engine.sent] == [
        ("a", 0, (1,)),
        ("a", 1, (1, 41, 2)),
        ("b", 0, (1,)),
    ]
    assert engine.sent[0].sampling is STOP


def test_images_are_refused_and_a_parent_is_not():
    engine = ScriptedEngine([[41, 2]])
    with pytest.raises(ImagesRefused, match=r"session='a': 2 images were sent, and ScriptedEng"):
        asyncio.run(engine.generate([1], STOP, session="a", images=["first", "second"]))
    assert engine.sent == []
    asked = engine.generate([1], STOP, session="child", parent="a")
    assert asyncio.run(asked).token_ids == (41, 2)


def test_the_budget_and_the_context_cut_exactly():
    engine = ScriptedEngine(lambda ids, session, turn: [41, 42, 43, 2], max_context=6)
    cut = ask(engine, sampling=Sampling(max_tokens=3, stop_token_ids=(2,)))
    assert (cut.token_ids, cut.finish) == ((41, 42, 43), Finish.length)
    whole = ask(engine, sampling=Sampling(max_tokens=4, stop_token_ids=(2,)))
    assert (whole.token_ids, whole.finish) == ((41, 42, 43, 2), Finish.stop)
    assert ask(engine, (1, 1, 1, 1)).token_ids == (41, 42)


def test_text_is_encoded_and_ended_by_the_stop_id():
    engine = ScriptedEngine({"a": ["hi"]}, encode=lambda text: [ord(c) for c in text])
    assert ask(engine).token_ids == (104, 105, 2)
    with pytest.raises(EngineError, match="no answer for turn 1"):
        ask(engine)
    with pytest.raises(EngineError, match="no answer for turn 0"):
        ask(engine, session="b")


def test_a_completion_brings_its_own_logprobs_and_may_be_aborted():
    answer = Completion(
        token_ids=(41, 42), logprobs=(-0.1, -0.2), finish=Finish.abort, versions=((0, 2),)
    )
    engine = ScriptedEngine([answer] * 2)
    asyncio.run(engine.update((), 7))
    got = ask(engine)
    assert (got.logprobs, got.finish, got.versions) == ((-0.1, -0.2), Finish.abort, ((7, 2),))
    cut = ask(engine, sampling=Sampling(max_tokens=1))
    assert (cut.logprobs, cut.finish) == ((-0.1,), Finish.length)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([41], "neither a stop id"),
        ([], "no token"),
        ("hi", "encode"),
    ],
)
def test_an_answer_no_engine_could_give_is_an_error(answer, message):
    with pytest.raises(EngineError, match=message):
        ask(ScriptedEngine([answer]))


def test_a_prompt_without_room_is_refused():
    engine = ScriptedEngine([[2]], max_context=2)
    for ids in ((), (1, 1)):
        with pytest.raises(EngineError, match="no room"):
            ask(engine, ids)
    assert engine.sent == []


def test_a_delay_lets_others_run_and_releases_are_recorded():
    async def both():
        engine = ScriptedEngine([[2]], delay=0.01)
        task = asyncio.create_task(engine.generate((1,), STOP, session="a"))
        await asyncio.sleep(0)
        assert not task.done()
        await task
        await engine.release("a")
        await engine.update((), 3)
        await engine.aclose()
        return engine

    engine = asyncio.run(both())
    assert (engine.released, engine.updates, engine.version) == (["a"], 1, 3)
