"""A conversation with an agent: one rollout whose later user turns come from outside.

Everything else is the rollout's: template, tools, limits, and a history that is never tokenised
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.types import Message, Rollout, StopReason


class Conversation:
    """One conversation, from its first message to the rollout's stop reason.

    Example, where the model answers the first message and waits for the second::

        conversation = Conversation(context, request)
        await conversation.send()              # the task's own messages
        assert conversation.stop_reason is None
        await conversation.send("And in euros?")
        print(conversation.rollout.trajectories[0].messages[-1]["content"])
        await conversation.aclose()
    """

    def __init__(self, context: RolloutContext, request: RolloutRequest) -> None:
        """`request.task` has the messages that the conversation begins with.

        The limit `timeout_s` holds for each message: people think between two of them.
        """
        self.rollout: Rollout | None = None
        """The rollout so far; `_record` sets it with each message. None before its first turn."""
        self._limit_s = context.limits.timeout_s
        """Seconds for the agent's answer to one message, its tool calls included."""
        self._forward_messages = context.on_messages
        self._context = replace(
            context,
            limits=replace(context.limits, timeout_s=None),
            user=self._next_message,
            on_messages=self._record,
        )
        self._request = request
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        """Messages of the user on their way from `send` to the loop."""
        self._loop_waits = asyncio.Event()
        """Set while the loop waits for the user's next message."""
        self._task: asyncio.Task[Rollout] | None = None
        """Runs the rollout; None before the first `send`."""

    @property
    def stop_reason(self) -> StopReason | None:
        """Reason why the conversation is over; None while it goes on."""
        return None if self.rollout is None else self.rollout.stop_reason

    async def send(self, text: str | None = None) -> None:
        """Send the user's message; return once the agent waits for the next or has ended.

        The first call takes no text: the task holds the first messages. Cancelling a call ends the
        conversation, and so does an answer that takes longer than the time limit, which holds for
        each message by itself. Raises what `run_rollout` raises.
        """
        self._loop_waits.clear()  # `_next_message` sets it
        if self._task is None:
            self._task = asyncio.create_task(run_rollout(self._request, self._context))
        else:
            self._texts.put_nowait(text)
        answered = asyncio.create_task(self._loop_waits.wait())
        try:
            done, _ = await asyncio.wait(
                (self._task, answered), return_when="FIRST_COMPLETED", timeout=self._limit_s
            )
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            answered.cancel()
        if not done:  # the time limit passed
            await self.aclose()
            if self.rollout is None:  # not one message came, with which `_record` sets it
                self.rollout = self._request.new_rollout()
            self.rollout.stop_reason = StopReason.timeout
        elif self._task in done:
            self.rollout = self._task.result()

    async def aclose(self) -> None:
        """End the conversation, and release its tools and its place in the engine."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _next_message(self, _: Message) -> str | None:
        """Wait for the user's next message; the loop calls this after each answer."""
        self._loop_waits.set()
        return await self._texts.get()

    def _record(self, rollout: Rollout, messages: Sequence[Message]) -> None:
        self.rollout = rollout
        if self._forward_messages is not None:
            self._forward_messages(rollout, messages)
