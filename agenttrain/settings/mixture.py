"""A mixture of sources (`data.sources`) as settings: the run as each source sees it, and checks.

Every check of a run holds for each of its sources. `source_views` makes a run of one source of
rows out of each, so that nothing else needs to know sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from agenttrain.algorithms.config import Advantage, Rewards, Scale
from agenttrain.data.config import (
    OWN_SECTIONS,
    SOURCES,
    AtEnd,
    DataConfig,
    SourceConfig,
    at_source,
    has_questions,
    has_test_rows,
)
from agenttrain.rewards.config import RewardSettings
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.sections import field_names, plain, shown


def source_views(config: RunConfig) -> dict[str, RunConfig]:
    """Return the run as if it had a single source, for each source; empty for other runs.

    Sections that the source has of its own take the place of the run's.
    """
    return {name: _view(config, source) for name, source in config.data.sources.items()}


def _view(config: RunConfig, source: SourceConfig) -> RunConfig:
    """Return the run as if `source` were its only rows."""
    view = copy(config)
    view.data = source
    for section in own_sections(source):
        setattr(view, section, getattr(source, section))
    source_eval = source.eval
    questions = source_eval.questions
    view.eval = replace(
        config.eval,
        questions=config.eval.questions if questions is None else questions,
        group_by=source_eval.group_by or config.eval.group_by,
    )
    if not has_test_rows(source):  # it is left out of evaluations
        view.eval = replace(view.eval, questions=0, every=None)
    if view.eval.questions == 0:  # without evaluations there is no best checkpoint
        view.checkpoint = replace(config.checkpoint, keep_best=False)
    return view


def own_sections(source: SourceConfig) -> list[str]:
    """Return the sections of a run that the source has of its own."""
    return [section for section in OWN_SECTIONS if getattr(source, section) is not None]


def with_only(config: RunConfig, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a run of the one source that `data.only` names."""
    view = source_views(config)[str(config.data.only)]
    changed = {section: getattr(view, section) for section in (*OWN_SECTIONS, "eval", "checkpoint")}
    # A source has the fields of the section `data`, and others that are no part of it.
    rows = {name: getattr(view.data, name) for name in field_names(DataConfig)}
    return {**sections, **plain({**changed, "data": rows})}


def sections_in_mixture(config: RunConfig) -> dict[str, str]:
    """Return the sections that `with_only` takes from the source, and their keys in the mixture.

    Example: ``{"data": "data.sources.shop", "tools": "data.sources.shop.tools"}``.
    """
    place = f"{SOURCES}.{config.data.only}"
    sections = own_sections(config.data.sources[str(config.data.only)])
    return {"data": place, **{section: f"{place}.{section}" for section in sections}}


def shares_tools(source: SourceConfig) -> bool:
    """Return True if the source has exactly the run's tools and environments."""
    return not {"tools", "stop_tools", "environment"} & {*own_sections(source)}


def located(config: RunConfig, name: str, message: str) -> str:
    """Return a message with the keys of the run in place of those of a source's view.

    `message` is about the view that `source_views` returns for the source `name`. Example:
    ``tools.add: …`` becomes ``data.sources.shop.tools.add: …`` if the source has tools of its own.
    The message stays as it is for an empty name, which is a run without sources.
    """
    if not name:
        return message
    source = config.data.sources[name]
    # The section `eval` is mixed: each key that the source does not set is the run's.
    eval_keys = [f"eval.{key}" for key, value in plain(source.eval).items() if value is not None]
    return at_source(name, [*own_sections(source), *eval_keys], message)


def problems_by_source(
    config: RunConfig, problems: Callable[[RunConfig], Iterator[str]]
) -> list[str]:
    """Return the problems of a run, or those of each source's view, each once."""
    views = source_views(config)
    if not views:
        return list(problems(config))
    lines = (located(config, name, line) for name, view in views.items() for line in problems(view))
    return list(dict.fromkeys(lines))


def mixture_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of a mixture as a whole."""
    sources = config.data.sources
    if not sources:
        return
    yield from _share_problems(config)
    if all(source.at_end is AtEnd.drop for source in sources.values()):
        yield (
            f"{SOURCES}.{next(iter(sources))}.at_end=drop: every source is dropped at its end, and "
            "the run would have no tasks after them; let one repeat: at_end=repeat"
        )
    for section in OWN_SECTIONS:
        value = getattr(config, section)
        if value and all(getattr(source, section) is not None for source in sources.values()):
            setting = ", ".join(f"{section}.{name}" for name in value)
            if section == "stop_tools":  # a list, which has no keys
                setting = f"{section}={shown(value)}"
            empty = "environment=null" if section == "environment" else f"{section}=[]"
            yield (
                f"{setting}: has no effect, every source has {section} of its own; leave it out: "
                f"{empty}"
            )
    yield from _evaluation_problems(config)
    yield from _unsupported(config)
    yield from _weight_problems(config)


def _evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings of evaluations that no source has questions for.

    A source asks `eval.questions` of its test rows: its own number, or else the run's.
    """
    if has_questions(config.data, config.eval.questions):
        return
    every, sources = config.eval.every, config.data.sources
    has_rows = has_test_rows(config.data)
    why = "every source has eval.questions=0" if has_rows else "no source has test rows"
    remedy = f"set {SOURCES}.{next(iter(sources))}.eval.questions=…, or " if has_rows else ""
    # The run's own eval.questions=0 is the way to turn evaluations off. Then eval.every, which has
    # a default, is no mistake.
    if config.eval.questions and every is not None:
        yield f"eval.every={every}: {why}; {remedy}leave it out"
    if config.checkpoint.keep_best:
        yield f"checkpoint.keep_best=true: {why}; {remedy}leave it out"


def _share_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problem if `count` of the sources, their tasks in a step, do not fit a step."""
    sources, tasks = config.data.sources, config.tasks_per_step
    counts = {name: source.count for name, source in sources.items() if source.count is not None}
    total = sum(counts.values())
    settings = " ".join(f"{SOURCES}.{name}.count={count}" for name, count in counts.items())
    if counts and len(counts) == len(sources) and total != tasks:
        yield f"{settings}: add up to {total}; set tasks_per_step={total}, or change them"
    elif len(counts) < len(sources) and total >= tasks:
        uncounted = ", ".join(name for name in sources if name not in counts)
        yield (
            f"{settings}: leave nothing of tasks_per_step={tasks} to {uncounted}; lower them, or "
            "raise tasks_per_step"
        )


def _unsupported(config: RunConfig) -> Iterator[str]:
    """Yield settings that know one source of rows only."""
    agent, runtime, algorithm = config.agent, config.runtime, config.algorithm
    teacher = algorithm.teacher
    if algorithm.advantage is Advantage.batch:
        yield (
            "algorithm.advantage=batch: would compare rewards of different sources; set "
            f"algorithm.advantage=group, or leave {SOURCES} out"
        )
    if algorithm.scale is Scale.batch:
        yield (
            "algorithm.scale=batch: would divide advantages by the deviation over all sources; set "
            f"algorithm.scale=group or none, or leave {SOURCES} out"
        )
    if agent.outside:
        yield (
            f"agent={agent.name}: an outside agent has one set of tools and rows; leave "
            f"{SOURCES} out, or set agent=none"
        )
    if runtime.has_machines:
        yield (
            f"runtime={runtime.name}: containers are not made for the rows of several sources; "
            f"leave {SOURCES} out, or set runtime=bwrap"
        )
    if teacher is not None:
        yield (
            "algorithm.teacher: is asked about the rows of one source; leave it out, or leave "
            f"{SOURCES} out"
        )
    if config.user:
        yield (
            f"user._target_={config.user.get('_target_')}: would speak in the rollouts of all "
            "sources; leave it out, or let an environment's `user` speak"
        )
    if config.eval.tools is not None:
        yield (f"eval.tools={shown(config.eval.tools)}: names tools of one source; leave it out")


def _weight_problems(config: RunConfig) -> Iterator[str]:
    """Yield rewards of one name and two weights, if the algorithm weighs rewards by name."""
    algorithm = config.algorithm
    if algorithm.rewards is Rewards.sum and algorithm.turn_credit is None:
        return
    weights: dict[str, tuple[str, float]] = {}
    for source, view in source_views(config).items():
        for name, section in view.reward.items():
            if not isinstance(section, Mapping):  # `section_problems` reports it
                continue
            weight = section.get("weight", RewardSettings.weight)
            first_source, first = weights.setdefault(name, (source, weight))
            if weight != first:
                yield (
                    f"{SOURCES}.{source}.reward.{name}.weight={weight:g}: the algorithm weighs "
                    f"rewards by their names, and {name} has the weight {first:g} in "
                    f"{SOURCES}.{first_source}; give one of them another name"
                )


SINGLE_SOURCE = {
    "sft": "learns from the conversations of one source",
    "play": "talks to one set of tools",
    "tools": "shows one set of tools",
}
"""Verbs that know one source of rows only, and why."""


def single_source_problems(config: RunConfig, verb: str, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a problem if the verb is not made for a run of several sources."""
    if config.data.sources and verb in SINGLE_SOURCE:
        yield (
            f"{SOURCES}: agenttrain {verb} {SINGLE_SOURCE[verb]}, and there are "
            f"{', '.join(config.data.sources)}; choose one: data.only="
            f"{next(iter(config.data.sources))}"
        )


def refuse_sources(command: str, config: RunConfig) -> None:
    """Raise ConfigError for a saved run of several sources, for a command that knows one only."""
    if config.data.sources:
        raise ConfigError(
            f"{command}: the run has several sources ({', '.join(config.data.sources)}), and their "
            "rollouts have tools and rewards of their own; agenttrain view shows them"
        )
