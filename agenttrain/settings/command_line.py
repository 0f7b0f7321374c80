"""The command line as a Command: verb, overrides, options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from agenttrain.settings.compose import Source, open_keys
from agenttrain.settings.messages import ELSEWHERE, REMARKS, setting_keys
from agenttrain.settings.trust import TRUSTED
from agenttrain.settings.verbs import VERBS
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean

RUN_DIR = "hydra.run.dir="
AUTO = "auto"
"""Value of `resume=auto`; a folder of that name is written ./auto."""
TIMESTAMP = "%Y-%m-%d_%H-%M-%S"
EVAL_FOLDERS = (
    f"{RUN_DIR}outputs/${{hydra.job.name}}/${{now:{TIMESTAMP}}}_eval",
    f"hydra.sweep.dir=outputs/${{hydra.job.name}}/sweep_${{now:{TIMESTAMP}}}_eval",
)
"""Folders of `agenttrain eval`; an override of the user's comes later and wins."""

OF_A_RUN = ("eval", "play", "serve")
"""Verbs that take a saved run by `run=`; the others take it by `resume=`."""
WITH_VALUE = (
    *("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c"),
    *("--package", "-p", "--info", "-i", "--experimental-rerun"),
)
"""Hydra's options that take the argument after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A parsed command line."""

    arguments: list[str]
    """The command line itself."""
    verb: str
    overrides: list[str]
    """Overrides without that of `saved`."""
    saved: Path | None
    """The folder of `resume=` (train, sft, check) or `run=` (`OF_A_RUN`)."""
    trust: bool
    """True for `trust=true`: the code that `saved` names may run."""
    auto: bool
    """True for `resume=auto`: `saved` is hydra.run.dir if it holds a run, else None."""
    options: list[str]
    """The other arguments, for Hydra."""
    source: Source
    sweep: bool
    shows: str | None
    """Output of Hydra's instead of a run: `job`, `hydra` or `all` of --cfg, or `other`."""

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments without the verb, for summary.json; empty where a run goes on."""
        return () if self.saved else tuple(split_verb(self.arguments)[1])


def resuming(verb: str) -> str:
    """Return the words between `agenttrain` and `resume=…`: ``"sft "``, nothing for train."""
    return "" if verb == "train" else f"{verb} "


def parse(arguments: Sequence[str]) -> Command:
    """Parse the arguments; raises ConfigError for mistakes in them."""
    for word in arguments:
        # TRL's spelling: --num_generations 8, --learning-rate=1e-5.
        name, _, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and (name in ELSEWHERE or name in setting_keys()):
            ours = ELSEWHERE.get(name, name)
            remark = f" ({REMARKS[name]})" if name in REMARKS else ""
            raise ConfigError(
                f"{word}: settings are written key=value; write {ours}={value or '…'}{remark}"
            )
    typed_verb(arguments)
    verb, words = split_verb(arguments)
    parser = get_args_parser()
    parser.error = _raise_usage  # type: ignore[method-assign]
    parsed = parser.parse_intermixed_args(words)
    if parsed.config_path is not None:
        raise ConfigError("--config-path: use --config-dir, which adds a folder of your groups")
    for setting in (RUN_DIR, "hydra.sweep.dir="):
        if setting in parsed.overrides:
            remedy = "name one (is a shell variable empty?), or leave it out"
            raise ConfigError(f"{setting}: no folder; {remedy}")
    untrusted, trust = take_trust(parsed.overrides)
    overrides, saved = _take_saved(untrusted, verb)
    if trust and saved is None:
        raise ConfigError(
            f"{TRUSTED}: lets the code run that a saved run names; it goes with "
            f"{'run=' if verb in OF_A_RUN else 'resume='}, leave it out"
        )
    if misplaced := [word for word in overrides if word in VERBS]:
        raise ConfigError(f"{misplaced[0]}: the verb comes first: agenttrain {misplaced[0]} …")
    sweep = parsed.multirun or "hydra.mode=MULTIRUN" in overrides
    if parsed.multirun and parsed.cfg:
        raise ConfigError("--cfg: shows one run; leave -m out")
    if sweep and saved and verb in ("eval", "check"):
        raise ConfigError(f"-m: a sweep starts new runs; it cannot be combined with {saved}")
    auto = saved == Path(AUTO) and verb not in OF_A_RUN
    if auto:
        folder = named_folder(overrides)
        if folder is None:
            raise ConfigError(
                f"resume=auto: goes on with the run in a folder, or starts it there; add "
                f"{RUN_DIR}<folder>, the same each time"
            )
        saved = folder if (folder / "config.yaml").exists() else None
    if saved is None:
        overrides = open_keys([*(EVAL_FOLDERS if verb == "eval" else ()), *overrides])
    shows = parsed.cfg
    if not shows and any(
        (parsed.info, parsed.hydra_help, parsed.shell_completion, parsed.experimental_rerun)
    ):
        shows = "other"
    return Command(
        arguments=list(arguments),
        verb=verb,
        overrides=overrides,
        saved=saved,
        trust=trust,
        auto=auto,
        options=[text for text in words if text not in parsed.overrides],
        source=Source(extra=parsed.config_dir, name=parsed.config_name or "train"),
        sweep=sweep,
        shows=shows or None,
    )


def split_verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb, `train` when none is given, and the other arguments.

    Example: ``["--config-dir", "mine", "check", "seed=1"]`` -> ``("check", ["--config-dir", "mine",
    "seed=1"])``.
    """
    position = _first_word(arguments)
    if position is None or arguments[position] not in VERBS:
        return "train", list(arguments)
    return arguments[position], [*arguments[:position], *arguments[position + 1 :]]


def _first_word(arguments: Sequence[str]) -> int | None:
    """Return the position of the first argument that is neither an option nor an option's value."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if arguments[position] in WITH_VALUE else 1
    return position if position < len(arguments) else None


def typed_verb(arguments: Sequence[str]) -> str | None:
    """Return the verb, None when none is given; raises ConfigError for a word that is no verb."""
    position = _first_word(arguments)
    word = "" if position is None else arguments[position]
    if word and "=" not in word and word not in VERBS and not word.startswith(("+", "~")):
        raise ConfigError(
            f"{word}: no such verb{did_you_mean(word, VERBS)}; the verbs are {', '.join(VERBS)}, "
            "and settings are written key=value"
        )
    return word if word in VERBS else None


def _raise_usage(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see agenttrain --help")


def take_trust(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words without `trust=…`, and True if one of them was `trust=true`."""
    typed = [word for word in words if word.startswith("trust=")]
    if any(word not in (TRUSTED, "trust=false") for word in typed):
        raise ConfigError(f"{typed[-1]}: expected {TRUSTED}, or leave it out")
    return [word for word in words if word not in typed], TRUSTED in typed


def first_value(words: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Return the words without ``<name>=<value>``, and the value of a verb's own word, or None.

    Raises ConfigError for a word without a value, and for two of them.
    """
    typed = [word for word in words if word.startswith(f"{name}=")]
    values = [word.partition("=")[2] for word in typed]
    if len(typed) > 1 or not all(values):
        raise ConfigError(f"{typed[-1]}: give {name}= one value")
    return [word for word in words if word not in typed], values[0] if values else None


def _take_saved(overrides: Sequence[str], verb: str) -> tuple[list[str], Path | None]:
    """Return the overrides without `resume=` or, for a verb in `OF_A_RUN`, `run=`; its folder."""
    own, other = ("run", "resume") if verb in OF_A_RUN else ("resume", "run")
    left, saved = [], None
    for text in overrides:
        key, _, value = text.partition("=")
        if key == other:
            named = f"run={quote(value)}"
            remedy = named if verb in OF_A_RUN else f"agenttrain eval {named}"
            raise ConfigError(f"{text}: not with `agenttrain {verb}`; did you mean {remedy}?")
        if key != own:
            left.append(text)
        elif not value:
            raise ConfigError(
                f"{text}: no folder; name a run's (is a shell variable empty?), or leave it out"
            )
        elif saved is not None:
            raise ConfigError(f"{text}: {own}={saved} is there already; name one folder")
        elif value != "null":
            saved = Path(value)
    return left, saved


def named_folder(overrides: Sequence[str]) -> Path | None:
    """Return the folder of `hydra.run.dir=`; None if there is none or Hydra has to complete it."""
    typed = [text for text in overrides if text.startswith(RUN_DIR)]
    if not typed:
        return None
    try:
        # Hydra removes the quotes that a name may need: hydra.run.dir='my run=1' -> my run=1
        value = str(OverridesParser.create().parse_overrides([typed[-1]])[0].value())
    except OverrideParseException:  # composition reports the mistake
        value = typed[-1].partition("=")[2]
    return None if "${" in value else Path(value)
