"""`ReasoningGym`: the generated tasks of the package reasoning_gym, in a process of its own Python.

    environment=reasoning_gym environment.reasoning_gym.dataset=chain_sum data=seeds
    environment.reasoning_gym.python=/path/to/its/bin/python

The package pins exact versions of other packages. So `reasoning_gym_bridge.py` runs under a Python
that has it, in one process for all rollouts. A row's `seed` makes its task.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenttrain.types import MAIN, Rollout, ToolUnavailable
from agenttrain.utils.child_process import ChildGone, OnDemandChild
from agenttrain.utils.data_fields import Data
from agenttrain.utils.text_templates import TextTemplate

BRIDGE = Path(__file__).with_name("reasoning_gym_bridge.py")
INSTALL = "python3 -m venv reasoning-gym && reasoning-gym/bin/pip install reasoning-gym"
PROMPT = "{{ question }}\n\nThink first. Then put the answer alone in <answer> tags."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """One task of a dataset of reasoning_gym, made by the row's column `seed`.

    `python` is a Python that has the package, `config` holds arguments of the dataset:
    ``{min_terms: 2, max_terms: 4}``. The model answers in ``<answer>`` tags, of which the last
    count, and the reward is the dataset's own score; without tags it is 0. A request to the process
    takes at most `reply_timeout_s`.
    """

    def __init__(
        self,
        *,
        dataset: Data[str],
        python: str,
        config: Mapping[str, Any] | None = None,
        prompt: Data[str] = PROMPT,
        reply_timeout_s: Data[float] = 60.0,
    ) -> None:
        """Prepare an episode, without starting a process; `check` has checked the arguments.

        `python` is the path of an interpreter that has reasoning_gym; its process replies to each
        request within `reply_timeout_s`. `Data[…]` marks values that are only data: nothing is
        imported or started by them.
        """
        self._python = python
        self._request: dict[str, Any] = {"dataset": dataset, "config": dict(config or {})}
        """What every request names: the dataset, its config and, after `reset`, the seed."""
        self._prompt = TextTemplate(prompt, "prompt")
        self._reply_timeout_s = reply_timeout_s

    @classmethod
    def check(
        cls,
        *,
        dataset: str,
        python: str,
        config: Mapping[str, Any] | None = None,
        prompt: str = PROMPT,
        reply_timeout_s: float = 60.0,
    ) -> None:
        """Raise ValueError for arguments that cannot work, without starting a process."""
        if not isinstance(dataset, str) or not dataset:
            raise ValueError(f"dataset={dataset}: must name a dataset, e.g. chain_sum")
        path = Path(str(python)).expanduser()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ValueError(
                f"python={python}: is no program; make an environment of its own ({INSTALL}) and "
                "name its bin/python"
            )
        if config is not None and not isinstance(config, Mapping):
            raise ValueError(f"config={config}: must have names, e.g. {{max_terms: 4}}")
        if unknown := set(TextTemplate(prompt, "prompt").fields) - {"question"}:
            raise ValueError(
                f"prompt={prompt}: uses {', '.join(sorted(unknown))}; there is only question"
            )
        if isinstance(reply_timeout_s, bool) or not reply_timeout_s > 0:
            raise ValueError(f"reply_timeout_s={reply_timeout_s}: must be a number above 0")

    @classmethod
    def tools(cls, **arguments: Any) -> list[dict[str, Any]]:
        """Make a task, so that a wrong dataset is named before the run; there are no tools."""
        cls.check(**arguments)
        cls(**arguments).reset({"seed": 0})
        return []

    def reset(self, row: Mapping[str, Any]) -> str:
        """Make the row's task, and return its prompt."""
        if "seed" not in row:
            raise ValueError("the row has no column 'seed'; use data=seeds")
        self._request["seed"] = row["seed"]
        return self._prompt.fill({"question": self._ask()["question"]})

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raise ValueError: there are no tools."""
        raise ValueError(f"{name}: there is no such tool")

    def reward(self, rollout: Rollout) -> float:
        """Return the dataset's score of the last answer."""
        main = [trajectory for trajectory in rollout.trajectories if trajectory.role == MAIN]
        messages = [m for m in main[-1].added_messages if m["role"] == "assistant"]
        answers = ANSWER.findall(messages[-1].get("content") or "") if messages else []
        if not answers:
            return 0.0
        try:
            return float(self._ask(answer=answers[-1].strip())["score"])
        except ValueError as error:
            raise ToolUnavailable(f"reasoning_gym: scoring failed: {error}") from error

    def _ask(self, **answer: str) -> Mapping[str, Any]:
        """Return the reply to a request about the task.

        Raises ValueError, which names the argument, if the process cannot be started or the request
        fails, and ToolUnavailable if no reply comes.
        """
        request = {**self._request, **answer}
        try:
            reply: Mapping[str, Any] = task_process(self._python).ask(
                request, limit_s=self._reply_timeout_s
            )
        except OSError as error:
            raise ValueError(f"python={self._python}: cannot be started: {error}") from error
        except ChildGone as error:
            if "No module named 'reasoning_gym'" in str(error):
                raise ValueError(
                    f"python={self._python}: has no package reasoning_gym; {INSTALL}"
                ) from error
            raise ToolUnavailable(f"reasoning_gym: its process {error}") from error
        if "error" in reply:
            raise ValueError(f"dataset={request['dataset']}: {reply['error']}")
        return reply


_PROCESSES: dict[str, OnDemandChild] = {}
"""Processes by their Python. They stay until this process ends: between two steps no rollout holds
one, and importing the package takes seconds."""


def task_process(python: str) -> OnDemandChild:
    """Return the process of this Python, which runs reasoning_gym_bridge.py."""
    # -P: the bridge's folder holds our reasoning_gym.py, which is not the library.
    command = [str(Path(python).expanduser()), "-P", str(BRIDGE)]
    return _PROCESSES.setdefault(python, OnDemandChild(command))
