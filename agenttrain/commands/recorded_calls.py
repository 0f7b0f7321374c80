"""Calls of a recorded rollout by the turn that made them: a model may write an id again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from agenttrain.commands.recorded import Record
from agenttrain.tracking.rollouts import prompt_messages, tool_results
from agenttrain.types import Origin, ToolResult

MAIN_AGENT = 0
"""Number of the first agent's first trajectory."""


class TurnPlace(NamedTuple):
    """Where a turn is recorded."""

    trajectory: int
    """Number of the trajectory."""
    turn: int
    """Turn of that trajectory, from 0."""


class CallKey(NamedTuple):
    """A call of a rollout. The ids of a turn's calls are distinct."""

    agent: int
    """Number of the trajectory with which the calling agent began."""
    turn: int
    """Turn of that agent, from 0, over all its trajectories."""
    call_id: str


class RecordedCalls:
    """Results of a record's calls, and the sub-agents that the calls began.

    A record numbers its trajectories from 0. An agent has one trajectory, or several if its history
    was rewritten, and is named by the number of its first one. Turns are numbered twice, from 0
    each: in a trajectory (`TurnPlace`), as they are recorded, and over all trajectories of an agent
    (`CallKey`), as a replay counts them.

    Example: the main agent calls ``f:0``, which begins a sub-agent that also calls ``f:0``. Their
    keys (agent, turn, call id) are (0, 0, "f:0") and (1, 0, "f:0"), where 0 and 1 are the numbers
    of the agents' first trajectories.
    """

    def __init__(self, record: Record) -> None:
        self._trajectories: list[Record] = record["trajectories"]
        self._turns_by_agent = self._collect_turns()
        """Agent (number of its first trajectory) -> the places of all its turns."""
        self.sub_agents = self._collect_sub_agents()
        """Call -> the sub-agents that it began, in their order."""
        self.results = self._match_results(record)
        """Call -> its result."""

    def _collect_turns(self) -> dict[int, list[TurnPlace]]:
        """Return the places of each agent's turns.

        An agent has several trajectories if its history was rewritten.
        """
        turns_by_agent: dict[int, list[TurnPlace]] = {}
        for number, trajectory in enumerate(self._trajectories):
            # A turn may have several sampled spans, so that distinct turns are counted. They are
            # numbered from 0 in each trajectory: three turns are 0, 1 and 2.
            sampled_turns = {
                span["turn"] for span in trajectory["spans"] if span["origin"] == Origin.sampled
            }
            places = turns_by_agent.setdefault(self._agent_of(number), [])
            places += [TurnPlace(number, turn) for turn in range(len(sampled_turns))]
        return turns_by_agent

    def _collect_sub_agents(self) -> dict[CallKey, list[int]]:
        """Return the sub-agents that each call began."""
        sub_agents: dict[CallKey, list[int]] = {}
        for agent in self._turns_by_agent:
            if (delegation := self._trajectories[agent].get("delegation")) is not None:
                key = self._key(TurnPlace(*delegation["caller"]), delegation["call_id"])
                sub_agents.setdefault(key, []).append(agent)
        return sub_agents

    def _match_results(self, record: Record) -> dict[CallKey, ToolResult]:
        """Return the result of each call: results are recorded in the order of the answers."""
        results: dict[CallKey, ToolResult] = {}
        remaining = iter(tool_results(record))
        result = next(remaining, None)
        for place in self._turns_in_order_of_answers(MAIN_AGENT):
            for call_id in self._answered_calls(place):
                # Some replies have no recorded result. `result` is then that of a later call, and
                # waits for it.
                if result is not None and result.call.id == call_id:
                    results[self._key(place, call_id)] = result
                    result = next(remaining, None)
        return results

    def _agent_of(self, number: int) -> int:
        """Return the trajectory with which the agent of a trajectory began."""
        parent = self._trajectories[number]["parent"]
        return number if parent is None else self._agent_of(parent[0])

    def _key(self, place: TurnPlace, call_id: str) -> CallKey:
        """Return the key of a call; the index of its place is the turn among the agent's turns."""
        agent = self._agent_of(place.trajectory)
        return CallKey(agent, self._turns_by_agent[agent].index(place), call_id)

    def _turns_in_order_of_answers(self, agent: int) -> Iterator[TurnPlace]:
        """Yield the turns of an agent and of its sub-agents as their calls were answered.

        A sub-agent's calls are answered before the call that began it. If turn 0 of agent 0 begins
        agent 1, the order is: all turns of agent 1, turn 0 of agent 0, turn 1 of agent 0.
        """
        for turn, place in enumerate(self._turns_by_agent[agent]):
            sub_agents = [
                sub_agent
                for key, begun in self.sub_agents.items()
                if (key.agent, key.turn) == (agent, turn)
                for sub_agent in begun
            ]
            # Trajectories are numbered in the order in which they began.
            for sub_agent in sorted(sub_agents):
                yield from self._turns_in_order_of_answers(sub_agent)
            yield place

    def _answered_calls(self, place: TurnPlace) -> list[str]:
        """Return the ids of a turn's calls that got a tool message as reply, in their order.

        `place` is the turn's trajectory and its number there. Malformed calls may get no reply, nor
        do the calls of a turn that ends its agent.
        """
        trajectory = self._trajectories[place.trajectory]
        # A prompt may have assistant messages too, which no turn of this rollout wrote.
        added = trajectory["messages"][len(prompt_messages(trajectory)) :]
        # Positions of the model's messages: that of turn n is the n-th.
        answers = [i for i, message in enumerate(added) if message["role"] == "assistant"]
        if place.turn >= len(answers):
            return []
        after_answer = added[answers[place.turn] + 1 :]
        replies = takewhile(lambda message: message["role"] == "tool", after_answer)
        return [message["tool_call_id"] for message in replies]
