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


class CallKey(NamedTuple):
    """A call of a rollout. The ids of a turn's calls are distinct."""

    agent: int
    """Number of the trajectory with which the calling agent began."""
    turn: int
    """Turn of that agent, from 0, over all its trajectories."""
    call_id: str


class RecordedCalls:
    """Results of a record's calls, and the sub-agents that the calls began.

    Example: the main agent calls ``f:0``, which begins a sub-agent that also calls ``f:0``. Their
    keys (agent, turn, call id) are (0, 0, "f:0") and (1, 0, "f:0"), where 0 and 1 are the numbers
    of the agents' first trajectories.
    """

    def __init__(self, record: Record) -> None:
        self._trajectories: list[Record] = record["trajectories"]
        self._agents: dict[int, list[tuple[int, int]]] = {}
        """First trajectory of an agent -> (trajectory, turn in it) of each turn of the agent."""
        for number, trajectory in enumerate(self._trajectories):
            # An agent has several trajectories if its history was rewritten.
            sampled_turns = {
                span["turn"] for span in trajectory["spans"] if span["origin"] == Origin.sampled
            }
            places = self._agents.setdefault(self._agent_of(number), [])
            places += [(number, turn) for turn in range(len(sampled_turns))]
        self.sub_agents: dict[CallKey, list[int]] = {}
        """First trajectories of the sub-agents of a call, in their order."""
        for number in self._agents:
            if (delegation := self._trajectories[number].get("delegation")) is not None:
                caller = (delegation["caller"][0], delegation["caller"][1])
                key = self._key(caller, delegation["call_id"])
                self.sub_agents.setdefault(key, []).append(number)
        self.results: dict[CallKey, ToolResult] = {}
        remaining = iter(tool_results(record))  # in the order in which they were given
        result = next(remaining, None)
        for place in self._ended_turns(MAIN_AGENT):
            for call_id in self._answered_calls(place):
                # A reply without a recorded result leaves the next one to its own call.
                if result is not None and result.call.id == call_id:
                    self.results[self._key(place, call_id)] = result
                    result = next(remaining, None)

    def _agent_of(self, number: int) -> int:
        """Return the trajectory with which the agent of a trajectory began."""
        parent = self._trajectories[number]["parent"]
        return number if parent is None else self._agent_of(parent[0])

    def _key(self, place: tuple[int, int], call_id: str) -> CallKey:
        agent = self._agent_of(place[0])
        return CallKey(agent, self._agents[agent].index(place), call_id)

    def _ended_turns(self, agent: int) -> Iterator[tuple[int, int]]:
        """Yield (trajectory, turn in it) in the order in which the turns' calls were answered.

        A sub-agent's calls are answered before the call that began it. `agent` is the number of the
        agent's first trajectory; `_agents` lists the places, (trajectory, turn), of its turns.
        """
        for turn, place in enumerate(self._agents[agent]):
            sub_agents = [
                number
                for key, numbers in self.sub_agents.items()
                if (key.agent, key.turn) == (agent, turn)
                for number in numbers
            ]
            # Trajectories are numbered in the order in which they began.
            for sub_agent in sorted(sub_agents):
                yield from self._ended_turns(sub_agent)
            yield place

    def _answered_calls(self, place: tuple[int, int]) -> list[str]:
        """Return the ids of a turn's calls that were answered, in their order.

        Malformed calls may be ignored, and a turn that ends its agent is not answered.
        """
        number, turn = place
        trajectory = self._trajectories[number]
        added = trajectory["messages"][len(prompt_messages(trajectory)) :]
        answers = [i for i, message in enumerate(added) if message["role"] == "assistant"]
        if turn >= len(answers):
            return []
        replies = takewhile(lambda message: message["role"] == "tool", added[answers[turn] + 1 :])
        return [message["tool_call_id"] for message in replies]
