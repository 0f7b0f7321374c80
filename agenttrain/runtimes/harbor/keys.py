"""Every key of Harbor's task.toml (schema 1.4, Harbor 0.26), and what becomes of it here.

A key that is missing here is refused by name: a task that asks for more than it gets would be
another task.
"""

from __future__ import annotations

from enum import StrEnum

ENVIRONMENT = "environment"
VERIFIER_ENVIRONMENT = "verifier.environment"


class Use(StrEnum):
    """What becomes of a key."""

    used = "used"
    ignored = "ignored"
    """It describes the task, or has no meaning here; nothing depends on it."""
    refused = "refused"
    """A task that sets it is refused with the key's name."""


_PLACE = {
    "build_timeout_sec": Use.used,
    "docker_image": Use.used,
    "os": Use.used,
    "cpus": Use.used,
    "memory_mb": Use.used,
    "memory": Use.used,
    "storage_mb": Use.used,
    "storage": Use.used,
    "gpus": Use.refused,
    "gpu_types": Use.refused,
    "tpu": Use.refused,
    "mcp_servers": Use.refused,
    "env": Use.used,
    "skills_dir": Use.refused,
    "healthcheck": Use.used,
    "workdir": Use.used,
    "network_mode": Use.used,
    "allowed_hosts": Use.used,
    "allow_internet": Use.used,
}
_AGENT = {
    "timeout_sec": Use.used,
    "user": Use.used,
    "network_mode": Use.refused,
    "allowed_hosts": Use.refused,
}
_VERIFIER = {
    "timeout_sec": Use.used,
    "env": Use.used,
    "user": Use.used,
    "environment_mode": Use.used,
    "collect": Use.used,
    "network_mode": Use.refused,
    "allowed_hosts": Use.refused,
}
_HEALTHCHECK = ("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec")
_HEALTH = dict.fromkeys((*_HEALTHCHECK, "retries"), Use.used)
_COLLECT = {
    "command": Use.used,
    "timeout_sec": Use.used,
    "user": Use.used,
    "service": Use.refused,
}
_ARTIFACT = {
    "source": Use.used,
    "destination": Use.ignored,
    "exclude": Use.refused,
    "service": Use.refused,
}


def _below(section: str, keys: dict[str, Use]) -> dict[str, Use]:
    return {f"{section}.{key}": use for key, use in keys.items()}


KEYS: dict[str, Use] = {
    "schema_version": Use.used,
    "version": Use.used,
    "source": Use.ignored,
    "task.name": Use.used,
    **dict.fromkeys((f"task.{k}" for k in ("version", "description", "authors")), Use.ignored),
    "task.keywords": Use.ignored,
    "metadata": Use.ignored,
    **_below(ENVIRONMENT, _PLACE),
    **_below(f"{ENVIRONMENT}.healthcheck", _HEALTH),
    **_below("agent", _AGENT),
    **_below("verifier", _VERIFIER),
    **_below(VERIFIER_ENVIRONMENT, {**_PLACE, "healthcheck": Use.refused}),
    **_below("verifier.collect", _COLLECT),
    "solution.env": Use.used,
    "artifacts": Use.used,
    **_below("artifacts", _ARTIFACT),
    "steps": Use.used,
    **_below("steps", dict.fromkeys(("name", "min_reward", "artifacts"), Use.used)),
    **_below("steps.artifacts", _ARTIFACT),
    **_below("steps.agent", {**_AGENT, "user": Use.refused}),
    **_below("steps.verifier", _VERIFIER),
    **_below(f"steps.{VERIFIER_ENVIRONMENT}", {**_PLACE, "healthcheck": Use.refused}),
    **_below("steps.verifier.collect", _COLLECT),
    **_below("steps.healthcheck", _HEALTH),
    "multi_step_reward_strategy": Use.used,
}
"""Dotted key -> what becomes of it. Keys of tables in a list have the list's name."""
REASONS = {
    "gpus": "containers here have no GPU",
    "gpu_types": "containers here have no GPU",
    "tpu": "containers here have no TPU",
    "mcp_servers": "declare them in `tools` instead (tools=mcp)",
    "skills_dir": "the run's own loop reads no skills",
    "allowed_hosts": "one network holds for the whole task: [environment].allowed_hosts",
    "network_mode": "one network holds for the whole task: [environment].network_mode",
    "service": "containers of several services are not made",
    "exclude": "leave it out: the whole folder is copied",
    "user": "one user holds for the whole task: [agent].user",
    "healthcheck": "the container of the tests starts without one",
}
"""Last word of a refused key -> why, and what to do."""
HARMLESS = {"service": ("main", None), "gpus": (0,)}
"""Values of refused keys that ask for nothing."""
