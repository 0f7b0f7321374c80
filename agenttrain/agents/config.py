"""Settings of an outside agent: a program that attempts the tasks, with the policy as its model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import SETTINGS, Number, Whole, raise_problems


class AgentName(StrEnum):
    """The program that attempts the tasks."""

    none = "none"
    """The run's own tool loop."""
    endpoint = "endpoint"
    """A program that sends its requests to the run, as to OpenAI's or Anthropic's API."""


class Served(StrEnum):
    """Answers that requests for a model of some name get."""

    policy = "policy"
    """The policy, whose samples are trained."""
    frozen = "frozen"
    """The policy, whose samples are not trained and no part of the rollout."""
    refuse = "refuse"
    """An error: the agent must not use this model."""


class Trained(StrEnum):
    """Conversations of an agent that are trained."""

    agents = "agents"
    """Those with tools, if any has them: the main one and sub-agents, not titles or summaries."""
    all = "all"
    main = "main"
    """The one that holds the task's prompt, and has tools if any has."""


class OnSampling(StrEnum):
    """Consequence of fields that would change samples or prompt, which are the run's."""

    refuse = "refuse"
    override = "override"
    """They are replaced by the run's and counted (`agent/overridden`)."""


class OnForm(StrEnum):
    """Consequence of a request for a call or JSON where no grammar can force it."""

    refuse = "refuse"
    ask = "ask"
    """It is answered as any other and counted (`agent/unforced_forms`)."""


class OnFailure(StrEnum):
    """Consequence of an agent that crashes, runs out of time or goes away."""

    error = "error"
    """The rollout ends as `error`, is not scored, and does not count in its group's baseline."""
    zero = "zero"
    """The rollout ends as `agent_failed` with a reward of 0, if it has sampled anything."""


def command_parts(value: object) -> list[str]:
    """Return a command as a list. A text is split as a shell would. Raises ValueError."""
    if value is None:
        return []
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{error}; quote the parts as in a shell, or write a list") from error
    if isinstance(value, list | tuple) and all(isinstance(part, str | int) for part in value):
        return [str(part) for part in value]
    raise ValueError("expected a list of texts, or one text as in a shell")


class Sandbox(StrEnum):
    """Confinement of an agent's processes."""

    none = "none"
    bwrap = "bwrap"
    """By bubblewrap: no network but the endpoint, a home and a /tmp of its own, no files but its
    program's and those that it is shown, no privileges."""


MEMORY_MB, DISK_MB = 4096, 512
"""Limits of a sandbox by default."""
Command = Annotated[Any, PlainValidator(command_parts, json_schema_input_type=str | list[str])]


@dataclass(config=SETTINGS)
class AgentConfig:
    """The agent that attempts the tasks."""

    name: Data[AgentName] = AgentName.none
    """none: the run's own tool loop. endpoint: a program of yours, by command, by _target_, or
    started by somebody else."""
    # The default is a text, although the value is a list: if it were a list, OmegaConf would refuse
    # `command={a: b}` with an error of its own, before `command_parts` can say what is expected.
    command: Command = ""
    """Program of one rollout, e.g. [python, my_agent.py] or "python my_agent.py". It reads a JSON
    line with the task from its standard input."""
    _target_: str | None = None
    """Async function of one rollout, e.g. my_pkg.solve; it gets an AgentTask."""
    models: Data[dict[str, Served]] = field(default_factory=dict)
    """Model name of requests -> policy, frozen or refuse; "*" stands for all others. Empty: all
    names are the policy."""
    train: Data[Trained] = Trained.agents
    """Conversations of a rollout that are trained: agents (those with tools, if any has them), all,
    or main (the one that holds the task's prompt). The others are answered and listed."""
    on_sampling: Data[OnSampling] = OnSampling.refuse
    """Consequence of a temperature, top_p, seed … in a request that is not the run's, and of other
    fields that would change samples or prompt."""
    on_form: Data[OnForm] = OnForm.refuse
    """Consequence of a request that demands a call or JSON where the engine has no grammar."""
    on_failure: Data[OnFailure] = OnFailure.error
    """Consequence of an agent that crashes, times out or disconnects."""
    timeout_s: Number = Field(default=600.0, gt=0)
    """Wall-clock seconds of one rollout."""
    max_requests: Whole = Field(default=256, ge=1)
    """Requests of one rollout, answered or not; rollout.max_turns and rollout.max_completion_tokens
    limit turns and tokens."""
    concurrency: Whole = Field(default=128, ge=1)
    """Agents at once."""
    reuse: Data[bool] = False
    """Processes of `command` attempt one task after the other: they read a JSON line for each, and
    print a JSON object when it is done."""
    per_process: Whole = Field(default=1, ge=1)
    """Tasks that a reused process has at once. With several it must be asynchronous, and the object
    that it prints when one is done has its `rollout_id`."""
    sandbox: Data[Sandbox] = Sandbox.none
    """Confinement of the processes of `command`; needs Linux and the program bwrap."""
    read: list[str] = field(default_factory=list)
    """Files and folders that a sandbox shows, read-only, besides the program's own and the folder
    in which the run was started."""
    memory_mb: Whole = Field(default=MEMORY_MB, ge=64)
    """Memory of all processes in a sandbox with what they wrote. If they use more, they are ended,
    which counts as a crash."""
    disk_mb: Whole = Field(default=DISK_MB, ge=1)
    """Size of what is written to the home, /tmp, /run and /dev/shm of a sandbox; they are in
    memory."""
    exit_code_reward: Data[bool] = False
    """The exit code is the reward: 0 gives 1, another gives 0 and is no crash."""
    env: list[str] = field(default_factory=list)
    """Environment variables of the run that the agent's process gets besides PATH, HOME and the
    like, e.g. [SEARCH_API_KEY]; other secrets are not passed on."""
    install: str | None = None
    """Script that installs the program in the image of each container, with sh, once per image;
    needs runtime=podman."""
    host: str = "127.0.0.1"
    """Address on which the endpoint listens."""
    port: Whole = Field(default=0, ge=0, le=65535)
    """0: a free one."""

    @property
    def outside(self) -> bool:
        """True if a program attempts the tasks, and not the run's own loop."""
        return self.name is AgentName.endpoint

    @model_validator(mode="after")
    def _check(self) -> AgentConfig:
        problems = []
        if self.command and self._target_ is not None:
            problems.append(
                f"agent.command={self.command}: agent._target_={self._target_} is an agent too; "
                "leave one of them out"
            )
        if not self.outside and (self.command or self._target_ is not None):
            key = "command" if self.command else "_target_"
            problems.append(f"agent.{key}: has no effect with agent=none; add agent=endpoint")
        if self.reuse and not self.command:
            problems.append("agent.reuse=true: only processes are reused; add agent.command=[…]")
        if self.install is not None and not self.command:
            problems.append(
                f"agent.install={self.install}: installs the program of agent.command; add it"
            )
        if self.sandbox is not Sandbox.none and not self.command:
            problems.append(
                f"agent.sandbox={self.sandbox}: only processes are confined; add agent.command=[…]"
            )
        for name, default in (("memory_mb", MEMORY_MB), ("disk_mb", DISK_MB)):
            value = getattr(self, name)
            if self.sandbox is Sandbox.none and value != default:
                problems.append(
                    f"agent.{name}={value}: only a sandbox has this limit; add agent.sandbox=bwrap"
                )
        if self.read and self.sandbox is Sandbox.none:
            problems.append(
                f"agent.read={self.read}: without a sandbox everything can be read; add "
                "agent.sandbox=bwrap"
            )
        if self.disk_mb > self.memory_mb:
            problems.append(
                f"agent.disk_mb={self.disk_mb}: more than agent.memory_mb={self.memory_mb}, which "
                "counts it too; lower it, or raise memory_mb"
            )
        if self.per_process > 1 and not self.reuse:
            problems.append(
                f"agent.per_process={self.per_process}: only reused processes have several tasks "
                "at once; add agent.reuse=true"
            )
        if self.exit_code_reward and (self.reuse or not self.command):
            problems.append(
                "agent.exit_code_reward=true: needs a process for each rollout; add "
                "agent.command=[…], and leave agent.reuse out"
            )
        if self._target_ is not None and "." not in self._target_:
            problems.append(
                f"agent._target_={self._target_}: expected a dotted path, my_pkg.{self._target_}"
            )
        raise_problems(problems)
        return self


def find_served(models: Mapping[str, Served], name: str | None) -> Served | str:
    """Return how a request for the model `name` is served, or an error message for no such name."""
    if not models:
        return Served.policy
    if name is not None and name in models:
        return models[name]
    if "*" in models:
        return models["*"]
    return (
        f"model={name}: is not among agent.models={list(models)}"
        f"{did_you_mean(str(name), list(models))}; name one of them, or add it there"
    )
