"""Roles: the settings that name one, and checks of `roles` together with other sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agenttrain.engines.config import StartedServers
from agenttrain.engines.registry import OutsideEngine, names_with, spec_of
from agenttrain.engines.vllm_server.config import ROLES, RoleConfig
from agenttrain.engines.vllm_server.spec import OWNED
from agenttrain.launch.config import DistributedName
from agenttrain.settings.engine_checks import has_rollout_process
from agenttrain.settings.mixture import located, source_views
from agenttrain.settings.run_config import RunConfig
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.role_names import ROLE, role_named
from agenttrain.utils.sections import shown

VERBS_WITH_SERVERS = ("train", "eval")
"""Verbs whose runs start servers: of the policy and of roles."""
TEACHER = "algorithm.teacher.path"
POLICY = "servers"
"""Section of the policy's servers."""


def roles_named(config: RunConfig) -> dict[str, str]:
    """Return the settings that name a role, mapped to its name.

    A role is a model besides the policy, whose servers the run starts. A setting names it by the
    address ``role:judge``, in place of a URL. Example of the result: {"reward.judge.url": "judge",
    "algorithm.teacher.path": "teacher"}.
    """
    # The run as each source of a mixture sees it. A run without sources has one view, itself.
    views = source_views(config) or {"": config}
    addresses = {
        located(config, source, f"reward.{name}.url"): section.get("url")
        for source, view in views.items()
        for name, section in view.reward.items()
        if isinstance(section, Mapping)
    }
    addresses["user.url"] = config.user.get("url")
    teacher = config.algorithm.teacher
    addresses[TEACHER] = None if teacher is None else teacher.path
    return {
        key: role for key, address in addresses.items() if (role := role_named(address)) is not None
    }


def used_roles(config: RunConfig, verb: str) -> dict[str, RoleConfig]:
    """Return the roles whose servers a run of `verb` needs, in a fixed order."""
    if verb not in VERBS_WITH_SERVERS:
        return {}
    role_of_key = roles_named(config)
    if verb != "train":  # nothing is trained, so no teacher is asked
        role_of_key.pop(TEACHER, None)
    return {name: getattr(config.roles, name) for name in ROLES if name in role_of_key.values()}


def fleets(config: RunConfig, verb: str) -> dict[str, StartedServers]:
    """Return all servers that a run of `verb` starts on its machine, by the key of their section.

    The policy's come first; an engine from outside has none.
    """
    policy_servers: dict[str, StartedServers] = {}
    engine = config.engine
    if not isinstance(engine, OutsideEngine) and spec_of(engine).fleet:
        # Servers that somebody else starts, or the job on nodes of their own.
        elsewhere = config.servers.outside or config.servers.nodes
        policy_servers = {} if elsewhere else {POLICY: config.servers}
    roles = {f"roles.{name}": role for name, role in used_roles(config, verb).items()}
    return {**policy_servers, **roles}


def server_shares_gpu(config: RunConfig, gpus: int | None) -> bool:
    """Return True if the policy's server has the GPU of the trainer, the only one of `gpus`.

    A second server, or one of a role, finds no GPU there.
    """
    if gpus != 1 or config.distributed.name is not DistributedName.single:
        return False
    if [*fleets(config, "train")] != [POLICY] or config.servers.gpu_count > 1:
        return False
    return spec_of(config.engine).trainers_gpu_share is not None


def named_gpus(config: RunConfig, verb: str) -> tuple[int, ...]:
    """Return the GPUs that roles name, which the policy's servers leave alone."""
    return tuple(gpu for role in used_roles(config, verb).values() for gpu in role.gpus or ())


def role_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems of roles: one without servers, one that nothing names, reserved arguments.

    A role is a model besides the policy, such as the judge, whose servers the run starts.
    """
    role_of_key = roles_named(config)
    yield from _named_role_problems(config, role_of_key)
    yield from _set_role_problems(config, role_of_key)
    yield from _node_problems(config, role_of_key)
    temperature = config.rollout.temperature
    if TEACHER in role_of_key and temperature != 1:
        # A teacher scores the policy's tokens as a prompt. vLLM computes logprobs of a prompt at
        # temperature 1 only, and the policy's are computed at `rollout.temperature`.
        yield (
            f"rollout.temperature={shown(temperature)}: servers score at temperature 1, as vLLM "
            f"has no other for a prompt; set it to 1, or let {TEACHER} name a model"
        )


def _named_role_problems(config: RunConfig, role_of_key: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that name a role that does not exist, or has no model.

    `role_of_key` is the result of `roles_named`.
    """
    for key, role in role_of_key.items():
        if role not in ROLES:
            yield (
                f"{key}={ROLE}{role}: is no role{did_you_mean(role, ROLES)}; the roles are: "
                f"{', '.join(ROLES)}"
            )
        elif getattr(config.roles, role).model is None:
            yield (
                f"{key}={ROLE}{role}: roles.{role}.model is not set; name the model that its "
                f"servers have: roles.{role}.model=…"
            )


def _set_role_problems(config: RunConfig, role_of_key: Mapping[str, str]) -> Iterator[str]:
    """Yield roles with a model that no setting names, and vLLM's flags that are not theirs to set.

    `role_of_key` is the result of `roles_named`.
    """
    consumers = {
        "judge": "reward.judge.url=role:judge",
        "user": "user.url=role:user",
        "teacher": f"{TEACHER}=role:teacher",
    }
    for role in ROLES:
        model = getattr(config.roles, role).model
        if model is not None and role not in role_of_key.values():
            yield (
                f"roles.{role}.model={model}: nothing names role:{role}; set {consumers[role]}, "
                "or leave it out"
            )
        arguments = () if model is None else getattr(config.roles, role).args
        for name in arguments:
            flag = name.strip("-").replace("-", "_")
            if flag not in OWNED:  # vLLM's flags that agenttrain sets -> the policy's setting
                continue
            section, _, key = OWNED[flag].partition(".")
            # Roles have the keys of the policy's sections `engine` and `servers`. For other flags
            # there is no setting.
            remedy = f", set roles.{role}.{key}" if section in ("engine", "servers") else ""
            yield f"roles.{role}.args.{name}: is set by agenttrain; leave it out{remedy}"


def _node_problems(config: RunConfig, role_of_key: Mapping[str, str]) -> Iterator[str]:
    """Yield roles whose servers, on the first node, processes of other nodes cannot reach.

    `role_of_key` is the result of `roles_named`.
    """
    nodes = config.distributed.nodes
    if nodes == 1:
        return
    for key, role in role_of_key.items():
        if key == TEACHER:
            # The training processes of all nodes ask it.
            remedy = f"let {TEACHER} name a model"
        elif has_rollout_process(config):
            continue  # that process, on the first node, is the only one to ask it
        else:
            # An engine with servers would make the rollouts in such a process.
            remedy = f"give the address of a server, or set {names_with(fleet=True)}"
        yield (
            f"{key}={ROLE}{role}: with distributed.nodes={nodes} processes of other nodes would "
            f"ask its servers, which answer on the first node only; {remedy}"
        )
