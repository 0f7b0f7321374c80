"""Configurations of earlier runs: what `resume=` and `eval run=` start from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from agenttrain.config.compose import Composed, Source, compose_raw, compose_run, convert
from agenttrain.config.errors import ConfigError, explained
from agenttrain.config.schema import Init, RunConfig
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.trust import SECTIONS, check_trusted, is_own, named_code

RESUMABLE = (
    *("steps", "eval", "checkpoint", "tracker", "engine", "guards", "distributed", "watchdog"),
    "resume_changed",
)
"""What a resumed run may change: the rest decides what it learns."""
EVALUABLE = (
    *("eval", "data", "engine", "tracker", "rollout", "reward", "seed", "distributed"),
    "watchdog",
)
"""What an evaluation of a run may change: the rest is the agent itself."""


def check_new(config: RunConfig) -> None:
    """Raise ConfigError for what only a run that goes on can have."""
    if config.resume is not None:
        raise ConfigError(
            f"resume={config.resume}: has no effect in a YAML file; leave it out there, "
            f"and type agenttrain resume={quote(config.resume)}"
        )
    if config.resume_changed:
        raise ConfigError("resume_changed: there is no run yet to go on with; leave it out")


def resumed(
    folder: Path,
    overrides: Sequence[str],
    source: Source,
    *,
    trust: bool = False,
    runs: Sequence[str] = SECTIONS,
) -> Composed:
    """The settings of `resume=<folder>`; raises ConfigError. Needs a `hydra_session`.

    `trust`: the code that the folder's config.yaml names may run. Without it that has to be the
    user's own or bundled code in the sections that the verb `runs`.
    """
    said = f"resume={folder}"
    changed = _changed(said, folder, overrides, RESUMABLE, source, runs=runs, trust=trust)
    return _going_on(said, folder, changed)


def resumed_as_begun(folder: Path, overrides: Sequence[str], source: Source) -> Composed:
    """The settings of `resume=auto` where `folder` holds a run: those that `overrides` make.

    Raises ConfigError where they are not the ones that the run was started with. Needs a
    `hydra_session`.
    """
    said = f"resume=auto hydra.run.dir={folder}"
    composed = compose_run(overrides, source)
    begun = convert(_typed(said, folder))
    found = [
        f"{key}={now}: the run in {folder} was started with {key}={before}; leave it so, or name "
        "another folder"
        for key, before, now in _differences(begun.plain, composed.plain)
        if key.partition(".")[0] not in (*RESUMABLE, "resume")
    ]
    if found:
        raise ConfigError("\n".join(found))
    return _going_on(said, folder, composed)


def _going_on(said: str, folder: Path, composed: Composed) -> Composed:
    """`composed` for the run in `folder`; raises ConfigError where that cannot go on."""
    if _is_evaluation(folder):
        raise ConfigError(f"{said}: holds an evaluation, which cannot go on; name a run's folder")
    steps, done = composed.config.steps, done_steps(folder)
    if steps < done:
        raise ConfigError(
            f"steps={steps}: the run in {folder} has done {done} steps already; leave steps out, "
            f"or raise it above {done}"
        )
    composed.config.resume = str(folder)
    composed.plain["resume_changed"] = []  # of this time only
    return composed


def _differences(
    before: Any, now: Any, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """(key, value before, value now) of each setting that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            values = before.get(name), now.get(name)
            yield from _differences(*values, prefix=(*prefix, str(name)))
    elif before != now:
        yield ".".join(prefix), before, now


def viewed(folder: Path, source: Source) -> Composed:
    """The settings of the run or evaluation of `view <folder>`, as `resumed`."""
    return _changed(f"view {folder}", folder, [], (), source, runs=())


def replayed(
    folder: Path, source: Source, *, trust: bool = False, runs: Sequence[str] = SECTIONS
) -> Composed:
    """The settings of the run, or crash, of `replay <folder>`, as `resumed`."""
    return _changed(f"replay {folder}", folder, [], (), source, runs=runs, trust=trust)


def rescored(
    folder: Path, overrides: Sequence[str], source: Source, *, trust: bool = False
) -> Composed:
    """The settings of `rescore <folder>`, with another reward; as `resumed`."""
    runs, allowed = ("reward", "data"), ("reward",)
    return _changed(f"rescore {folder}", folder, overrides, allowed, source, runs=runs, trust=trust)


def evaluated(
    folder: Path, overrides: Sequence[str], source: Source, *, trust: bool = False
) -> Composed:
    """The settings of `eval run=<folder>`, with the checkpoint as the model.

    `folder` is a run's, for its newest checkpoint, or a checkpoint's. Raises ConfigError. Needs a
    `hydra_session`.
    """
    run = run_of(folder)
    composed = _changed(f"run={run}", run, overrides, EVALUABLE, source, trust=trust)
    checkpoint = run / "checkpoints" / "latest" if run == folder else folder
    if not checkpoint.is_dir():
        raise ConfigError(f"run={folder}: has no checkpoint yet")
    if _summary(run).get("verb") == "sft" and not any(re.match(r"data\b", o) for o in overrides):
        raise ConfigError(
            f"run={folder}: its data are demonstrations, which hold the answers; name the tasks to "
            "evaluate on, e.g. data=shop"
        )
    path = str(checkpoint.resolve())
    composed.config.model.path = composed.plain["model"]["path"] = path
    composed.config.model.init = Init.pretrained
    composed.plain["model"]["init"] = str(Init.pretrained)
    return composed


def run_of(folder: Path) -> Path:
    """The run that a run's folder, or one of its checkpoints', belongs to."""
    inside = folder.resolve().parent
    is_checkpoint = inside.name == "checkpoints" and not (folder / "config.yaml").exists()
    return folder.parent.parent if is_checkpoint else folder


def finished_steps(folder: Path) -> int | None:
    """Steps of a finished run; None for one that is not finished."""
    summary = _summary(folder)
    return int(summary.get("steps", 0)) if summary.get("status") == "finished" else None


def done_steps(folder: Path) -> int:
    """Steps that a resumed run would not do again: those up to its newest checkpoint."""
    names = [path.name for path in (folder / "checkpoints").glob("step-*")]
    numbers = [int(name.removeprefix("step-")) for name in names if name[5:].isdecimal()]
    return max([finished_steps(folder) or 0, *numbers])


def _is_evaluation(folder: Path) -> bool:
    # Evaluations of earlier versions name no verb; a run that finished has done a step.
    return _summary(folder).get("verb") == "eval" or finished_steps(folder) == 0


def _summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty where there is none that can be read."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _changed(
    said: str,
    folder: Path,
    overrides: Sequence[str],
    allowed: Sequence[str],
    source: Source,
    *,
    runs: Sequence[str] = SECTIONS,
    trust: bool = False,
) -> Composed:
    """The settings of the run in `folder` with overrides on top, of `allowed` sections only.

    `said` is what the user named the folder with. Code that config.yaml names in the sections that
    are `runs` is checked as `check_trusted` does, unless an override put other code in its place.
    """
    parsed = [_parse(text, source) for text in overrides]
    for override in parsed:
        section = override.key_or_group.partition(".")[0]
        if section not in allowed or override.type is OverrideType.DEL:
            raise ConfigError(
                f"{override.input_line}: cannot be combined with {said}"
                f"{did_you_mean(section, allowed)}; what may change is: {', '.join(allowed)}"
            )
    node, own = _read(said, folder)
    before = named_code(cast(dict[str, Any], OmegaConf.to_container(node)), runs)
    with explained(overrides, source.groups):
        _apply(parsed, node, source)
        composed = convert(node)
    typed = {override.key_or_group for override in parsed}
    code = [
        text
        for text in named_code(composed.plain, runs)
        if text in before and text.partition("=")[0] not in typed
    ]
    check_trusted(said, code, trust=trust or own)
    return composed


def _parse(text: str, source: Source) -> Override:
    with explained([text], source.groups):
        override: Override = OverridesParser.create().parse_overrides([text])[0]
    if override.is_sweep_override():
        raise ConfigError(f"{text}: a saved run takes one value, not several")
    return override


def _typed(said: str, folder: Path) -> DictConfig:
    return _read(said, folder)[0]


def _read(said: str, folder: Path) -> tuple[DictConfig, bool]:
    """The settings in a folder's config.yaml, and whether this user's own run wrote them."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{said}: is no run folder: there is no config.yaml in it")
    try:
        plain = OmegaConf.load(file)
        if not plain:
            raise ValueError("it is empty")
        if not isinstance(plain, DictConfig):
            raise ValueError("it holds a list, and a run's settings are a mapping of names")
        own = is_own(cast(dict[str, Any], OmegaConf.to_container(plain)))
        plain.pop("provenance", None)
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        OmegaConf.resolve(typed)
        return cast(DictConfig, typed), own
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 text: {error.reason} at byte {error.start}"
    except RecursionError:
        problem = "a value in it contains itself, or is nested too deeply"
    except Exception as error:
        problem = str(error).partition("\n")[0]
    raise ConfigError(
        f"{said}: its config.yaml does not fit: {problem}; put back the file that the run wrote"
    )


def _apply(overrides: Sequence[Override], node: DictConfig, source: Source) -> None:
    """First the groups that are chosen anew, then the single values, as Hydra does."""
    groups = source.groups()
    chosen = [
        o for o in overrides if o.key_or_group in groups and isinstance(o.value(), str | list)
    ]
    fresh = compose_raw([str(o.input_line) for o in chosen], source)
    for override in chosen:
        node[override.key_or_group] = fresh[override.key_or_group]
    for override in overrides:
        if override not in chosen:
            OmegaConf.update(node, override.key_or_group, override.value(), force_add=True)
