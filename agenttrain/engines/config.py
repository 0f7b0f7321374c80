"""Settings that every engine has, and of servers; those of one engine are in its config.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Whole, raise_problems, shown

DEFAULT_ENGINE = "transformers"
"""The engine of a run that names none."""


@dataclass(config=SETTINGS, kw_only=True)
class EngineSettings:
    """Settings of the engine that samples. An engine's own class adds its keys to these."""

    name: Data[str] = ""
    """A folder of agenttrain/engines. For an engine from outside, given as engine._target_: the
    dotted path of its EngineSpec."""
    max_context: Whole | None = Field(default=None, ge=1)
    """Tokens of one sequence; None: what the model's config allows."""
    max_rows: Whole = Field(default=128, ge=1)
    """Sequences decoded together, waiting for tools included (bounds the KV cache)."""


class EngineDtype(StrEnum):
    """Number format of the weights of an engine that has its own, and of its cache."""

    auto = "auto"
    """bfloat16 on a GPU that has it, else the policy's."""
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def flash_attention_notes(dtype: EngineDtype) -> Iterator[str]:
    """Yield a note if FlashAttention, which vLLM uses on GPUs, does not take the number format."""
    if dtype is EngineDtype.float32:
        yield (
            "engine.dtype=float32 samples without FlashAttention, which takes 16 bits; leave it out"
        )


@dataclass(config=SETTINGS)
class StartedServers:
    """Servers that a run starts on its machine and ends, each in processes of its own."""

    count: Whole = Field(default=1, ge=1)
    """Number of servers."""
    tensor_parallel_size: Whole = Field(default=1, ge=1)
    """GPUs that share the weights of one server."""
    gpus: list[Whole] | None = None
    """GPUs of the servers, by number, e.g. [4,5,6,7]; None: the first ones after the trainer's that
    no other section names."""
    restarts: Whole = Field(default=3, ge=0)
    """Times that each server is started again after it died; if none is left the run fails."""
    start_s: Number = Field(default=1800.0, gt=0)
    """Seconds within which a server answers after its start."""
    health_s: Number = Field(default=1.0, gt=0)
    """Seconds between two examinations, which ask a server whether it still answers."""
    dead_s: Number = Field(default=30.0, gt=0)
    """Seconds that a server's engine may take to answer an examination; it is then killed, and its
    requests go to another server."""
    request_s: Number = Field(default=3600.0, gt=0)
    """Seconds that one request may take: longer than the longest completion."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further flags of the server's program, e.g. {max-num-batched-tokens: 16384}."""

    @property
    def gpu_count(self) -> int:
        """GPUs of all servers."""
        return self.count * self.tensor_parallel_size


def gpu_problems(key: str, servers: StartedServers) -> Iterator[str]:
    """Yield problems of `gpus` in the section `key`, e.g. a GPU that is named twice."""
    gpus = servers.gpus
    if gpus is None:
        return
    if len(set(gpus)) < len(gpus):
        yield f"{key}.gpus={shown(gpus)}: names a GPU twice; each serves one server"
    if len(gpus) != servers.gpu_count:
        yield (
            f"{key}.gpus={shown(gpus)}: {key}.count={servers.count} x "
            f"{key}.tensor_parallel_size={servers.tensor_parallel_size} need {servers.gpu_count} "
            "GPUs; name as many"
        )


@dataclass(config=SETTINGS)
class ServersConfig(StartedServers):
    """Servers that sample for a run, each in processes of its own.

    The run starts them on this machine, unless `nodes` or `admin_urls` says that others do.
    """

    count: Whole = Field(default=1, ge=1)
    """Number of servers, of all `nodes` together; with `nodes` 1 stands for one on each. With
    `admin_urls`: the fewest of those servers that have to answer at the start."""
    gpus: list[Whole] | None = None
    """GPUs of the servers, by number, e.g. [4,5,6,7]; None: the first that nothing else of the run
    has, after the trainer's. On a machine with one GPU one server shares it with the trainer."""
    nodes: Whole = Field(default=0, ge=0)
    """Nodes that serve and do not train, each with count / nodes servers: the last ones of the job
    that `agenttrain submit` writes. 0: the run starts the servers on its own machine."""
    admin_urls: list[str] = field(default_factory=list)
    """Servers that somebody else started and ends, e.g. [http://10.0.0.5:8000]; each of them is
    controlled under its own address. The token is in AGENTTRAIN_SERVER_TOKEN."""
    url: str | None = None
    """Address of a router in front of `admin_urls`, which then gets the requests; None: each
    request goes to the server that the run chooses."""
    dead_s: Number = Field(default=30.0, gt=0)
    """Seconds that a server's engine may take to answer an examination; it is then killed, and its
    requests go to another server. One of `admin_urls` is not killed: it gets no requests until it
    answers again, and has as many seconds for that."""
    request_s: Number = Field(default=3600.0, gt=0)
    """Seconds that one request may take, or a weight update: longer than the longest completion."""

    @model_validator(mode="after")
    def _check(self) -> ServersConfig:
        if self.count == 1 and self.nodes:  # the default: one server on each node
            self.count = self.nodes
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        yield from self._outside_problems()
        yield from self._node_problems()
        if not (self.outside or self.nodes):
            yield from gpu_problems("servers", self)

    @property
    def outside(self) -> bool:
        """True: somebody else started the servers, and ends them."""
        return bool(self.admin_urls)

    @property
    def per_node(self) -> int:
        """Servers of one machine."""
        return self.count // max(self.nodes, 1)

    def _node_problems(self) -> Iterator[str]:
        """Yield settings that do not go with nodes for servers."""
        if not self.nodes:
            return
        for key in ("admin_urls", "url"):
            if value := getattr(self, key):
                yield (
                    f"servers.{key}={shown(value)}: names servers of others, and servers.nodes="
                    f"{self.nodes} has some of the job's own; leave one of them out"
                )
        if self.gpus is not None:
            yield (
                f"servers.gpus={shown(self.gpus)}: with servers.nodes={self.nodes} the servers of "
                "a node share all of its GPUs; leave it out"
            )
        if self.count % self.nodes:
            yield (
                f"servers.count={self.count}: servers.nodes={self.nodes} have equally many each; "
                f"set a multiple of {self.nodes}"
            )

    def _outside_problems(self) -> Iterator[str]:
        """Yield problems of `admin_urls`, servers that somebody else starts, and of `url`.

        `url` is the address of a router in front of them.
        """
        urls = self.admin_urls
        # A router forwards requests to any server. Weights and health checks are for every single
        # server, so each has to be named. The address may also be a server's own by mistake.
        if self.url is not None and not urls:
            yield (
                f"servers.url={self.url}: weights and health go past a router; name its servers: "
                f"servers.admin_urls=[{self.url}] if it is a server itself"
            )
        addresses = [("url", self.url), *(("admin_urls", url) for url in urls)]
        for key, url in addresses:
            if url is not None and not URL.fullmatch(url):
                yield f"servers.{key}={shown(url)}: expected an address, e.g. http://10.0.0.5:8000"
        if len(set(urls)) < len(urls):
            yield f"servers.admin_urls={shown(urls)}: names a server twice; name each once"
        if not self.outside:
            return
        if self.count > len(urls):
            yield (
                f"servers.count={self.count}: servers.admin_urls names {len(urls)}; lower it, or "
                "name more"
            )
        default = ServersConfig()
        for key in ONLY_OF_STARTED:  # would have no effect on servers that the run does not start
            if (value := getattr(self, key)) != getattr(default, key):
                yield (
                    f"servers.{key}={shown(value)}: servers.admin_urls names servers that somebody "
                    "else starts; leave it out"
                )


ONLY_OF_STARTED = ("tensor_parallel_size", "gpus", "restarts", "args")
"""Keys that only servers have that the run itself starts."""
URL = re.compile(r"https?://[^\s/?#@]+/?")
LEAST_TEMPERATURE = 0.01
"""Least temperature above 0. At lower ones rounding of the logits moves logprobs by whole nats, and
vLLM 0.32 samples at this one instead (sampling_params.py)."""


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one completion. The defaults sample from the policy's distribution."""

    max_tokens: int = 0
    """Budget of the completion; the loop sets it for every turn."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """The completion ends with, and includes, the first of these."""
    seed: int = 0
    """Determines the sampling noise of this request, whatever shares its batch."""
    grammar: str | None = None
    """Structural tag (JSON) that restricts the tokens that can be sampled. An engine applies it or
    refuses the request."""
    ends: Callable[[int], bool] | None = field(default=None, compare=False, repr=False)
    """Called with each sampled token; True ends the completion there, as `abort`. Only
    engine=transformers calls it. Others sample on, and the caller cuts the completion."""
    routes: bool = True
    """False: the completion has no `routes`, even if the engine records them for others."""
