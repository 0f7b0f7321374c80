"""Components of a run, before there are weights: tokenizer, chat, tools, data, rewards.

`prepare` builds and checks all of them, so that a tool that cannot be built, a template without a
certificate or a row with a mistake stops the run before anything expensive starts. The policy and
its engine are built afterwards, in `loading.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttrain.agents.runner import Agents, make_agent
from agenttrain.chat.certificate import Certificate
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.loading import load_chat
from agenttrain.chat.parsers.export import response_template
from agenttrain.data.build import Splits, build_tasks, check_needed_columns
from agenttrain.data.config import OnBadRow
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.mixture import MixedSource, Mixture, Questions, shares_of
from agenttrain.data.tasks import TaskSource, check_columns
from agenttrain.engines.base import Engine, Lockstep
from agenttrain.engines.vllm_server.roles import RoleServers, with_servers
from agenttrain.environments.environments import Environments, build_kinds
from agenttrain.environments.user import SimulatedUser, build_user
from agenttrain.rewards.rubric import Rubric, build_rubric
from agenttrain.rollout.collector import Collector, MetricNames, SourceTools, metric_names
from agenttrain.rollout.compaction import check_compaction
from agenttrain.rollout.config import RolloutConfig, RolloutRequest, tasks_of_round
from agenttrain.rollout.demonstration import REMEDY, BadDemonstration, Demonstrator
from agenttrain.rollout.monitoring import InFlight
from agenttrain.rollout.request import RolloutContext
from agenttrain.rollout.row_tools import RowTools, check_collisions, tool_sets
from agenttrain.runs.row_checks import RENDERED_TASKS, certify_tool_sets, check_rows, prompt_length
from agenttrain.runs.sampling import architecture_folder, placeholders_of, verify_model
from agenttrain.runtimes.base import MachineLost
from agenttrain.runtimes.machines import Machines, harbor_task, runtime_problems
from agenttrain.settings.components import REWARD, REWARD_TARGET, reward_sections
from agenttrain.settings.mixture import located, shares_tools, source_views
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.sandbox.config import INTERPRETER, RUNTIME
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.timeline import Timeline
from agenttrain.training.checkpoint_files import CheckpointError
from agenttrain.types import AgenttrainError, ConfigError, Rollout, Task
from agenttrain.utils.model_path import model_folder
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.temporary import TemporaryFolder

if TYPE_CHECKING:
    from agenttrain.training.world import World


def prepare(
    config: RunConfig,
    verb: str = "train",
    folder: Path | None = None,
    *,
    world: World | None = None,
) -> Components:
    """Build and check the components of a run of `verb`; errors name the key to change.

    `folder` is the run's. A model that is a checkpoint of ours is verified by all processes of
    `world` together. Raises CheckpointError if it is incomplete.
    """
    from agenttrain.runs.loading import check_model  # imports torch

    components = Components(config, verb, folder)
    # Cheapest first: files, architecture, template, then rows and everything that reads rows.
    if world is None:
        verify_model(config)
    else:
        with world.together("the files of model.path", CheckpointError, patient=True):
            verify_model(config, world.rank, world.size)
    if verb == "sft":  # `complete` checks the model for the other verbs
        check_model(config, verb)
    components.certificate.raise_if_refused()
    complete(components)
    return components


def complete(components: Components) -> None:
    """Build and check the components that come after the template's certificate.

    The certificate says what the chat template can render. The parts are the sources of a mixture,
    or the whole run. `prepare` calls it. `agenttrain check` calls it itself, once it has printed
    the certificate.
    """
    from agenttrain.runs.loading import check_model  # imports torch
    from agenttrain.runs.memory_plan import check_shared_gpu

    config, verb = components.config, components.verb
    if verb != "sft":  # `prepare` has checked it for sft
        check_model(config, verb)
        check_shared_gpu(config, verb)
    # Checkpoints save the tokenizer: a server then renders and parses as the training did.
    components.tokenizer.chat_template = components.chat.saved_template
    components.tokenizer.response_template = response_template(components.chat)
    if verb == "sft":
        _check_demonstrations(components)
        return
    for part in components.parts:
        with part.relocated_errors():
            test = part.tasks.by_key.get("data.test")
            if test is not None and part.config.eval.questions:
                check_columns(test, {"eval.group_by": part.config.eval.group_by})
            _check_eval_tools(part)
    check_compaction(config.rollout, components.chat, context_of(config))
    if config.agent.outside:
        make_agent(config.agent, Path(), machines=components.machines)  # raises for bad settings
    if components.machines is not None:  # rollouts run in containers
        if config.agent.outside:
            _check_single_steps(components)
        prepare_images(components)
    for part in components.parts:
        with part.relocated_errors():
            needed = part.needed_columns  # builds the rubric, which checks the rows' own tools
            _check_prompts_fit(part, training=verb == "train")
            for key, source in part.tasks.by_key.items():
                check_needed_columns(source, needed, key)
    if verb == "train" and config.algorithm.teacher is not None:
        from agenttrain.runs.teacher import check_teacher

        check_teacher(config, components.tokenizer, components.tasks.by_key["data.train"])


def _check_single_steps(components: Components) -> None:
    """Raise ConfigError for tasks of several steps, of which a program would get the first."""
    for task in tasks_to_prepare(components):
        harbor = harbor_task(task)
        if harbor is not None and len(harbor.steps) > 1:
            raise ConfigError(
                f"agent={components.config.agent.name}: a program gets one instruction, and task "
                f"{task.task_id} has {len(harbor.steps)} steps; set agent=none, or leave it out"
            )


class Components:
    """Components of a run, each built when it is first used.

    Example: ``components = prepare(config)`` builds and checks everything that training needs.
    ``Components(config).chat`` builds tools and chat, but no tasks and no rewards.

    A run with a mixture of rows has one instance for the whole run, and one for each source
    (`sources`). The whole run's has tokenizer, chat and roles, which its sources use too. Each
    source's has its tasks and rubric, and its tools and environments if it sets some.
    """

    def __init__(
        self,
        config: RunConfig,
        verb: str = "train",
        folder: Path | None = None,
        *,
        tools: tuple[Toolbox, Environments] | None = None,
        shows_demonstrations: bool = False,
        mixture: Components | None = None,
        source: str = "",
    ) -> None:
        """`folder` is the run folder, in which role servers are found; None: roles have no servers.

        `tools` are those of other components, to share; None: they are built from `config`.
        `shows_demonstrations`: the verb shows rows and asks no model. So a row may end with its
        answer, which is an error where a model would get it in the prompt. An instance for one
        source of a mixture has the source's name, `source`, and the whole run's instance,
        `mixture`.
        """
        self.config = config
        self.verb = verb
        self.folder = folder
        self._tools = tools
        self._shows_demonstrations = shows_demonstrations
        self._mixture, self._source = mixture, source
        self._agents: Agents | None = None
        """Outside agents, which `collector` makes and `aclose` closes."""

    def with_config(self, config: RunConfig) -> Components:
        """Return components of another configuration that share tools, chat and certificate.

        The settings on which the shared components depend must be the same.
        """
        shared = Components(config, self.verb, self.folder, tools=(self.toolbox, self.environments))
        shared.tokenizer, shared.chat = self.tokenizer, self.chat
        shared.certificate = self.certificate
        # Sources get their chat from `shared`, and only their tools need to be handed on.
        for name, part in shared.sources.items():
            part._tools = (self.sources[name].toolbox, self.sources[name].environments)
        return shared

    @cached_property
    def sources(self) -> dict[str, Components]:
        """The components of each source of a mixture, by its name; empty for other runs.

        A source has the run's tools and environments unless it has some of its own.
        """
        sources = {}
        for name, view in source_views(self.config).items():
            shares = shares_tools(self.config.data.sources[name])
            sources[name] = Components(
                view,
                self.verb,
                self.folder,
                tools=(self.toolbox, self.environments) if shares else None,
                shows_demonstrations=self._shows_demonstrations,
                mixture=self,
                source=name,
            )
        return sources

    @property
    def parts(self) -> Sequence[Components]:
        """The components of all sources of a mixture; these ones for other runs."""
        return list(self.sources.values()) or [self]

    def part_of(self, task: Task) -> Components:
        """Return the components of the task's source."""
        return self.sources.get(task.source, self)

    @contextmanager
    def relocated_errors(self) -> Iterator[None]:
        """Let errors of the block about settings of a source name the keys that the run has."""
        try:
            yield
        except (AgenttrainError, ValueError) as error:
            if self._mixture is not None and len(error.args) == 1:
                error.args = (self.relocated(str(error)),)
            raise

    def relocated(self, message: str) -> str:
        """Return a message with the keys that the run has for the settings of its source.

        Example: ``data.where=a: …`` of the source shop becomes ``data.sources.shop.where=a: …``.
        """
        config = self.config if self._mixture is None else self._mixture.config
        return located(config, self._source, message)

    @property
    def toolbox(self) -> Toolbox:
        """The run's own tools."""
        return self._toolbox_and_environments[0]

    @property
    def environments(self) -> Environments:
        """The run's environments with their methods."""
        return self._toolbox_and_environments[1]

    @cached_property
    def _toolbox_and_environments(self) -> tuple[Toolbox, Environments]:
        """Both are built together: a stop tool is a tool or an environment's method."""
        if self._tools is not None:
            return self._tools
        with self.relocated_errors():
            return self._build_tools()

    def _build_tools(self) -> tuple[Toolbox, Environments]:
        """Build the run's tools and environments; both are empty if every source has its own."""
        config = self.config
        if config.data.sources and not any(map(shares_tools, config.data.sources.values())):
            return Toolbox({}), Environments()
        environments = Environments(
            build_kinds(config.environment),
            stop_tools=config.stop_tools,
            max_stuck=config.rollout.max_stuck_calls,
        )
        # `build_toolbox` raises for a stop tool that is neither a tool nor a method.
        stop_tools = [name for name in config.stop_tools if name not in environments.tool_names]
        toolbox = build_toolbox(
            in_containers(config.tools) if config.runtime.has_machines else config.tools,
            stop_tools,
            threads=config.rollout.concurrency,
            max_stuck=config.rollout.max_stuck_calls,
        )
        check_collisions(toolbox, environments)
        return toolbox, environments

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; `prepare` puts the chat template of the training into it."""
        if self._mixture is not None:
            return self._mixture.tokenizer
        from transformers import AutoTokenizer

        path = self.config.model.path
        folder = model_folder(path, revision=self.config.model.revision)
        try:
            return AutoTokenizer.from_pretrained(folder)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"model.path={path}: its tokenizer cannot be loaded; copy the whole model again, "
                f"with config.json and tokenizer.json ({' '.join(str(error).split())})"
            ) from error

    @cached_property
    def chat(self) -> Chat:
        """The model's chat template and response schema, for a run with these tools."""
        if self._mixture is not None:
            return self._mixture.chat
        return chat_of(self.config, self.tokenizer, tools=any(map(bool, self._tool_sets)))

    @property
    def _tool_sets(self) -> list[list[dict[str, Any]]]:
        """The tool sets of rows that list no tools, each once."""
        sets = [s for part in self.parts for s in tool_sets(part.toolbox, part.environments)]
        return [tools for index, tools in enumerate(sets) if tools not in sets[:index]]

    @cached_property
    def certificate(self) -> Certificate:
        """The certificate of the template with the run's tools.

        With several sources or environments, the template is certified with the tools of each. The
        first certificate that fails counts.
        """
        return certify_tool_sets(self.chat, self._tool_sets)

    @cached_property
    def tasks(self) -> Splits:
        """Training and test tasks, and notes on rows left out and held out."""
        if self.sources:
            return self._mixed_tasks()
        # An environment, or an agent outside, makes the prompt itself. Demonstrations of `sft` have
        # no such thing: their rows are whole conversations.
        needs_prompt = self.verb == "sft" or self.rows_are_prompts
        with self.relocated_errors():  # of a mixture's source: data.sources.<source>.…
            return build_tasks(
                self.config.data,
                seed=self.config.seed,
                needs_prompt=needs_prompt,
                source=self._source,
            )

    def _mixed_tasks(self) -> Splits:
        """Return the tasks of a mixture, those of training in the order without curricula.

        Checks before the run read them. Rollouts are sampled from another `mixture()`, in which
        curricula choose by results.
        """
        splits = {name: part.tasks for name, part in self.sources.items()}
        # Source -> its test rows, and the most of them that an evaluation takes.
        test_rows_and_count = {
            name: (part.tasks.by_key.get("data.test"), part.config.eval.questions)
            for name, part in self.sources.items()
        }
        return Splits(
            train=self.mixture(curricula=False),
            test=Questions(test_rows_and_count),
            notes=(),  # `Components.notes` collects those of the sources
            sources=splits,
        )

    def mixture(self, *, curricula: bool = True) -> Mixture:
        """Return the tasks of all sources of a mixture; `curricula` choose among a source's."""
        config = self.config
        shares = shares_of(config.data.sources, config.tasks_per_step)
        sources = {}
        for name, part in self.sources.items():
            tasks, curriculum = part.tasks.train, part.config.data.curriculum
            assert isinstance(tasks, TaskSource), "a source has one set of rows"
            sources[name] = MixedSource(
                tasks=tasks,
                share=shares[name],
                at_end=config.data.sources[name].at_end,
                curriculum=Curriculum(tasks, curriculum, seed=config.seed)
                if curricula and curriculum.enabled
                else None,
            )
        return Mixture(sources, seed=config.seed)

    @property
    def rows_are_prompts(self) -> bool:
        """True if nobody but the row makes the model's prompt: no environment, no outside agent."""
        return not (self.config.environment or self.config.agent.outside)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on rows that were left out."""
        if self.sources:
            return tuple(part.relocated(note) for part in self.parts for note in part.notes)
        left_out = (source.note for source in self.tasks.by_key.values())
        return (*self.tasks.notes, *filter(None, left_out))

    @cached_property
    def row_tool_names(self) -> set[str]:
        """Names of the tools that rows list.

        To find them `check_rows` reads all rows, and so it checks them too: it raises for bad ones.
        """
        if self.sources:
            return set().union(*(part.row_tool_names for part in self.sources.values()))
        # A row may end with its answer where it is learnt or shown, and where an environment or an
        # outside agent makes the prompt. Otherwise the model would be asked with the answer.
        holds_answers = self.verb == "sft" or self._shows_demonstrations
        return check_rows(
            self.chat,
            self.toolbox,
            self.environments,
            self.tasks.by_key,
            structured_calls=self.config.rollout.structured_calls,
            executed=self.verb != "sft",
            may_end_with_answer=holds_answers or not self.rows_are_prompts,
            on_bad_row=self.config.data.on_bad_row,
        )

    @cached_property
    def rubric(self) -> Rubric:
        """The run's rewards, also those of its environments; none for a mixture as a whole.

        Raises ValueError for a reward on a tool that neither the run nor a row has, and for one
        that compares the rollouts of a group where a group has only one.
        """
        if self.sources:
            return Rubric({})
        # Computing `row_tool_names` checks the rows, which an outside agent's run needs too.
        names = {*self.toolbox.names, *self.environments.tool_names, *self.row_tool_names}
        rubric = rubric_of(self.config, self.environments.rewards, self.roles)
        if self.verb == "train":
            rubric.check_group_size(self.config.algorithm.group_size)
        if not self.config.agent.outside:  # the tools of an outside agent are not known here
            rubric.check_tools(names)
        return rubric

    @cached_property
    def prompt_lengths(self) -> dict[str, list[int]]:
        """Tokens of the first RENDERED_TASKS prompts of each split, by its key (data.train, …).

        With data.on_bad_row=skip, prompts that the template cannot render are left out. Raises
        ChatError with key, task and remedy otherwise, and if no prompt of a split can be rendered.
        """
        if not self.sources:
            splits = self.tasks.by_key.items()
            return {key: self._first_prompt_lengths(key, tasks) for key, tasks in splits}
        # A mixture has no rows but those of its sources.
        lengths: dict[str, list[int]] = {}
        for part in self.sources.values():
            # data.train of the source shop is data.sources.shop.train of the run: errors name this
            # key, and `lengths` has it.
            with part.relocated_errors():
                for key, split_lengths in part.prompt_lengths.items():
                    lengths[part.relocated(key)] = split_lengths
        return lengths

    def _first_prompt_lengths(self, key: str, source: TaskSource) -> list[int]:
        """Return the tokens of the first RENDERED_TASKS prompts of one split, at `key`."""
        lengths: list[int] = []
        refusals: list[ChatError] = []
        for task in source.tasks(0, min(RENDERED_TASKS, len(source))):
            if not task.messages:  # an environment's reset gives the whole prompt
                continue
            try:
                lengths.append(self.prompt_length(task))
            except ChatError as error:
                where = source.place_of(task) or f"task {task.task_id}"
                message = f"{key}: {where}: {error}; or remove the messages from the rows"
                refusals.append(ChatError(message))
        bad_rows_raise = self.config.data.on_bad_row is OnBadRow.error
        if refusals and (bad_rows_raise or not lengths):
            raise refusals[0]
        return lengths

    def prompt_length(self, task: Task) -> int:
        """Return the tokens of a task's prompt. Raises ChatError if the template refuses it."""
        return prompt_length(self.chat, task, self.schemas(task))

    def place_of(self, task: Task) -> str:
        """Return where a task's row stands, for error messages."""
        for key, source in self.tasks.by_key.items():
            place = source.place_of(task)
            if place is not None:
                return f"{key}: {place}"
        return f"task {task.task_id}"

    @cached_property
    def user(self) -> SimulatedUser | None:
        """The run's simulated user; None if it has none."""
        return build_user(with_servers(self.config.user, self.roles))

    @cached_property
    def machines(self) -> Machines | None:
        """The machines of the run's rollouts; None with runtime=bwrap."""
        runtime, agent = self.config.runtime, self.config.agent
        return Machines(runtime, install=agent.install) if runtime.has_machines else None

    @cached_property
    def roles(self) -> dict[str, RoleServers]:
        """Servers of the roles that the run uses, by the role's name."""
        if self._mixture is not None:
            return self._mixture.roles
        if self.folder is None:
            return {}
        return {
            name: RoleServers(self.folder, name, role)
            for name, role in used_roles(self.config, self.verb).items()
        }

    def close_roles(self) -> None:
        """Stop sending requests to role servers."""
        for servers in self.roles.values():
            servers.close()

    @property
    def needed_columns(self) -> dict[str, Sequence[str]]:
        """Columns that the rows must have, by the key of the component that reads them."""
        needed: dict[str, Sequence[str]] = {
            f"reward.{name}": columns for name, columns in self.rubric.columns.items()
        }
        if self.user is not None:
            needed["user.prompt"] = self.user.columns
        return needed

    @property
    def demonstrator(self) -> Demonstrator:
        """The component that makes rollouts out of rows with answers."""
        return Demonstrator(
            chat=self.chat,
            toolbox=self.toolbox,
            limits=self.config.rollout,
            environments=self.environments,
        )

    def collector(
        self, engine: Engine, folder: Path | None = None, timeline: Timeline | None = None
    ) -> Collector:
        """Return a collector of rollouts that samples from `engine`.

        Outside agents write their output to `folder`/agents, or to a temporary folder if `folder`
        is None. The rollouts' times go to `timeline`.
        """
        attempt = None  # the collector's own loop
        if self.config.agent.outside:
            if folder is None:
                folder = TemporaryFolder().path  # removed at the end of this process
            attempt = self._make_agents(engine, folder / "agents")
        in_flight = InFlight(timeline=timeline or Timeline())
        collector = Collector(
            attempt=attempt,
            in_flight=in_flight,
            engine=engine,
            chat=self.chat,
            toolbox=self.toolbox,
            rubric=self.rubric,
            machines=self.machines,
            limits=self.config.rollout,
            environments=self.environments,
            simulated_user=self.user,
            on_bad_row=self.config.data.on_bad_row,
            place_of=self.place_of,
            sources={
                name: SourceTools(
                    toolbox=part.toolbox,
                    environments=part.environments,
                    rubric=part.rubric,
                    on_bad_row=part.config.data.on_bad_row,
                )
                for name, part in self.sources.items()
            },
        )
        # Tools report each answered call, for the times of the rollouts in flight.
        for toolbox in collector.toolboxes():
            toolbox.answered = in_flight.answered
        return collector

    @property
    def metric_names(self) -> MetricNames:
        """Names of tools, rewards and sources, which the names of metrics contain."""
        outside = self.config.agent.outside
        return metric_names(self.parts, self.sources, outside_agents=outside)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights of the reward functions of all sources, by name."""
        return {name: w for part in self.parts for name, w in part.rubric.weights.items()}

    def alarms(self) -> list[str]:
        """Return a note for each reward function that sets alarms, as `Rubric.alarms`."""
        return [part.relocated(note) for part in self.parts for note in part.rubric.alarms()]

    def _make_agents(
        self, engine: Engine, folder: Path
    ) -> Callable[[RolloutRequest, RolloutContext], Awaitable[Rollout]]:
        """Make the outside agents; return the function that makes a rollout with one of them."""
        limits: RolloutConfig = self.config.rollout
        # With deterministic=null the rollouts are deterministic where the engine can be.
        lockstep = limits.deterministic is not False and isinstance(engine, Lockstep)
        agents = Agents(
            self.config.agent, self.chat, folder, lockstep=lockstep, machines=self.machines
        )
        self._agents = agents

        async def attempt(request: RolloutRequest, context: RolloutContext) -> Rollout:
            """Have an outside agent attempt the request's task; called once per rollout."""
            record = None if context.parsed_turns is None else context.parsed_turns.record
            return await agents.attempt(request, context.engine, context.limits, record)

        return attempt

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the model has in this task."""
        return self._row_tools(task).schemas

    def stop_tools(self, task: Task) -> frozenset[str]:
        """Return the names of those tools of this task that end its rollout."""
        return self._row_tools(task).stop_tools

    def _row_tools(self, task: Task) -> RowTools:
        executed, part = self.verb != "sft", self.part_of(task)
        return RowTools(task, part.toolbox, part.environments, executed=executed)

    def prompt_ids(self, task: Task) -> list[int]:
        """Return the ids with which a rollout of the task starts."""
        return self.chat.prompt_ids(task.messages, self.schemas(task))

    def probe_prompt(self) -> list[int]:
        """Return the ids of the first task's prompt, for the probe of a weight sync.

        If all prompts come from environments, return one stop token instead.
        """
        splits: tuple[TaskSource | Mixture | Questions, ...] = (self.tasks.train, self.tasks.test)
        for source in splits:
            first_task = source.tasks(0, 1) if len(source) else []
            for task in first_task:
                if task.messages:
                    return self.chat.rendered_ids(task.messages, self.schemas(task))
        return list(self.chat.stop_token_ids[:1])

    async def aclose(self) -> None:
        """Close tools, environments and agents; stop sending requests to role servers."""
        self.close_roles()
        async with AsyncExitStack() as stack:  # everything is closed, also after an error
            stack.push_async_callback(self._close_tools)
            for part in self.sources.values():
                if part.toolbox is not self.toolbox:
                    stack.push_async_callback(part._close_tools)

    async def _close_tools(self) -> None:
        """Close agents, environments, tools and machines, each also after an error of another.

        The last error is raised.
        """
        try:
            if self._agents is not None:
                await self._agents.aclose()
        finally:
            try:
                await self.environments.aclose()
            finally:
                try:
                    await self.toolbox.aclose()
                finally:
                    if self.machines is not None:
                        await self.machines.aclose()


def prepare_images(components: Components) -> None:
    """Build or look for the images of all rows, so that none is missing in the middle of a run.

    Raises ConfigError if the container client is missing, a row names no image, or an image cannot
    be built.
    """
    if problems := list(runtime_problems(components.config.runtime)):
        raise ConfigError("\n".join(problems))
    machines, tasks = components.machines, tasks_to_prepare(components)
    assert machines is not None

    # A thread: the caller's may have a running event loop.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(asyncio.run, machines.prepare(tasks)).result()
        except MachineLost as error:
            raise ConfigError(f"runtime={components.config.runtime.name}: {error}") from error


def tasks_to_prepare(components: Components) -> list[Task]:
    """Return all tasks of a run; of rows without end, the first ones."""
    return [
        task
        for source in components.tasks.by_key.values()
        for task in source.tasks(0, RENDERED_TASKS if source.endless else len(source))
    ]


def in_containers(tools: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `tools` with interpreters that run in the rollout's container."""
    return {
        name: {**section, "sandbox": RUNTIME}
        if isinstance(section, Mapping) and section.get("_target_") == INTERPRETER
        else section
        for name, section in tools.items()
    }


def chat_of(config: RunConfig, tokenizer: Any, *, tools: bool) -> Chat:
    """Load the run's chat template and response schema, for a run with or without tools."""
    return load_chat(
        tokenizer,
        config.chat_template,
        config.response_schema,
        tools=tools,
        placeholders=placeholders_of(config),
    )


def rubric_of(
    config: RunConfig, rewarding: Sequence[str], roles: Mapping[str, RoleServers] | None = None
) -> Rubric:
    """Build the rewards of a run.

    `rewarding` are the names of the environments that have a method `reward`. `roles` are the
    servers that ``role:<name>`` stands for, if they run. Raises ValueError if the run hides an
    environment's reward, or uses one that does not exist.
    """
    # Where an environment has a method `reward`, the section reward.environment (REWARD) is added,
    # with the function that calls it (REWARD_TARGET) as its default `_target_`.
    sections = reward_sections(config, add_environment=bool(rewarding))
    targets = [section.get("_target_") for section in sections.values()]
    if rewarding and REWARD_TARGET not in targets:
        raise ValueError(
            f"reward.{REWARD}._target_={sections[REWARD]['_target_']}: hides the `reward` of "
            f"environment.{rewarding[0]}; give yours another name: reward.mine._target_"
        )
    if not rewarding and REWARD_TARGET in targets:
        raise ValueError(
            f"reward.{REWARD}: none of the environments has a method `reward(self, rollout)`; add "
            f"one, or leave out reward.{REWARD}"
        )
    return build_rubric(
        {name: with_servers(section, roles or {}) for name, section in sections.items()}
    )


def context_of(config: RunConfig) -> int | None:
    """Return the engine's maximum tokens of a sequence; None if neither run nor model sets one."""
    from transformers import AutoConfig

    if config.engine.max_context is not None:
        return config.engine.max_context
    text_config = AutoConfig.from_pretrained(architecture_folder(config)).get_text_config()
    return getattr(text_config, "max_position_embeddings", None)


def sampling_note(config: RunConfig) -> str | None:
    """Return a note on the model's recommended top_p, top_k and min_p, which training ignores.

    With them, training would sample from another distribution than the one whose gradient it
    computes. Return None if the model recommends none.
    """
    folder = model_folder(config.model.path, revision=config.model.revision)
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    recommended = json.loads(file.read_text(encoding="utf-8"))
    limits = {name: recommended.get(name) for name in ("top_p", "top_k", "min_p")}
    if limits["top_p"] == 1:  # keeps all tokens, as no top_p does
        limits["top_p"] = None
    active = " ".join(f"{name}={value}" for name, value in limits.items() if value)
    if not active:
        return None
    return (
        f"sampling       {file.name} of the model has {active}, which training does not use; "
        "evaluations take eval.top_p and eval.top_k"
    )


def _check_eval_tools(components: Components) -> None:
    """Raise ValueError for an `eval.tools` that the run does not have."""
    declared = (*components.toolbox.names, *components.environments.tool_names)
    for name in components.config.eval.tools or ():
        if name not in declared:
            raise ValueError(
                f"eval.tools={name}: is no tool of this run{did_you_mean(name, declared)}; its "
                f"tools are: {', '.join(declared) or 'none'}"
            )


def overlong_notes(components: Components) -> list[str]:
    """Return a note for each split whose first prompts include some too long for the context."""
    context, lengths_by_key = context_of(components.config), components.prompt_lengths
    if context is None:
        return []
    notes = []
    for key, lengths in lengths_by_key.items():
        count = sum(length >= context for length in lengths)
        if count > 0:
            notes.append(
                f"note: {count} of the first {len(lengths)} of {key} fill the context of {context} "
                "tokens and would be left out (data/overlong)"
            )
    return notes


def _check_prompts_fit(components: Components, *, training: bool) -> None:
    """Raise ChatError if all prompts of the first step, or of the evaluation, fill the context.

    Single prompts that fill it are left out and counted while the run goes on. Without `training`,
    or with a curriculum, which draws rows in an order that is not known yet, only the evaluation's
    rows are checked.
    """
    config, tasks, lengths = components.config, components.tasks, components.prompt_lengths
    context = context_of(config)
    resets = any(kind.has_reset for kind in components.environments.kinds.values())
    if context is None or resets or config.agent.outside:
        return  # a reset, or the agent, may replace the row's prompt
    train_count = 0
    if training and not config.data.curriculum.enabled:  # the tasks of the first step
        train_count = tasks_of_round(config.tasks_per_step, config.algorithm.oversample)
    test_count = min(config.eval.questions, len(tasks.test))
    for key, count in (("data.train", train_count), ("data.test", test_count)):
        # `prompt_lengths` has at most those of the first RENDERED_TASKS tasks.
        first_lengths = lengths.get(key, ())[:count]
        if not first_lengths or min(first_lengths) < context:  # nothing to check, or one fits
            continue
        # All prompts rendered so far are too long: only now is it worth rendering the others.
        later_tasks = tasks.by_key[key].tasks(RENDERED_TASKS, max(count - RENDERED_TASKS, 0))
        if all(_fills(components, task, context) for task in later_tasks):
            setting = "" if config.engine.max_context is None else "engine.max_context="
            raise ChatError(
                f"{key}: the prompts of all {count} tasks that are drawn first leave no room: they "
                f"have {min(first_lengths)} tokens or more, and the context is {setting}{context}; "
                "raise it, or give shorter prompts"
            )


def _fills(components: Components, task: Task, context: int) -> bool:
    """Return True if a task's prompt fills the context, or the run will leave it out as bad."""
    try:
        return components.prompt_length(task) >= context
    except ChatError:
        if components.config.data.on_bad_row is OnBadRow.error:
            raise
        return True


def _check_demonstrations(components: Components) -> None:
    """Check all rows, and make each split's first demonstrations. Raises BadDemonstration."""
    config = components.config
    _ = components.row_tool_names  # computing it checks all rows
    if config.data.on_bad_row is not OnBadRow.error:
        return
    sources = components.tasks.by_key
    if not config.eval.questions:  # the test rows are not used
        sources.pop("data.test", None)  # `by_key` made this dict anew
    demonstrator = components.demonstrator
    for key, source in sources.items():
        for task in source.tasks(0, min(len(source), config.sft.batch_size)):
            try:
                demonstrator(task, task.task_id)
            except BadDemonstration as error:
                raise BadDemonstration(f"{key}: {error}. {REMEDY}") from error
