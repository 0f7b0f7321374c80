"""Servers that somebody else started (`servers.admin_urls`): checks of them, and their watcher.

They are neither killed nor started again. A server that stops answering has `servers.dead_s` to
come back. Then it is checked again, and gets the weights before it samples.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from agenttrain.engines.config import ServersConfig
from agenttrain.engines.vllm_server.client import ServerClient, ServerFacts, ServerFailed
from agenttrain.engines.vllm_server.files_transport import BACKEND, METHODS
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.health import EXAMINED, FAULTS, Member, Members, MemberState
from agenttrain.engines.vllm_server.server_records import Condition, ServerPlan, ServerRecord

WRITTEN_FOR = "0.32"
"""Version of vLLM whose routes the client calls."""
ROUTER = -1
"""Number that stands for the router in place of a server's."""
AWAY = (MemberState.restarting, MemberState.gone)
REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND)
LONGEST_S = 60.0
"""Longest time between two checks of a server that does not have what the run needs."""
NEEDS = {
    "/inference/v1/generate": "--enable-scale-out",
    "/server_info": "VLLM_SERVER_DEV_MODE=1 in its environment",
    "/pause": "VLLM_SERVER_DEV_MODE=1 in its environment",
    "/weight_info": "VLLM_SERVER_DEV_MODE=1 in its environment",
}
"""Routes that every server must have, mapped to what adds them."""
FLOAT32 = "float32"
STATES_FLAG = f"--mamba-ssm-cache-dtype {FLOAT32}"
ADAPTERS = {"/v1/load_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Addresses of outside servers, and the properties that each of them must have."""

    urls: tuple[str, ...]
    router: str | None
    token: str
    plan: ServerPlan
    """The plan by which the run would start them itself."""
    text: str
    """A text with the special tokens of the run's tokenizer, to compare tokenizers."""
    token_ids: tuple[int, ...]
    """Ids of that text. Empty: the run has no tokenizer to compare with."""
    has_states: bool = False
    """Layers of the model have recurrent states, which servers must keep in float32."""


class Router:
    """A router in front of the servers. It chooses a server for each request."""

    def __init__(self, url: str, token: str, servers: ServersConfig) -> None:
        client = ServerClient(url, token, timeout_s=servers.request_s)
        self.member = Member(ROUTER, outside=True, url=url, client=client)
        self._lost_numbers: set[int] = set()

    def follow(self, members: Sequence[Member]) -> None:
        """Fail all requests in flight if one more server is lost: any may have been on it."""
        lost_numbers = {member.number for member in members if member.state in AWAY}
        if lost_numbers - self._lost_numbers:
            self.member.reason = "a server behind it was lost"
            self.member.lost.set()
            self.member.lost = asyncio.Event()
        self._lost_numbers = lost_numbers


def problems(url: str, facts: ServerFacts, run: Outside) -> Iterator[str]:
    """Yield why a server cannot sample for the run, as ``key=value: problem; remedy``.

    A plan with a `rank` sends the server adapters. Without one it sends all weights.
    """
    key, plan = f"servers.admin_urls={url}", run.plan
    quantization = plan.engine["quantization"]
    if not facts.version.startswith(f"{WRITTEN_FOR}."):
        yield (
            f"{key}: vLLM {facts.version} runs there, and this agenttrain calls the routes of "
            f"{WRITTEN_FOR}; install vllm=={WRITTEN_FOR}.*"
        )
    flag_by_path = {**NEEDS, **(ADAPTERS if plan.rank else {})}  # route -> the flag that adds it
    for flag in dict.fromkeys(flag_by_path.values()):  # each flag once, with all of its routes
        missing = [
            path
            for path, adding_flag in flag_by_path.items()
            if adding_flag == flag and path not in facts.paths
        ]
        if missing:
            yield f"{key}: it lacks {', '.join(missing)}; start it with {flag}"
    if not facts.config:  # the server does not show its settings, so they cannot be checked
        return
    model: Mapping[str, Any] = facts.config["model_config"]
    dtype = str(model["dtype"]).removeprefix("torch.")
    if dtype != plan.dtype:
        yield (
            f"engine.dtype={plan.dtype}: {url} has {dtype}; set engine.dtype={dtype}, or start it "
            f"with --dtype {plan.dtype}"
        )
    if model["max_model_len"] < plan.max_context:
        yield (
            f"engine.max_context={plan.max_context}: {url} takes {model['max_model_len']} tokens; "
            f"lower it, or start it with --max-model-len {plan.max_context}"
        )
    if model["logprobs_mode"] != "processed_logprobs":
        yield (
            f"{key}: its log-probabilities are {model['logprobs_mode']}, before the temperature; "
            "start it with --logprobs-mode processed_logprobs"
        )
    if model["quantization"] != quantization:
        yield (
            f"engine.quantization={quantization}: {url} has {model['quantization']}; set "
            "engine.quantization to it"
        )
    if plan.tokenizer is not None and model["skip_tokenizer_init"]:
        yield (
            f"rollout.structured_calls=true: {url} has no tokenizer, which grammars need; start it "
            "without --skip-tokenizer-init and --tokens-only"
        )
    returned = (facts.config.get("aux_output_config") or {}).get("enable_return_routed_experts")
    if plan.record_routes and not returned:
        yield (
            f"algorithm.router_replay=rollout: {url} does not return the experts by which it "
            "samples; start it with --enable-return-routed-experts"
        )
    states = _state_format(facts)
    if run.has_states and states not in (None, FLOAT32):
        yield (
            f"{key}: it keeps the states of recurrent layers in {states}, training in float32; "
            f"start it with {STATES_FLAG}"
        )
    backend = (facts.config["weight_transfer_config"] or {}).get("backend")
    if not plan.rank and backend != plan.backend:
        yield (
            f"{key}: it takes weights by {backend}; start it with "
            f'--weight-transfer-config \'{{"backend":"{plan.backend}"}}\''
        )
    methods = facts.config["parallel_config"]["worker_extension_cls"]
    if not plan.rank and plan.backend == BACKEND and methods != METHODS:
        yield f"{key}: its workers verify no files; start it with --worker-extension-cls {METHODS}"
    largest = (facts.config["lora_config"] or {}).get("max_lora_rank", 0)
    if plan.rank > largest:
        yield (
            f"model.lora.rank={plan.rank}: {url} takes adapters of rank {largest}; start it with "
            f"--enable-lora --max-lora-rank {plan.rank} --max-loras "
            f"{plan.adapters}"
        )


def _state_format(facts: ServerFacts) -> str | None:
    """Return the number format of a server's recurrent states; None if it does not show it.

    In vLLM 0.32 the recurrent states' "auto" means the format of the convolutions' states, and
    their "auto" means the model's format. Kimi delta attention is an exception: its "auto" is
    float32. A server does not say which layers it has, so the model's format is returned for it
    too. If that is not float32, `problems` refuses the server, and names the flag to start it with.
    """
    cache: Mapping[str, Any] = facts.config.get("cache_config") or {}
    state_dtype = cache.get("mamba_ssm_cache_dtype")
    if state_dtype == "auto":
        state_dtype = cache.get("mamba_cache_dtype", "auto")
    if state_dtype == "auto":
        state_dtype = str(facts.config["model_config"]["dtype"]).removeprefix("torch.")
    return None if state_dtype is None else str(state_dtype)


async def inspect(client: ServerClient, url: str, run: Outside) -> tuple[ServerFacts, list[str]]:
    """Return a server's facts, and why it cannot sample for the run. Raises ServerFailed."""
    try:
        facts = await client.facts()
    except ServerFailed as error:
        if error.status != HTTPStatus.UNAUTHORIZED:
            raise
        facts = ServerFacts(version="", paths=frozenset(), config={}, world_size=1)
        return facts, [f"{TOKEN}: {url} refuses it; give this process and the server the same one"]
    reasons = list(problems(url, facts, run))
    has_tokenizer = "/tokenize" in facts.paths and not (
        facts.config and facts.config["model_config"]["skip_tokenizer_init"]
    )
    # With another tokenizer the ids of the run would mean other texts to the server.
    if run.token_ids and has_tokenizer:
        ids = await client.token_ids(run.text)
        if ids != list(run.token_ids):
            name = facts.config["model_config"]["tokenizer"] if facts.config else "its own"
            reasons.append(
                f"servers.admin_urls={url}: its tokenizer, {name}, has other ids than that of "
                f"{run.plan.model} for {run.text!r}; start it with the run's model"
            )
    return facts, reasons


async def watch_outside(
    member: Member, fleet: Members, run: Outside, servers: ServersConfig
) -> None:
    """Examine a server that somebody else started, until it is cancelled."""
    # A client for this task alone: the member's is closed whenever the server joins again.
    async with aclosing(ServerClient(member.url, run.token, timeout_s=servers.request_s)) as client:
        await _watch_with(client, member, fleet, run, servers)


async def _watch_with(
    client: ServerClient, member: Member, fleet: Members, run: Outside, servers: ServersConfig
) -> None:
    """Ask the server for its weights' label, again and again, and update the member's state.

    A server that has the weights (`EXAMINED`) loses its place in the fleet if it does not answer,
    or if the label shows that it was started again. One that is starting, or away, joins the fleet
    once it answers and has what the run needs.
    """
    away_since = time.monotonic()
    # Attempts to join the fleet: the time to wait after one, and the time of the next one.
    attempt_s, next_attempt = servers.health_s, away_since
    misses = 0  # examinations in a row without an answer
    while True:
        # The answer is about this start of the server (`boot`) and this version. While it is on the
        # way, the server may join again.
        boot, version = member.boot, member.version
        answer = await _ask_label(client, run, servers.dead_s)
        failure = answer if isinstance(answer, ServerFailed) else None
        member.answers = failure is None
        now = time.monotonic()
        if member.state not in (MemberState.starting, *AWAY):
            away_since = now
        if member.state in EXAMINED and member.boot == boot:
            misses = 0 if failure is None else misses + 1
            if failure is not None:
                _count_miss(member, str(failure), misses)
            else:
                _check_label(member, answer, version)
        # Also a server that has just lost its place.
        if member.state in (MemberState.starting, *AWAY):
            # A server that refuses the request may lack a route or the token: the check says so.
            if (failure is None or failure.status in REFUSALS) and now >= next_attempt:
                await _join_if_fit(member, client, fleet, run)
                # Checks of an unfit server become rarer and rarer.
                if member.state in EXAMINED:
                    attempt_s = servers.health_s
                else:
                    attempt_s = min(2 * attempt_s, LONGEST_S)
                next_attempt = time.monotonic() + attempt_s
            _give_up_late(member, failure, now - away_since, servers)  # unless it has just joined
        fleet.changed()
        await asyncio.sleep(servers.health_s)


def _give_up_late(
    member: Member, failure: ServerFailed | None, away_s: float, servers: ServersConfig
) -> None:
    """Give up a server that has been starting, or away, for too long."""
    limits = {
        MemberState.starting: ("start_s", servers.start_s),
        MemberState.restarting: ("dead_s", servers.dead_s),
    }
    # In any other state it answers, or has been given up already.
    name, limit_s = limits.get(member.state, ("", float("inf")))
    if away_s > limit_s:
        problem = f"does not answer: {failure}" if failure else f"cannot be used: {member.reason}"
        member.leave(MemberState.gone, f"{problem}; servers.{name}={limit_s:g} s are over")


async def _ask_label(
    client: ServerClient, run: Outside, dead_s: float
) -> str | ServerFailed | None:
    """Return the label of a server's weights, or why it did not answer.

    The label is the version that the server was sent, e.g. "7": with another one it has lost these
    weights. A run that sends adapters does not change the label. For it, return None if the server
    has any adapters, which counts as the right label, else "without adapters", which is a wrong
    one: the server was started again.
    """
    try:
        async with asyncio.timeout(dead_s):
            label = await client.weight_version()
            if run.plan.rank:  # of LoRA: the run sends adapters
                return None if await client.adapters() else "without adapters"
            return label
    except TimeoutError:
        return ServerFailed(f"its engine did not answer for servers.dead_s={dead_s:g} s")
    except ServerFailed as error:
        return error


def _check_label(member: Member, label: object, version: int | None) -> None:
    """Drop a server that has lost the weights of `version`, or else trust a suspect one again.

    `label` is the answer of `_ask_label`: the version that the server was sent last, e.g. "7".
    None: the run sends adapters, which do not change the label, and the server has some.
    `version` is that of the server's weights when it was asked. If it got others meanwhile, the
    label says nothing about them.
    """
    is_wrong = label is not None and label != str(version)
    if is_wrong and member.version == version:
        member.leave(
            MemberState.restarting,
            f"has weights labelled {label!r}, not {version}: it was started again",
        )
    elif member.state is MemberState.suspect:
        member.state = MemberState.live


def _count_miss(member: Member, reason: str, misses: int) -> None:
    """Count an examination without an answer. After `FAULTS` in a row the server is lost."""
    took_dead_s = "did not answer for" in reason  # `_ask_label` has waited for all of dead_s
    if misses >= FAULTS or took_dead_s:
        member.leave(MemberState.restarting, f"does not answer: {reason}")
    else:
        member.state = MemberState.suspect


async def _join_if_fit(member: Member, client: ServerClient, fleet: Members, run: Outside) -> None:
    """Add a server that answers to the fleet, if it has what the run needs."""
    try:
        facts, reasons = await inspect(client, member.url, run)
    except ServerFailed as error:
        member.reason = str(error)
        return
    member.unfit = bool(reasons)
    if reasons:
        member.reason = "\n".join(reasons)
        return
    if run.has_states and _state_format(facts) is None:
        warnings.warn(
            f"{member.url} does not say in which format it keeps the states of recurrent layers; "
            f"they must be in float32: start it with {STATES_FLAG}",
            RuntimeWarning,
            stacklevel=2,
        )
    record = ServerRecord(
        number=member.number,
        condition=Condition.ready,
        wrapper=0,  # no process of ours starts it again
        # Counted as a new start, so that answers to requests from before are dropped: it may have
        # been started again, and has to get the weights in any case.
        boot=member.boot + 1,
        url=member.url,
        token=run.token,
        version=facts.version,
        world_size=facts.world_size,
    )
    await fleet.joined(member, record)
