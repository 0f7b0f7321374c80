"""Literal rollouts for the tracking tests."""

from __future__ import annotations

from agenttrain.algorithms.credit import set_advantages
from agenttrain.types import (
    AssistantTurn,
    Completion,
    Finish,
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
)

VOCABULARY = {
    1: "<user>",
    2: "</turn>",
    3: "What is 3 + 4?",
    4: "<assistant>",
    5: "add(3, 4)",
    6: "add(x=3)",
    7: "<tool>",
    8: "7",
    9: "no argument `x`",
    10: "It is 7.",
    11: "<script>alert(1)</script>",
    12: "[red]bold[/red]\x1b[31m",
}
PROMPT = [1, 3, 2, 4]
#        <user> What is 3 + 4? </turn> <assistant>


def decode(token_ids: list[int] | tuple[int, ...]) -> str:
    """Each id's text, joined."""
    return "".join(VOCABULARY[token_id] for token_id in token_ids)


def new(sample: int, reward: float | None, group_id: str = "g0") -> Rollout:
    """A rollout that holds the prompt and its reward so far."""
    task = Task(task_id="sum-1", messages=({"role": "user", "content": VOCABULARY[3]},))
    rollout = Rollout(
        task=task,
        rollout_id=f"{group_id}-{sample}",
        group_id=group_id,
        sample=sample,
        rewards={"answer": reward},
        reward=reward,
    )
    (trajectory,) = rollout.trajectories
    trajectory.messages, trajectory.prompt_messages = list(task.messages), 1
    trajectory.append_context(PROMPT, Origin.prompt)
    return rollout


def say(rollout: Rollout, token_ids: tuple[int, ...], *, version: int = 7) -> None:
    """Append a completion with logprob -0.5 per token."""
    completion = Completion(
        token_ids=token_ids,
        logprobs=(-0.5,) * len(token_ids),
        finish=Finish.stop if token_ids[-1] == 2 else Finish.length,
        versions=((version, len(token_ids)),),
    )
    (trajectory,) = rollout.trajectories
    trajectory.append_sampled(completion, trajectory.token_ids)
    set_advantages(rollout, 0.5)


def call(
    rollout: Rollout,
    reply_id: int,
    *,
    name: str = "add",
    error: ToolError | None = None,
    seconds: float = 0.25,
) -> None:
    """Record a call of the last turn and append its reply with its glue."""
    (trajectory,) = rollout.trajectories
    index = len(rollout.tool_results)
    made = ToolCall(id=f"call_{index}_0", name=name, arguments={"a": 3})
    reply = VOCABULARY[reply_id]
    rollout.tool_results.append(ToolResult(call=made, content=reply, error=error, seconds=seconds))
    trajectory.messages += [
        AssistantTurn(content="", reasoning=None, calls=(made,)).message(),
        {"role": "tool", "tool_call_id": made.id, "content": reply},
    ]
    trajectory.append_context([7], Origin.template)
    trajectory.append_context([reply_id], Origin.tool)
    trajectory.append_context([2, 4], Origin.template)


def three() -> list[Rollout]:
    """A good call, a call with a wrong argument name that is cut later, and no call at all."""
    good, bad, silent = new(0, 1.0), new(1, 0.0), new(2, 0.5)
    say(good, (5, 2))
    call(good, 8, seconds=0.25)
    say(good, (10, 2))
    good.stop_reason = StopReason.completed
    say(bad, (6, 2))
    call(bad, 9, error=ToolError.invalid_arguments, seconds=0.0)
    say(bad, (10,))
    bad.stop_reason = StopReason.max_tokens
    say(silent, (10, 2))
    silent.stop_reason = StopReason.completed
    return [good, bad, silent]
