"""The checks that span sections of the settings, or read files: one list, `CHECKS`.

A bound stands on its field, and a section alone is checked in its `config.py`. Each check here
declares the sections that it reads, and yields one line per problem, ``key=value: problem;
remedy``. `validate` and `check_for_verb` walk the list for every command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

from agenttrain.algorithms.config import CorrectionLevel, CorrectionMode, load_objective
from agenttrain.commands.slurm.config import job_problems
from agenttrain.data.config import HOLD_OUT, ROLLOUT_ROWS, SOURCES, SourceConfig, has_test_rows
from agenttrain.engines.registry import OutsideEngine, spec_of
from agenttrain.health.config import StopWhenConfig
from agenttrain.launch.config import DistributedName
from agenttrain.settings.async_checks import async_problems
from agenttrain.settings.command_line import CHECK
from agenttrain.settings.components import SECTIONS, code_problems, section_problems
from agenttrain.settings.engine_checks import (
    WITHOUT_REPLAY,
    engine_problems,
    route_recording_problems,
    typed_engine,
)
from agenttrain.settings.mixture import (
    mixture_problems,
    problems_by_source,
    single_source_problems,
)
from agenttrain.settings.overrides import as_typed, key_of
from agenttrain.settings.role_checks import role_problems, used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.sandbox.config import RUNTIME
from agenttrain.tracking.config import tracker_problems
from agenttrain.tracking.names import METRICS, metric_row
from agenttrain.training.config import Dtype, Init, MixedPrecision, ModelConfig, Schedule, Transport
from agenttrain.types import ConfigError
from agenttrain.utils.expressions import compiled
from agenttrain.utils.model_path import (
    BASE_QUANTIZATION,
    PARTS,
    model_folder,
    template_file,
    uses_dora,
)
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import raise_config_error, shown
from agenttrain.utils.text_templates import TextTemplate

DIVISORS = 6
"""Number of divisors that are suggested, the nearest."""
LARGEST_DIVISOR_TRIED = 10**6
BUNDLED_REWARDS = "agenttrain.rewards.builtin."
ADAPTERS = "agenttrain.environments.adapters."
SUBMIT = "submit"
"""Verb of the checks of `check_submission`."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of settings that depend on each other, for a run of any verb.

    Example: `tasks_per_step` has to be a multiple of `algorithm.minibatches`.
    """

    problems: Callable[[RunConfig], Iterator[str]]
    """Yields one line for each problem."""
    reads: tuple[str, ...]
    """Sections that it reads."""
    whole: bool = False
    """True: it looks at a mixture as a whole; False: at each of its sources."""

    def of_run(self, config: RunConfig) -> Sequence[str]:
        """Return the problems of a run, or of its sources."""
        if self.whole:
            return list(self.problems(config))
        return problems_by_source(config, self.problems)


@dataclass(frozen=True, slots=True)
class VerbCheck:
    """A check of settings that are fine by themselves, but not for each verb."""

    problems: Callable[[RunConfig, str, Sequence[str]], Iterator[str]]
    """Called with the settings, the verb, and the overrides that were typed."""
    reads: tuple[str, ...]
    """Sections that it reads."""
    skips: tuple[str, ...] = ()
    """Verbs to which the settings do not matter."""
    only: tuple[str, ...] = ()
    """The verbs to which alone they matter; empty: to all but `skips`."""
    imports: bool = False
    """True: it imports modules of the user's, so it runs after all others have passed."""
    whole: bool = False
    """True: it looks at a mixture as a whole; False: at each of its sources."""

    def of_run(self, config: RunConfig, verb: str, overrides: Sequence[str]) -> Sequence[str]:
        """Return the problems of a run, or of its sources."""
        if self.whole:
            return list(self.problems(config, verb, overrides))
        return problems_by_source(config, lambda view: self.problems(view, verb, overrides))


def validate(
    config: RunConfig,
    model_parts: Collection[str] = tuple(PARTS),
    *,
    code: Collection[str] = SECTIONS,
) -> None:
    """Raise ConfigError with every problem of a run of any verb, one per line.

    The model's folder must have the `model_parts` (keys of PARTS, such as its tokenizer). Once all
    else is valid, the modules that the sections `code` name are imported and their parameters
    checked. Leave out the sections of a recorded run whose code the user does not trust.
    """
    # The others, VerbCheck, need the verb: `check_for_verb` walks them.
    checks = (check for check in CHECKS if isinstance(check, Check))
    problems = [problem for check in checks for problem in check.of_run(config)]
    try:
        model_folder(config.model.path, model_parts, revision=config.model.revision)
    except ConfigError as error:
        problems.append(str(error))
    # In a mixture of sources, `view` is the run as one source sees it. Else it is `config`.
    raise_config_error(
        problems or problems_by_source(config, lambda view: code_problems(view, code))
    )


def _sizes(config: RunConfig) -> Iterator[str]:
    """Check the size of a step's batch and the lengths of completions."""
    tasks, algorithm = config.tasks_per_step, config.algorithm
    if algorithm.group_size * tasks < 2:
        yield f"tasks_per_step={tasks}: one rollout a step has nothing to be compared with"
    if algorithm.minibatches >= 1 and tasks % algorithm.minibatches:
        # Suggest divisors near the typed number. A divisor d has a partner, tasks / d, and the
        # smaller of the two is at most the root.
        candidates = range(1, min(isqrt(max(tasks, 0)), LARGEST_DIVISOR_TRIED) + 1)
        divisors = {d for n in candidates if tasks % n == 0 for d in (n, tasks // n)}
        nearest = sorted(divisors, key=lambda divisor: abs(divisor - algorithm.minibatches))
        suggestions = ", ".join(map(str, sorted(nearest[:DIVISORS])))
        yield (
            f"algorithm.minibatches={algorithm.minibatches}: does not divide "
            f"tasks_per_step={tasks}; take one of {suggestions}"
        )
    rollout, context = config.rollout, config.engine.max_context
    if rollout.max_turn_tokens > rollout.max_completion_tokens:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens}: more than the whole completion "
            f"may have; lower it, or raise "
            f"rollout.max_completion_tokens={rollout.max_completion_tokens}"
        )
    if context is not None and rollout.max_turn_tokens >= context:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens}: leaves no room for a prompt in "
            f"engine.max_context={context}; lower one or raise the other"
        )


def _compaction(config: RunConfig) -> Iterator[str]:
    """Check that a context which is about to be compacted fits into the engine's.

    After `compact_at` tokens come one more turn and the summary, if there is one. The request for
    the summary is not counted: its tokens depend on the tokenizer.
    """
    rollout, context = config.rollout, config.engine.max_context
    if rollout.compact_at is None or context is None:
        return
    summary = rollout.summary_tokens if rollout.compaction == "summary" else 0
    needed = rollout.compact_at + rollout.max_turn_tokens + summary
    if needed > context:
        also = f" and rollout.summary_tokens={summary}" if summary else ""
        yield (
            f"rollout.compact_at={rollout.compact_at}: with rollout.max_turn_tokens="
            f"{rollout.max_turn_tokens}{also} that is {needed} tokens, and engine.max_context="
            f"{context}; lower one of them, or raise engine.max_context"
        )


def _agent(config: RunConfig) -> Iterator[str]:
    """With an outside agent, check settings that have no effect with it, and its concurrency."""
    agent, rollout = config.agent, config.rollout
    if not agent.outside:
        return
    if config.environment:
        name = next(iter(config.environment))
        yield (
            f"environment.{name}: has no effect with agent=endpoint, whose program has its own; "
            "leave it out, or set agent=none"
        )
    if agent.port and config.distributed.name is not DistributedName.single:
        yield (
            f"agent.port={agent.port}: with distributed={config.distributed.name} each process of "
            "the run has an endpoint of its own; leave it out"
        )
    if config.user:
        yield (
            f"user._target_={config.user.get('_target_')}: an outside agent holds its own "
            "conversation; leave user out, and let the agent ask its user"
        )
    if rollout.compact_at is not None:
        yield (
            f"rollout.compaction={rollout.compaction}: an outside agent keeps its own context; "
            "leave compaction and compact_at out"
        )
    if rollout.timeout_s is not None:
        yield (
            f"rollout.timeout_s={rollout.timeout_s:g}: has no effect with agent=endpoint; set "
            "agent.timeout_s"
        )
    awaited_rollouts = config.rollouts_in_lockstep
    if agent.concurrency < awaited_rollouts:
        yield (
            f"agent.concurrency={agent.concurrency}: with rollout.deterministic the engine waits "
            f"for engine.max_rows={config.engine.max_rows} rollouts at once; set "
            f"agent.concurrency={awaited_rollouts}, a lower engine.max_rows, or "
            "rollout.deterministic=false"
        )


FILES = "agenttrain.tools.builtin.files.Files"
HARBOR = "agenttrain.data.harbor.harbor_rows"


def _runtime(config: RunConfig) -> Iterator[str]:
    """Check what needs a container for each rollout, and what contradicts containers."""
    if config.runtime.has_machines:
        yield from _problems_in_containers(config)
    else:
        yield from _problems_without_containers(config)


def _problems_without_containers(config: RunConfig) -> Iterator[str]:
    """Yield settings that need a container for each rollout."""
    agent = config.agent
    sections = {f"tools.{name}": section for name, section in config.tools.items()}
    sections["data.train"] = config.data.train
    components = {key: part for key, part in sections.items() if isinstance(part, Mapping)}
    # The bundled tool for files and Harbor's tasks work in a rollout's container.
    needs = [key for key, part in components.items() if part.get("_target_") in (FILES, HARBOR)]
    # A tool's setting `sandbox=runtime` runs its code there.
    needs += [
        f"{key}.sandbox={RUNTIME}"
        for key, part in components.items()
        if part.get("sandbox") == RUNTIME
    ]
    for key in needs:
        yield f"{key}: needs a container for each rollout; add runtime=podman"
    if agent.install is not None:
        yield f"agent.install={agent.install}: needs an image to install in; add runtime=podman"


def _problems_in_containers(config: RunConfig) -> Iterator[str]:
    """Yield settings of an outside agent that contradict containers, or have too few of them."""
    runtime, agent = config.runtime, config.agent
    # Only clients such as podman build images with our script in them.
    if agent.install is not None and not runtime.is_client:
        yield (
            f"agent.install={agent.install}: runtime._target_={runtime._target_} makes its images "
            "itself; install there, and leave it out"
        )
    if agent.sandbox != "none":
        yield (
            f"agent.sandbox={agent.sandbox}: agents run in the containers of runtime="
            f"{runtime.name}; leave it out"
        )
    if agent.reuse:
        yield (
            "agent.reuse=true: a process cannot go from one rollout's container to the next; leave "
            "it out, or set runtime=bwrap"
        )
    awaited_rollouts = config.rollouts_in_lockstep
    if runtime.max_running < awaited_rollouts:
        yield (
            f"runtime.max_running={runtime.max_running}: with rollout.deterministic the engine "
            f"waits for {awaited_rollouts} rollouts at once; set "
            f"runtime.max_running={awaited_rollouts}, or rollout.deterministic=false"
        )


def _reference(config: RunConfig) -> Iterator[str]:
    """Check that a run with adapters has no reference that follows the policy (`sync_steps`)."""
    kl = config.algorithm.kl
    if kl is not None and kl.reference is not None and config.model.lora.rank:
        yield (
            f"algorithm.kl.reference.sync_steps={kl.reference.sync_steps}: the reference of a "
            f"model with adapters (model.lora.rank={config.model.lora.rank}) is the model as the "
            "run began, and two sets of adapters cannot be mixed; leave it out"
        )


def _quantization(config: RunConfig) -> Iterator[str]:
    """Check a base in 4 bits against the ways in which its weights would be used."""
    if config.model.quantization is None:
        return
    key = f"model.quantization={config.model.quantization}"
    if config.training.mixed_precision is not MixedPrecision.no:
        yield (
            f"training.mixed_precision={config.training.mixed_precision}: with {key} layers "
            "compute in model.dtype; leave it out, and set model.dtype=bfloat16"
        )
    if config.distributed.cpu_offload:
        yield (
            f"distributed.cpu_offload=true: is not made for {key}, whose scales stay beside the "
            "layers that multiply; set distributed.cpu_offload=false, or leave model.quantization "
            "out"
        )
    if config.weight_sync.transport is Transport.lora:
        yield (
            f"weight_sync.transport=lora: with {key} servers would add the adapters to the weights "
            "of the model's files, which are others than those in 4 bits; leave it out, which "
            "sends these weights with the adapters merged"
        )
    if config.training.compile:
        yield (
            f"training.compile=true: is not made for {key}; set training.compile=false, or leave "
            "model.quantization out"
        )


def _texts_and_files(config: RunConfig) -> Iterator[str]:
    """Check expressions and templates of `data`, and that the files that settings name exist."""
    expressions = {f"data.map.{name}": text for name, text in config.data.map.items()}
    if config.data.where is not None:
        expressions["data.where"] = config.data.where
    for key, text in expressions.items():
        try:
            compiled(text, key)
        except ValueError as error:
            yield str(error)
    teacher = config.algorithm.teacher
    prompts = {"data.prompt": config.data.prompt}
    prompts["algorithm.teacher.prompt"] = None if teacher is None else teacher.prompt
    for key, prompt in prompts.items():
        try:
            if prompt is not None:
                TextTemplate(prompt, key)
        except ValueError as error:
            yield str(error)
    template = config.chat_template
    if template.path is not None:
        try:
            template_file(template.path, template.revision)
        except ConfigError as error:
            yield str(error)
    path = config.response_schema.path
    if path is not None and not Path(path).expanduser().is_file():
        is_folder = Path(path).expanduser().is_dir()
        problem = "is a folder; name the file in it" if is_folder else "there is no such file"
        yield f"response_schema.path={path}: {problem}"


def _schedule(config: RunConfig) -> Iterator[str]:
    """Check the schedule of the learning rate against the steps."""
    optimizer, steps = config.optimizer, config.steps
    warmup = optimizer.warmup_steps
    if steps <= warmup:
        yield (
            f"optimizer.warmup_steps={warmup}: the warm-up would not end in steps={steps}; "
            "lower it (0: no warm-up), or raise steps"
        )
    if optimizer.schedule is Schedule.warmup_stable_decay:
        decay, after_warmup = optimizer.schedule_options.get("num_decay_steps"), steps - warmup
        if not 1 <= (decay or 0) <= after_warmup:
            yield (
                f"optimizer.schedule_options.num_decay_steps={shown(decay)}: "
                f"optimizer.schedule=warmup_stable_decay needs a whole number from 1 to "
                f"{after_warmup}, the steps after the warm-up"
            )


def _precision(config: RunConfig) -> Iterator[str]:
    """Check that mixed precision has weights in float32 to keep."""
    model, mixed = config.model, config.training.mixed_precision
    if model.dtype is Dtype.bfloat16 and mixed is not MixedPrecision.no:
        yield (
            f"training.mixed_precision={mixed}: the weights are model.dtype=bfloat16 already; set "
            "training.mixed_precision=no, or model.dtype=float32"
        )


def _saved_adapters(config: RunConfig) -> Iterator[str]:
    """Check adapters in the folder `model.path` against the settings: their rank and their base."""
    model = config.model
    file = Path(model.path).expanduser() / "adapter_config.json"
    if not file.is_file():
        return
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = saved["r"], float(saved["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        yield f"model.path={model.path}: adapter_config.json in it is not peft's of LoRA ({error})"
        return
    if (rank, alpha) != (model.lora.rank, model.lora.alpha):
        yield (
            f"model.lora.rank={model.lora.rank} model.lora.alpha={model.lora.alpha:g}: model.path "
            f"holds other adapters; set model.lora.rank={rank} model.lora.alpha={alpha:g} to go on "
            "with them, or merge them first (agenttrain export)"
        )
    yield from base_problems(model, file.parent)


def base_problems(model: ModelConfig, folder: Path) -> Iterator[str]:
    """Yield the problem if the adapters in a folder do not go with the base of `model`.

    `BASE_QUANTIZATION` describes the base in 4 bits that they were trained on. `CHECKS` look at a
    local folder alone, so this is called again for adapters of the hub.
    """
    if model.quantization is not None and uses_dora(folder):
        yield (
            f"model.quantization={model.quantization}: model.path={model.path} holds adapters with "
            "use_dora=true, which read the base's weights in 16 bits; leave model.quantization "
            "out, or merge them first (agenttrain export)"
        )
        return
    file = folder / BASE_QUANTIZATION
    if not file.is_file():
        return
    keys = ("quantization", "double_quantization")
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        trained_on = {key: saved[key] for key in keys}
    except (ValueError, KeyError, TypeError) as error:
        yield f"model.path={model.path}: {file.name} in it cannot be read ({error}); copy it again"
        return
    if any(getattr(model, key) != value for key, value in trained_on.items()):
        remedy = " ".join(f"model.{key}={shown(value)}" for key, value in trained_on.items())
        yield (
            f"model.quantization={shown(model.quantization)}: model.path={model.path} holds "
            f"adapters that were trained on another base ({BASE_QUANTIZATION}); set {remedy}, or "
            "merge them first (agenttrain export)"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    """Check that there are rows to evaluate on, and that they are not those of the training."""
    evaluation, data = config.eval, config.data
    if config.checkpoint.keep_best and (evaluation.every is None or evaluation.questions == 0):
        yield (
            "checkpoint.keep_best=true: nothing says which one is the best; add eval.every=… and "
            "eval.questions=…"
        )
    if not has_test_rows(data) and evaluation.every is not None:
        yield f"eval.every={evaluation.every}: data.test names no rows; {HOLD_OUT}"
    # Without data.path the user has typed the same file for both splits on purpose.
    has_same_rows = data.train == data.test and data.path is not None
    # Harbor's tasks are evaluated on the trained folder on purpose: the question is its pass@k.
    is_harbor = has_same_rows and data.train.get("_target_") == HARBOR
    if data.test_fraction is None and has_same_rows and not is_harbor and evaluation.questions:
        # In a mixture the source alone is left out of evaluations.
        section = "data.eval" if isinstance(data, SourceConfig) else "eval"
        yield (
            "data.test: has the same rows as data.train; hold some out with "
            "data.test_fraction=0.1, or choose others with data.test.split=… or "
            f"data.test.path=…, or {section}.questions=0"
        )


def _guards(config: RunConfig) -> Iterator[str]:
    """Check that a limit on the KL has a KL to watch."""
    limit = config.guards.kl.limit
    if limit is not None and config.algorithm.kl is None:
        yield (
            f"guards.kl.limit={limit}: there is no KL; set algorithm.kl.beta=…, or leave the guard "
            "out"
        )


def distributed_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings that contradict `distributed`, or have no effect with it."""
    mixed = config.training.mixed_precision
    if config.training.offload_during_rollouts and config.distributed.cpu_offload:
        yield (
            "training.offload_during_rollouts=true: has no effect with "
            "distributed.cpu_offload=true, which keeps the optimizer in host memory during updates "
            "too; leave one of them out"
        )
    if config.distributed.name is DistributedName.fsdp2 and mixed is MixedPrecision.fp16:
        yield (
            "training.mixed_precision=fp16: with distributed=fsdp2 each process would scale a part "
            "of the gradient; set training.mixed_precision=bf16, or distributed=ddp"
        )
    context = config.distributed.context_parallel
    if config.training.compile and context > 1:
        yield (
            f"training.compile=true: is not made for distributed.context_parallel={context}, whose "
            "layers wait for other processes; set training.compile=false"
        )
    if config.training.compile and config.distributed.name is DistributedName.fsdp2:
        yield (
            "training.compile=true: is not made for distributed=fsdp2, which gathers a layer's "
            "weights around its forward pass; set training.compile=false, or distributed=ddp"
        )


def _environments(config: RunConfig) -> Iterator[str]:
    """Check that some reward reads the rewards of a bundled adapter with `rewards=turns`."""
    if config.algorithm.turn_credit is not None:
        return  # the algorithm reads them
    rewards = [section for section in config.reward.values() if isinstance(section, Mapping)]
    targets = [str(section.get("_target_")) for section in rewards]
    if not all(target.startswith(BUNDLED_REWARDS) for target in targets):
        return  # a function of the user's may read them
    for name, section in config.environment.items():
        by_turn = isinstance(section, Mapping) and section.get("rewards") == "turns"
        is_adapter = by_turn and str(section.get("_target_")).startswith(ADAPTERS)
        if is_adapter and not any(target.endswith(".turn_rewards") for target in targets):
            yield (
                f"environment.{name}.rewards=turns: no reward reads the rewards of turns; add "
                "reward=[turn_rewards], or leave it out"
            )


def check_for_verb(verb: str, config: RunConfig, overrides: Sequence[str] = ()) -> None:
    """Raise ConfigError for settings that do not go with this verb; `overrides` are the typed ones.

    Checks that import the user's modules come last: only if no other check has a problem.
    """
    checks = [
        check
        for check in CHECKS
        if isinstance(check, VerbCheck)
        and verb not in check.skips
        and (not check.only or verb in check.only)
    ]
    for imports in (False, True):
        raise_config_error(
            problem
            for check in checks
            if check.imports is imports
            for problem in check.of_run(config, verb, overrides)
        )


def check_submission(config: RunConfig) -> None:
    """Raise ConfigError if a job with the settings of `config.slurm` cannot run its processes.

    `check_for_verb` comes besides, for the verb that the job runs.
    """
    checks = [c for c in CHECKS if isinstance(c, VerbCheck) and SUBMIT in c.only]
    raise_config_error(problem for check in checks for problem in check.of_run(config, SUBMIT, ()))


def _untrained_model(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check that an agent that acts does not begin with random weights, as a new run would."""
    if config.model.init is Init.random and config.resume is None:
        yield (
            "model.init=random: such a model cannot act yet; train it with agenttrain sft, and "
            "name what comes out: model.path=<run>/checkpoints/latest model.init=pretrained"
        )


def engine_of_play(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check for a typed engine with weights of its own; `play` replaces that of a saved run.

    An engine from outside is checked by a second call, once its module is imported.
    """
    typed = typed_engine(overrides)
    if typed is None or isinstance(config.engine, OutsideEngine):
        return
    if spec_of(config.engine).own_weights:
        yield (
            f"{typed}: agenttrain play samples from the model in its own process; leave it out, or "
            "use it with agenttrain serve"
        )


def _task_rows(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check that tasks are no recorded rollouts."""
    needs_tasks = verb in ("train", "eval")
    for split in ("train", "test") if needs_tasks else ():
        if getattr(config.data, split).get("_target_") == ROLLOUT_ROWS:
            yield (
                f"data.{split}._target_={ROLLOUT_ROWS}: rollouts hold the answers and are learned "
                "by agenttrain sft; name the tasks, as the run that recorded them did"
            )


def _test_rows(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check that `agenttrain eval` has rows, of one source of a mixture at least."""
    if verb != "eval" or has_test_rows(config.data):
        return
    if config.data.sources:
        first = f"{SOURCES}.{next(iter(config.data.sources))}"
        yield f"{SOURCES}: no source has rows to evaluate on; add {first}.test._target_=…"
    elif config.data.test:
        yield "data.test: names no rows to evaluate on; add data.test.path=<file>"
    else:
        yield "data.test: names no rows to evaluate on; add data.test._target_=…"


def _teacher_folder(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    teacher = config.algorithm.loaded_teacher
    if teacher is not None:
        yield from _folder_problem(teacher.path, teacher.revision, "algorithm.teacher.path")


def _role_folders(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    for name, role in used_roles(config, verb).items():
        assert role.model is not None
        yield from _folder_problem(role.model, role.revision, f"roles.{name}.model")


def _folder_problem(path: str, revision: str | None, key: str) -> Iterator[str]:
    try:
        model_folder(path, revision=revision, key=key)
    except ConfigError as error:
        yield str(error)


def _router_replay(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check that choices of experts can be recorded, by an engine of ours, and replayed."""
    if not config.algorithm.replays_routes:
        return
    if config.training.compile:
        yield (
            "algorithm.router_replay=rollout: compiled layers do not let the choices of their "
            "routers be replaced; set training.compile=false, or leave it out"
        )
    yield from route_recording_problems(config)


def _own_objective(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Import an objective of the user's, check its metrics, and call it once."""
    objective = config.algorithm.objective
    if not objective.is_own:
        return
    try:
        load_objective(config.algorithm)
        for name in objective.registered.metrics:
            if name == "step" or metric_row(name) is not None:
                yield (
                    f"algorithm.objective._target_={objective.name}: {name} is a metric of every "
                    f"run; call it my/{name}"
                )
                return
        from agenttrain.algorithms.trial import try_objective  # imports torch

        try_objective(config.algorithm)
    except ConfigError as error:
        yield str(error)


ACTING = ("train", "eval", "play", "serve", CHECK)
"""Verbs of runs that sample from the model as it is."""
UNTRAINED = ("eval", "sft", "plan", "play", "serve")
"""Verbs that do not train on sampled tokens."""
SUPERVISED = ("Training", "Time", "Cost and speed", "Supervised")
"""Sections of METRICS that supervised learning writes."""


def _stop_when(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check that the verb writes the metric of `stop_when`.

    Supervised learning has no reward and ignores the default metric, unless `overrides` set it.
    """
    name, objective = config.stop_when.metric, config.algorithm.objective
    if not config.stop_when.enabled:
        return
    is_typed = any(key_of(override).startswith("stop_when") for override in overrides)
    if verb == "sft" and name == StopWhenConfig.metric and not is_typed:  # the default metric
        return
    sections = SUPERVISED if verb == "sft" else tuple(METRICS)
    rows = [row for section in sections for row in METRICS[section]]
    names_of_objective = () if verb == "sft" or objective.is_own else objective.registered.metrics
    is_metric = metric_row(name) in rows or name in names_of_objective
    # The metrics of an objective of the user's are unknown before its module is imported.
    may_be_metric = objective.is_own and verb != "sft"
    if is_metric or may_be_metric:
        return
    names = [*(row.pattern for row in rows), *names_of_objective]
    problem = f"is no metric{did_you_mean(name, names)}"
    if verb == "sft" and metric_row(name) is not None:
        problem = "supervised learning has no such metric; set stop_when.metric=loss, say"
    yield f"stop_when.metric={name}: {problem}; docs/reference/metrics.md lists them"


def _structured(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Check settings that would treat tokens sampled under a grammar as the policy's own.

    A grammar sets the probability of what it rules out to 0 and raises the others in proportion. To
    learn from such tokens each is weighed with its probability under the policy divided by that
    under the grammar, which `algorithm.correction` does.
    """
    if not config.rollout.structured_calls:
        return
    key = "rollout.structured_calls=true"
    correction, kl = config.algorithm.correction, config.algorithm.kl_in_loss
    # The level `geometric` takes the mean ratio of all tokens, which is no token's weight.
    if correction is None or correction.level is CorrectionLevel.geometric:
        setting = f"correction.level={correction.level}" if correction else "correction=null"
        yield (
            f"algorithm.{setting}: with {key} completions are sampled from the policy renormalised "
            "over what the grammar allows, and only the ratio of both makes the gradient the "
            "policy's; set algorithm.correction.level=token or sequence, with "
            "algorithm.behaviour=recomputed, or leave structured_calls out"
        )
    elif correction.min is not None and correction.mode is CorrectionMode.truncate:
        yield (
            f"algorithm.correction.min={correction.min}: with {key} it would raise the weight of "
            "tokens that the policy would hardly have written; leave it out, or set "
            "algorithm.correction.mode=mask"
        )
    if kl is not None:
        yield (
            f"algorithm.kl.beta={kl.beta}: with {key} tokens are not the policy's own, and nothing "
            "weighs their KL; set algorithm.kl.place=reward, whose KL is weighed with the reward, "
            "or leave algorithm.kl out"
        )
    threshold = config.algorithm.off_policy_threshold
    if threshold is not None:
        yield (
            f"algorithm.off_policy_threshold={threshold}: with {key} it would take "
            "what the grammar rules out for a policy that has moved; leave it out"
        )
    limit = config.guards.logprob_gap.limit
    if limit is not None:
        # The guard watches for logprobs of engine and trainer that differ by mistake.
        yield (
            f"guards.logprob_gap.limit={limit}: with {key} the gap of a token holds what the "
            "grammar ruled out before it, without a bound; add guards.logprob_gap.limit=null"
        )


RL_ONLY = (
    *("algorithm", "reward", "engine", "weight_sync", "tasks_per_step", "rollout", "guards"),
    *("user", "async_training"),
    *("data.curriculum", "checkpoint.keep_best"),
    *(f"eval.{name}" for name in ("samples", "greedy", "group_by", "temperature")),
    *(f"eval.{name}" for name in ("top_p", "top_k", "min_p", "tools")),
    *(f"eval.max_{name}" for name in ("turns", "turn_tokens", "completion_tokens")),
)
"""Sections and settings that supervised learning does not read."""
READ = ("rollout.max_result_tokens", "rollout.concurrency", "rollout.max_stuck_calls")
"""Settings of those sections that it reads."""
UNPLAYED = (
    *("sft", "slurm", "algorithm", "optimizer", "training", "reward", "stop_when", "user"),
    "async_training",
)
"""Sections without effect where an agent is only used."""
UNREAD = {
    "sft": (*RL_ONLY, "slurm"),
    "train": ("sft", "slurm"),
    "eval": (
        *("sft", "slurm", "data.curriculum", "stop_when", "async_training"),
        "algorithm.router_replay",
    ),
    "play": (*UNPLAYED, "data.curriculum"),
    "serve": (*UNPLAYED, "data", "tools", "rollout"),
}
"""Verb -> settings without effect in it."""


def _unread(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    for text in overrides:
        if has_no_effect(text, verb):
            yield f"{as_typed(text)}: has no effect in agenttrain {verb}; leave it out"


def has_no_effect(override: str, verb: str) -> bool:
    """Return True if `verb` does not read the setting of an override."""
    key = key_of(override).partition("@")[0]
    parts = key.split(".")
    # a.b.c: a, a.b and a.b.c, as UNREAD names settings and whole sections.
    prefixes = {".".join(parts[: end + 1]) for end in range(len(parts))}
    return key not in READ and bool(prefixes & set(UNREAD.get(verb, ())))


CHECKS: tuple[Check | VerbCheck, ...] = (
    Check(_sizes, ("tasks_per_step", "algorithm", "rollout", "engine")),
    Check(_compaction, ("rollout", "engine")),
    Check(
        _agent,
        (
            *("agent", "rollout", "environment", "distributed", "user", "engine"),
            *("tasks_per_step", "algorithm", "async_training"),
        ),
    ),
    Check(
        _runtime,
        (
            *("runtime", "agent", "tools", "data", "engine", "tasks_per_step", "algorithm"),
            *("rollout", "async_training"),
        ),
    ),
    Check(_reference, ("algorithm", "model")),
    Check(_quantization, ("model", "training", "distributed", "weight_sync")),
    Check(
        section_problems,
        ("algorithm", "tools", "environment", "reward", "user", "tracker", "data", "rollout"),
    ),
    Check(_texts_and_files, ("data", "algorithm", "chat_template", "response_schema")),
    Check(_schedule, ("optimizer", "steps")),
    Check(_precision, ("model", "training")),
    Check(_saved_adapters, ("model",)),
    Check(
        engine_problems,
        (
            *("engine", "rollout", "eval", "async_training", "weight_sync", "servers", "model"),
            *("distributed", "algorithm"),
        ),
    ),
    Check(
        role_problems,
        (
            *("roles", "reward", "user", "algorithm", "rollout", "distributed", "async_training"),
            *("engine", "data"),
        ),
        whole=True,
    ),
    Check(
        async_problems, ("async_training", "rollout", "algorithm", "engine", "weight_sync", "model")
    ),
    Check(_evaluation, ("eval", "data", "checkpoint")),
    Check(
        mixture_problems,
        (
            *("data", "tasks_per_step", "eval", "tools", "stop_tools", "environment", "reward"),
            *("agent", "runtime", "algorithm", "user", "checkpoint"),
        ),
        whole=True,
    ),
    Check(_guards, ("guards", "algorithm")),
    Check(distributed_problems, ("training", "distributed")),
    Check(lambda config: tracker_problems(config.tracker), ("tracker",)),
    Check(_environments, ("algorithm", "reward", "environment")),
    VerbCheck(_unread, ()),
    VerbCheck(_untrained_model, ("model",), only=ACTING),
    VerbCheck(engine_of_play, ("engine",), only=("play",)),
    VerbCheck(
        lambda config, verb, overrides: job_problems(config),
        ("slurm", "servers", "distributed"),
        only=(SUBMIT,),
        whole=True,
    ),
    VerbCheck(single_source_problems, ("data",), whole=True),
    VerbCheck(_task_rows, ("data",)),
    VerbCheck(_test_rows, ("data",), whole=True),
    VerbCheck(
        _router_replay,
        ("algorithm", "training", "engine", "rollout", "async_training"),
        skips=WITHOUT_REPLAY,
    ),
    VerbCheck(_structured, ("rollout", "algorithm", "guards"), skips=UNTRAINED),
    VerbCheck(_teacher_folder, ("algorithm",), skips=UNTRAINED),
    VerbCheck(_role_folders, ("roles", "reward", "user", "algorithm", "data")),
    VerbCheck(_stop_when, ("stop_when", "algorithm"), skips=("eval", "plan", "play", "serve")),
    VerbCheck(_own_objective, ("algorithm",), skips=UNTRAINED, imports=True),
)
"""Every check between sections, in the order of its messages."""
