"""`agenttrain rehearse`: rollouts with the run's tools, environments and rewards, and no model.

Everything but the model, which `stub.py` replaces, is the run's own: rows, template, tools, ….
"""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import mean
from time import perf_counter

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agenttrain.chat.chat import Chat
from agenttrain.commands.rehearse.harbor import rehearse_tasks
from agenttrain.commands.rehearse.stub import Stub
from agenttrain.commands.verb import STDOUT, as_config_error, write_report
from agenttrain.data.build import check_needed_columns
from agenttrain.data.config import at_source
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.collector import Collected, Collector, collect
from agenttrain.rollout.request import BatchRequest
from agenttrain.rollout.row_tools import RowTools
from agenttrain.runs.setup import Components, context_of
from agenttrain.settings.checks import HARBOR
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import AgenttrainError, Rollout, StopReason, ToolError, ToolResult
from agenttrain.utils.redaction import shell_command

CONTEXT = 32_768
"""Context in tokens of a model whose configuration has none."""
MIB = 2**20
INTERVAL_S = 0.05
"""Seconds between two looks at the memory."""
REFUSED = (
    *(ToolError.malformed, ToolError.unknown_tool, ToolError.invalid_arguments),
    *(ToolError.limit, ToolError.parallel),
)
"""Errors of calls that no tool has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """Statistics of one tool's calls, without calls that were refused before the tool ran."""

    tool: str
    calls: int
    failures: int
    """Calls with an error."""
    first_error: str
    """Text that the model read at the first failure; empty: there was none."""
    same_error: bool
    """True if three or more calls were run, and all failed with the same text."""
    p50_s: float
    """Median seconds of a call."""
    p95_s: float
    """95th percentile."""
    reply_tokens_p50: int
    reply_tokens_max: int
    clipped: int
    """Replies longer than the limit of tokens, which the model sees cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """Values of one reward function."""

    reward: str
    rollouts: int
    """Rollouts with a value."""
    none: int
    """Rollouts to which the function does not apply."""
    low: float | None
    mean: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of a rehearsal; the fields are those of the JSON file."""

    rollouts: int
    turns: dict[str, int]
    """Turns that the stub has written, by kind."""
    answers: dict[str, int]
    """Calls that were answered with an error before any tool ran, by that error: unknown tool,
    invalid arguments. (Their turns count in `turns` too.)"""
    stop_reasons: dict[str, int]
    tools: list[ToolReport]
    rewards: list[RewardReport]
    prompt_tokens: list[int]
    """Minimum, median and maximum."""
    sampled_tokens: list[int]
    """Minimum, median and maximum of a rollout."""
    context: int
    """Tokens that a rollout may have at most."""
    seconds: float
    """Wall time of all rollouts, rewards included."""
    reward_s: float
    """Seconds of scoring, which are part of `seconds`."""
    own_mib: float
    """Growth of this process at its peak: tools in threads, rows, rollouts."""
    children_mib: float
    """Peak of all child processes together: isolated tools, sandboxes, servers."""
    step_rollouts: int
    """Rollouts of one training step."""
    step_tokens: int
    """Sampled tokens of a step in which rollouts are as long as the stub's."""
    step_tokens_most: int
    """Sampled tokens of a step in which every turn uses its budget."""
    step_s: list[float] | None
    """Seconds of sampling `step_tokens`, and of `step_tokens_most`, at --tokens-per-s; None without
    the option."""
    problems: list[str]
    """Reasons why the run would fail or learn nothing; exit code 1 if there are any."""
    warnings: list[str]


def rehearse(config: RunConfig, args: Namespace, overrides: Sequence[str]) -> int:
    """Make the rollouts and print the report; return exit code 1 if it has problems.

    Raises ConfigError for components that cannot be built.
    """
    with as_config_error():
        components = Components(config)
        # Harbor tasks bring their solutions: these are tried, without a stub and its chat template.
        if config.data.train.get("_target_") == HARBOR:
            return rehearse_tasks(components, args)
        # The certificate is the check of the chat template, which training requires too.
        components.certificate.raise_if_refused()
        for part in components.parts:
            with part.relocated_errors():
                for key, source in part.tasks.by_key.items():
                    check_needed_columns(source, part.needed_columns, key)
        report = asyncio.run(_rehearse(components, args, overrides))
    write_report(asdict(report), args.json)
    if args.json != STDOUT:  # there the JSON takes the place of the text
        show(report, args.tokens_per_s)
    return int(bool(report.problems))


async def _rehearse(components: Components, args: Namespace, overrides: Sequence[str]) -> Report:
    """Collect rollouts in which a stub takes the model's place, score them, and return a report."""
    config = components.config
    samples = min(config.algorithm.group_size, args.rollouts)
    tasks = components.tasks.train.tasks(0, ceil(args.rollouts / samples))
    context = context_of(config) or CONTEXT
    stub = Stub(components, tasks)
    # Nobody looks at the requests, so the engine need not keep them.
    engine = ScriptedEngine(stub, keeps_sent=False, max_context=context, reads_images=True)
    collector = components.collector(engine)
    problems: list[str] = []
    collected = Collected()
    started = perf_counter()
    with _Memory() as memory:
        try:
            request = BatchRequest(
                tasks=tasks,
                samples=samples,
                sampling=Sampling(temperature=config.rollout.temperature),
                seed_path=(config.seed, "rehearse"),
                may_be_empty=True,  # rewards that teach nothing are findings, not errors
            )
            collected = await collect(collector, request)
        except AgenttrainError as error:
            problems.append(f"the run would stop: {error}")
            # Errors of scoring carry the rollouts that were made before.
            collected.groups = [list(getattr(error, "rollouts", ()))]
        finally:
            seconds = perf_counter() - started
            await components.aclose()
    report = _make_report(
        components, collector, collected, stub, memory, args.tokens_per_s, seconds, problems
    )
    _add_findings(report, collected, components, overrides)
    return report


def _make_report(
    components: Components,
    collector: Collector,
    collected: Collected,
    stub: Stub,
    memory: _Memory,
    speed: float | None,
    seconds: float,
    problems: list[str],
) -> Report:
    """Count what the rollouts show, and extrapolate the tokens and seconds of a training step.

    `speed` is --tokens-per-s, `seconds` the time that the rollouts took. Memory is in MiB, that of
    this process (`own_mib`) and of its children.
    """
    config, context = components.config, context_of(components.config) or CONTEXT
    rollouts = collected.rollouts
    results = [result for rollout in rollouts for result in rollout.tool_results]
    limits = config.rollout
    per_step = config.tasks_per_step * config.algorithm.group_size
    sampled = [rollout.sampled_length for rollout in rollouts]
    prompts = [r.trajectories[0].prompt_length for r in rollouts if r.length]
    # Most tokens that one rollout can sample: the least of the three limits that end it.
    max_tokens = min(
        limits.max_turns * limits.max_turn_tokens, limits.max_completion_tokens, context
    )
    # A step whose rollouts are as long as the stub's, and one in which all use their budget.
    tokens = round(per_step * mean(sampled)) if sampled else 0
    most_tokens = per_step * max_tokens
    return Report(
        rollouts=len(rollouts),
        turns={str(kind): count for kind, count in stub.written.items()},
        # Calls that were refused without running a tool, by reason. Plain dictionaries, here and
        # below: `asdict` makes a Counter of a Counter's (key, value) pairs, which counts the pairs.
        answers=dict(Counter(str(r.error) for r in results if r.error in REFUSED)),
        stop_reasons=dict(Counter(str(rollout.stop_reason) for rollout in rollouts)),
        tools=list(_tool_reports(collector, rollouts)),
        rewards=[_reward_report(name, rollouts) for name in components.metric_names.rewards],
        prompt_tokens=_min_median_max(prompts),
        sampled_tokens=_min_median_max(sampled),
        context=context,
        seconds=seconds,
        reward_s=collected.reward_s,
        own_mib=memory.own / MIB,
        children_mib=memory.children / MIB,
        step_rollouts=per_step,
        step_tokens=tokens,
        step_tokens_most=most_tokens,
        step_s=None if speed is None else [tokens / speed, most_tokens / speed],
        problems=problems,
        warnings=[],
    )


def _add_findings(
    report: Report, collected: Collected, components: Components, settings: Sequence[str]
) -> None:
    """Add the problems and warnings that the rollouts, tools and rewards show to the report.

    Problems would spoil a run, and decide the exit code. Warnings are worth a look. `settings` are
    the overrides of the command line, for commands that a warning proposes.
    """
    problems, warnings = report.problems, report.warnings
    for rollout in collected.rollouts:
        if rollout.stop_reason in (StopReason.error, StopReason.aborted, StopReason.timeout):
            text = rollout.error or "rollout.timeout_s has passed; raise it, or speed the tools up"
            problems.append(f"rollout {rollout.rollout_id} ended as {rollout.stop_reason}: {text}")
            break  # the others mostly end for the same reason
    for tool in report.tools:
        if tool.same_error:  # at least three calls, all with one text: the tool itself is broken
            problems.append(
                f"tools.{tool.tool}: all {tool.calls} calls failed alike: {tool.first_error}"
            )
        elif tool.calls and tool.failures == tool.calls:
            warnings.append(
                f"tools.{tool.tool}: all {tool.calls} calls failed, the first with "
                f"{tool.first_error!r}; drawn arguments fit its schema and may make no sense: try "
                f"some that do: {_tools_command(tool.tool, collected, settings)}"
            )
        if tool.clipped:
            warnings.append(
                f"tools.{tool.tool}: {tool.clipped} of {tool.calls} replies are cut, the longest "
                f"has {tool.reply_tokens_max} tokens; raise tools.{tool.tool}.max_result_tokens"
            )
    called = {tool.tool for tool in report.tools}
    if missing := [name for name in _tool_names(components, collected) if name not in called]:
        warnings.append(f"not called: {', '.join(missing)}; make more: --rollouts N")
    # Prompts that leave no token for the model. The key is that of the rows, data.train or a source
    # of a mixture.
    if collected.overlong:
        keys = [
            at_source(name, own_keys=(), text="data.train") for name in collected.overlong_sources
        ]
        warnings.append(
            f"{', '.join(keys)}: {collected.overlong} prompts fill the context of "
            f"{report.context} tokens"
        )
    warnings += components.alarms()
    # An error that ended the collection, which `_rehearse` put into `problems` under these words,
    # left rollouts without scores: missing values say nothing then.
    stops = any(text.startswith("the run would stop:") for text in problems)
    for reward in report.rewards:
        if reward.low is None:
            if not stops:
                problems.append(f"reward.{reward.reward}: gave no rollout a value")
        elif reward.low == reward.high and reward.rollouts > 1:
            warnings.append(
                f"reward.{reward.reward}: is {reward.low:g} for all {reward.rollouts} rollouts; a "
                "model whose rollouts all get the same learns nothing"
            )


def _tools_command(name: str, collected: Collected, settings: Sequence[str]) -> str:
    """Return the command that makes a tool's first call once more."""
    results = (result for rollout in collected.rollouts for result in rollout.tool_results)
    first = next(r.call for r in results if r.call.name == name and r.error not in REFUSED)
    arguments = json.dumps(first.arguments, ensure_ascii=False)
    return shell_command(["tools", *settings, "--call", name, arguments])


def _tool_names(components: Components, collected: Collected) -> list[str]:
    """Return the names of all tools that the rollouts' tasks have."""
    names: dict[str, None] = {}
    for rollout in collected.rollouts:
        schemas = components.schemas(rollout.task)
        names |= dict.fromkeys(str(schema["function"]["name"]) for schema in schemas)
    return list(names)


def _tool_reports(collector: Collector, rollouts: Sequence[Rollout]) -> Iterator[ToolReport]:
    """Yield a report of every tool that was run."""
    # Tool -> (result, most tokens of its reply) of each call. The rows' own tools may have limits
    # of their own.
    by_tool: dict[str, list[tuple[ToolResult, int]]] = {}
    for rollout in rollouts:
        source = collector.for_task(rollout.task)
        tools = RowTools(rollout.task, source.toolbox, source.environments)
        for result in rollout.tool_results:
            if result.error not in REFUSED:
                limit = tools.limits(result.call.name).max_result_tokens
                entry = (result, limit or collector.limits.max_result_tokens)
                by_tool.setdefault(result.call.name, []).append(entry)
    chat: Chat = collector.chat
    for name, entries in by_tool.items():
        errors = [result.content for result, _ in entries if result.error]
        seconds = sorted(result.seconds for result, _ in entries)
        tokens = [len(chat.encode_plain(result.content)) for result, _ in entries]
        all_failed = len(errors) == len(entries)
        yield ToolReport(
            tool=name,
            calls=len(entries),
            failures=len(errors),
            first_error=errors[0] if errors else "",
            # One or two equal failures may be chance.
            same_error=all_failed and len(entries) >= 3 and len(set(errors)) == 1,
            p50_s=nearest_rank(seconds, 50),
            p95_s=nearest_rank(seconds, 95),
            reply_tokens_p50=round(nearest_rank(tokens, 50)),
            reply_tokens_max=max(tokens),
            clipped=sum(count > limit for count, (_, limit) in zip(tokens, entries, strict=True)),
        )


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """Return a percentile: the smallest value with at least `percent` % of the values up to it.

    Example: the 50th of 3, 1, 2 and 4 is 2, and the 95th is 4.
    """
    return sorted(values)[max(-(-percent * len(values) // 100) - 1, 0)]


def _reward_report(name: str, rollouts: Sequence[Rollout]) -> RewardReport:
    """Return a report of the reward function `name`; None means that it does not apply."""
    scored = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
    values = [value for value in scored if value is not None]
    return RewardReport(
        reward=name,
        rollouts=len(values),
        none=len(scored) - len(values),
        low=min(values, default=None),
        mean=mean(values) if values else None,
        high=max(values, default=None),
    )


def _min_median_max(values: Sequence[int]) -> list[int]:
    """Return minimum, median and maximum; an empty list for no values."""
    ordered = sorted(values)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]] if ordered else []


class _Memory:
    """Measures peaks of memory while its block runs, in a thread of its own."""

    own = 0
    """Bytes by which this process has grown at its peak."""
    children = 0
    """Peak bytes of all child processes together."""

    def __enter__(self) -> _Memory:
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _measure(self) -> None:
        """Update the peaks every INTERVAL_S, and once at the end: the thread's body."""
        over = False
        while not over:
            over = self._is_over.wait(INTERVAL_S)
            total = 0
            for child in self._process.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.Error:  # it has ended in between
                    continue
            self.children = max(self.children, total)
            self.own = max(self.own, self._process.memory_info().rss - self._start)


def show(report: Report, tokens_per_s: float | None) -> None:
    """Print the report; `tokens_per_s` is the speed that `report.step_s` assumes."""
    console = Console()
    written = ", ".join(f"{kind} {count}" for kind, count in report.turns.items())
    ended = ", ".join(f"{reason} {count}" for reason, count in report.stop_reasons.items())
    refused = ", ".join(f"{error} {count}" for error, count in report.answers.items())
    title = f"[bold]{report.rollouts} rollouts[/] of a stub in {report.seconds:.2f} s"
    console.print(title, highlight=False)
    for label, text in (("turns", written), ("refused calls", refused), ("ends", ended)):
        console.print(f"{label:<15}{text or 'none'}", highlight=False, soft_wrap=True)
    if report.tools:
        console.print()
        console.print(_tool_table(report.tools))
    console.print()
    console.print(_reward_table(report.rewards))
    console.print()
    shortest, _, longest = report.prompt_tokens or ("–", "–", "–")
    lines = {
        "prompt tokens": f"{shortest} to {longest}, context {report.context:,}",
        "memory": f"+{report.own_mib:.0f} MiB in this process, {report.children_mib:.0f} MiB in "
        "its children",
        "a step": f"{report.step_rollouts} rollouts; {report.step_tokens:,} sampled tokens if they "
        f"are as short as here, {report.step_tokens_most:,} at most",
    }
    if report.step_s is not None and tokens_per_s is not None:
        short, long = report.step_s  # with rollouts as short as the stub's, and with the longest
        # The stub samples in no time: what a rollout took here comes on top of sampling.
        loop_s = report.seconds * report.step_rollouts / max(report.rollouts, 1)
        lines[""] = (
            f"{short:,.1f} to {long:,.1f} s of sampling at {tokens_per_s:g} tokens/s; "
            f"tools, rewards and the loop take {loop_s:.1f} s beside"
        )
    for label, text in lines.items():
        console.print(f"{label:<15}{text}", highlight=False, soft_wrap=True)
    if report.warnings or report.problems:
        console.print()
    for style, name, texts in (
        ("yellow", "warning", report.warnings),
        ("red", "problem", report.problems),
    ):
        for text in texts:
            console.print(f"[{style}]{name}[/] ", end="")
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _tool_table(tools: Sequence[ToolReport]) -> Table:
    """Return a table with a row for each tool."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    # Only the error shrinks on a narrow terminal.
    name_width = max(len(tool.tool) for tool in tools)
    table.add_column("tool", style="cyan", min_width=name_width)
    for name in ("calls", "failed", "p50 ms", "p95 ms", "reply tokens", "max"):
        table.add_column(name, justify="right", min_width=max(len(name), 5))
    table.add_column("first error", overflow="ellipsis", no_wrap=True, style="red")
    for tool in tools:
        table.add_row(
            *(tool.tool, str(tool.calls), str(tool.failures)),
            *(f"{1000 * tool.p50_s:.1f}", f"{1000 * tool.p95_s:.1f}"),
            *(str(tool.reply_tokens_p50), str(tool.reply_tokens_max)),
            Text(" ".join(tool.first_error.split())),
        )
    return table


def _reward_table(rewards: Sequence[RewardReport]) -> Table:
    """Return a table with a row for each reward function."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("reward", style="cyan", no_wrap=True)
    for name in ("rollouts", "min", "mean", "max", "none"):
        table.add_column(name, justify="right")
    for reward in rewards:
        numbers = (reward.low, reward.mean, reward.high)
        texts = ["–" if number is None else f"{number:.3g}" for number in numbers]
        table.add_row(reward.reward, str(reward.rollouts), *texts, str(reward.none))
    return table
