"""A command that composes settings: its verb, its overrides, and the saved run that it names."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from agenttrain.settings.compose import Source, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError

CHECK = "check"
"""The verb that checks for the others; it counts as `train`."""
RUN_DIR = "hydra.run.dir="
TRUSTED = "trust=true"
"""Lets the code run that a saved run names."""
AUTO = "auto"
"""Value of `resume=auto`; a folder of that name is written ./auto."""
TIMESTAMP = "%Y-%m-%d_%H-%M-%S"
EVAL_FOLDERS = (
    f"{RUN_DIR}outputs/${{hydra.job.name}}/${{now:{TIMESTAMP}}}_eval",
    f"hydra.sweep.dir=outputs/${{hydra.job.name}}/sweep_${{now:{TIMESTAMP}}}_eval",
)
"""Folders of `agenttrain eval`; an override of the user's comes later and wins."""
VERBS_WITH_RUN = ("eval", "play", "serve")
"""Verbs that take a saved run by `run=`; the others take it by `resume=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line whose settings are composed.

    Example, for ``agenttrain eval --config-dir my_conf run=outputs/a eval.questions=5``::

        arguments  ["eval", "--config-dir", "my_conf", "run=outputs/a", "eval.questions=5"]
        typed      ["--config-dir", "my_conf", "run=outputs/a", "eval.questions=5"]
        overrides  ["eval.questions=5"]
        saved      Path("outputs/a")
        source     Source(extra="my_conf")
    """

    arguments: list[str]
    """The command line, with the verb."""
    typed: list[str]
    """The command line without the verb, as it was typed."""
    verb: str
    """The verb that the settings are for."""
    overrides: list[str]
    """The typed overrides without the one that names `saved`, and without `trust=…`. Those of a
    new run may add keys (`open_keys`)."""
    saved: Path | None
    """The folder of `resume=` (train, sft, check) or `run=` (`VERBS_WITH_RUN`)."""
    trust: bool
    """True for `trust=true`: the code that `saved` names may run."""
    auto: bool
    """True for `resume=auto`: `saved` is hydra.run.dir if it holds a run, else None."""
    source: Source
    """The user's YAML files: the folder of --config-dir (`extra`), the file of --config-name."""
    sweep: bool
    """True if it starts several runs (`-m`)."""
    before_start: Callable[[Path, RunConfig], object] = lambda folder, config: None
    """Called with folder and settings of a run that is about to start, or needs no start because it
    is finished. May raise ConfigError."""

    @property
    def words(self) -> tuple[str, ...]:
        """`typed`, for summary.json; empty with `saved`: a resumed run keeps those of its start."""
        return () if self.saved else tuple(self.typed)

    @property
    def options(self) -> list[str]:
        """The options that name other YAML files, for a command that composes the same."""
        folder = ["--config-dir", self.source.extra] if self.source.extra else []
        name = ["--config-name", self.source.name] if self.source.name != "train" else []
        return [*folder, *name]


def resuming(verb: str) -> str:
    """Return the words between `agenttrain` and `resume=…`: ``"sft "``, nothing for train."""
    return "" if verb == "train" else f"{verb} "


def command_of(
    verb: str, args: Namespace, overrides: Sequence[str], *, checks: bool = False
) -> Command:
    """Return the command of a verb's parsed arguments; raises ConfigError for mistakes in them.

    `checks`: the command is `agenttrain check`, which only checks the settings of `verb`.
    """
    for setting in (RUN_DIR, "hydra.sweep.dir="):
        if setting in overrides:  # nothing follows the "="
            remedy = "name one (is a shell variable empty?), or leave it out"
            raise ConfigError(f"{setting}: no folder; {remedy}")
    without_trust, trust = take_trust(overrides)
    settings, saved = _take_saved(without_trust, verb)
    if trust and saved is None:
        raise ConfigError(
            f"{TRUSTED}: lets the code run that a saved run names; it goes with "
            f"{'run=' if verb in VERBS_WITH_RUN else 'resume='}, leave it out"
        )
    sweep = args.multirun or "hydra.mode=MULTIRUN" in settings
    if args.multirun and getattr(args, "cfg", None):
        raise ConfigError("--cfg: shows one run; leave -m out")
    if sweep and saved and (verb == "eval" or checks):
        raise ConfigError(f"-m: a sweep starts new runs; it cannot be combined with {saved}")
    auto = saved == Path(AUTO) and verb not in VERBS_WITH_RUN  # resume=auto
    if auto:
        saved = _find_run_of_auto(settings)
    if saved is None:
        # For a saved run the callers call `open_keys`, once they have taken some overrides out.
        settings = open_keys([*(EVAL_FOLDERS if verb == "eval" else ()), *settings])
    return Command(
        arguments=args.command_line,
        typed=args.words,
        verb=verb,
        overrides=settings,
        saved=saved,
        trust=trust,
        auto=auto,
        source=source_of(args),
        sweep=sweep,
    )


def _find_run_of_auto(overrides: Sequence[str]) -> Path | None:
    """Return the run folder with which `resume=auto` goes on; None if it starts a run there.

    Raises ConfigError unless the overrides name a folder.
    """
    folder = named_folder(overrides)
    if folder is None:
        raise ConfigError(
            f"resume=auto: goes on with the run in a folder, or starts it there; add "
            f"{RUN_DIR}<folder>, the same each time"
        )
    return folder if (folder / "config.yaml").exists() else None


def source_of(args: Namespace) -> Source:
    """Return the places of YAML files that --config-dir and --config-name give."""
    extra = None if args.config_dir is None else str(args.config_dir)
    return Source(extra=extra, name=args.config_name or "train")


def take_trust(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words without `trust=…`, and True if one of them was `trust=true`."""
    trust_words = [word for word in words if word.startswith("trust=")]
    if any(word not in (TRUSTED, "trust=false") for word in trust_words):
        raise ConfigError(f"{trust_words[-1]}: expected {TRUSTED}, or leave it out")
    return [word for word in words if word not in trust_words], TRUSTED in trust_words


def _take_saved(overrides: Sequence[str], verb: str) -> tuple[list[str], Path | None]:
    """Return the overrides without `resume=<folder>`, and that folder; None if there is none.

    For a verb in `VERBS_WITH_RUN` it is `run=<folder>`. Raises ConfigError for the key that the
    verb does not take.
    """
    expected, other = ("run", "resume") if verb in VERBS_WITH_RUN else ("resume", "run")
    settings, saved = [], None
    for text in overrides:
        key, _, value = text.partition("=")
        if key == other:
            suggestion = f"run={quote(value)}"
            remedy = suggestion if verb in VERBS_WITH_RUN else f"agenttrain eval {suggestion}"
            raise ConfigError(f"{text}: not with `agenttrain {verb}`; did you mean {remedy}?")
        if key != expected:
            settings.append(text)
        elif not value:
            raise ConfigError(
                f"{text}: no folder; name a run's (is a shell variable empty?), or leave it out"
            )
        elif saved is not None:
            raise ConfigError(f"{text}: {expected}={saved} is there already; name one folder")
        elif value != "null":  # resume=null names none
            saved = Path(value)
    return settings, saved


def named_folder(overrides: Sequence[str]) -> Path | None:
    """Return the folder of `hydra.run.dir=`; None if there is none or Hydra has to complete it."""
    run_dirs = [text for text in overrides if text.startswith(RUN_DIR)]
    if not run_dirs:
        return None
    try:
        # Hydra removes the quotes that a name may need: hydra.run.dir='my run=1' -> my run=1
        value = str(OverridesParser.create().parse_overrides([run_dirs[-1]])[0].value())
    except OverrideParseException:  # composition reports the mistake
        value = run_dirs[-1].partition("=")[2]
    return None if "${" in value else Path(value)
