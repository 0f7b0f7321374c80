"""Values that cross between processes, and messages over a socket."""

from __future__ import annotations

import asyncio
import datetime
import math
import socket
from array import array
from pathlib import Path

import numpy as np
import pytest

from agenttrain.runs.channel import Channel, ChannelClosed
from agenttrain.types import (
    Completion,
    Finish,
    Origin,
    Rollout,
    Span,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.codec import Codec

CODEC = Codec(
    (Task, Rollout, Trajectory, Span, ToolResult, ToolCall, Origin, Finish, ToolError), other=str
)


def crossed(value):
    return CODEC.decode(CODEC.encode(value))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1, 2**80, 0.1, math.inf, "", "\ud800 ü", [], (), {}, [()], (1, 2.0)),
        *((1, 2**80), (True, 1), {"a": {1: [None]}}, {(1, "b"): {"record": ["Span", []]}}),
        *(array("d", [0.1, math.inf]), array("f", [0.1]), array("q", [-(2**63)])),
        *(b"", b"\x00\xff", [{"bytes": 0}]),
        *(Origin.tool, (0.1, 1e-300), (1, 2, 3), [{"ints": 0}], Path("/a b")),
    ],
)
def test_a_value_comes_back_with_its_types(value) -> None:
    again = crossed(value)
    assert again == value and repr(again) == repr(value)


def test_nan_and_numbers_of_numpy() -> None:
    assert math.isnan(crossed([math.nan])[0]) and math.isnan(crossed((math.nan,))[0])
    assert repr(crossed([np.float64(0.1)])) == "[0.1]"


def test_a_rollout_comes_back_as_it_was() -> None:
    task = Task(
        task_id="a",
        messages=({"role": "user", "content": "3 + 4?"},),
        columns={"when": datetime.date(2026, 1, 2), "answers": (7, [7.0]), "n": None},
        tools=("add",),
    )
    rollout = Rollout(task=task, rollout_id="train-3-0-1", sample=1, reward=0.5, seconds=1.25)
    (main,) = rollout.trajectories
    main.append_context([5, 6], Origin.prompt)
    completion = Completion(
        token_ids=(41, 2), logprobs=(-0.1, -0.3), finish=Finish.stop, versions=((7, 2),)
    )
    main.append_sampled(completion, [5, 6])
    main.turn_rewards[0] = 0.2
    main.entropies = array("f", [0.5, 0.25])
    call = ToolCall(id="call_0_0", name="add", arguments={"a": 3}, text="raw", lenient=True)
    rollout.tool_results.append(
        ToolResult(call=call, content="7", error=ToolError.timeout, executor="calculator")
    )
    again = crossed(rollout)
    # A value that is neither JSON's nor a record of ours is its text, as in rollout files.
    assert again.task.columns == {"when": "2026-01-02", "answers": (7, [7.0]), "n": None}
    again.task = rollout.task
    assert again == rollout
    assert again.trajectories[0].spans[1].origin is Origin.sampled
    assert again.trajectories[0].token_ids == array("q", [5, 6, 41, 2])
    again.trajectories[0].append_context([8], Origin.template)
    assert main.length == 4


def test_an_unknown_class_is_not_sent_and_not_made() -> None:
    with pytest.raises(TypeError, match="date: cannot be sent: datetime"):
        Codec(()).encode(datetime.date(2026, 1, 2))
    with pytest.raises(KeyError, match="Task"):
        Codec(()).decode(CODEC.encode(Task(task_id="a", messages=())))


def test_messages_over_a_socket() -> None:
    async def main() -> None:
        ends = socket.socketpair()
        one, other = [await Channel.over(end, CODEC) for end in ends]
        long = array("q", range(300_000))
        sending = asyncio.gather(one.send(long), one.send("second"), other.send(["back"]))
        assert await other.receive() == long
        assert (await other.receive(), await one.receive()) == ("second", ["back"])
        await sending
        one.close()
        with pytest.raises(ChannelClosed):
            await other.receive()
        with pytest.raises(ChannelClosed):
            while True:
                await other.send("nobody reads this")
        other.close()

    asyncio.run(main())
