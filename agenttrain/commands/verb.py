"""The grammar of the command line: what a verb is, and how its words are divided.

    agenttrain <verb> [arguments] [--option VALUE …] [key=value …]

Options belong to the verb, settings to the run. `--json [FILE]` prints a verb's result as JSON in
the place of text; with a file, whose name ends in .json, the text is printed too. An option with a
value may also be written as a setting is: `step=3` for `--step 3`.

Help, completion and docs/reference/verbs.md are made of the parsers.
"""

from __future__ import annotations

import json
import os
from argparse import (
    Action,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawTextHelpFormatter,
    _ActionsContainer,
    _AppendAction,
)
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.names import did_you_mean

VERBS = (
    *("train", "sft", "eval", "submit", "check", "rehearse", "plan", "data", "images", "tools"),
    *("templates", "settings", "view", "timeline", "replay", "rescore", "compare", "play", "serve"),
    *("engine-server", "servers", "export", "completion", "init", "doctor"),
)
"""Names of the verbs, in the order of the help."""
STDOUT = Path("-")
"""Value of `--json` without a file."""
SETTINGS = "key=value"
"""Placeholder of the settings in a usage line; words there that are none are mistakes."""
BAD_VALUE = "value "
"""Beginning of the errors of our types, which argparse puts behind ``argument --rows: ``."""
HYDRAS = {
    **dict.fromkeys(
        ("--config-path", "-cp"), "use --config-dir, which adds a folder of your groups"
    ),
    **dict.fromkeys(("--run", "-r"), "a run starts without it; leave it out"),
    **dict.fromkeys(
        ("--shell-completion", "-sc"), "agenttrain completion install is for bash and zsh"
    ),
    "--experimental-rerun": "agenttrain resume=FOLDER goes on with a run, and agenttrain replay "
    "FOLDER repeats its rollouts",
}
"""Hydra's options that agenttrain does not take, and what is in their place."""
SAVED = {
    "resume=FOLDER": "go on with the run in this folder, to the same bits",
    "trust=true": "let the code run that the folder's config.yaml names",
}
"""Settings of the verbs that take a saved run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One verb of the command line."""

    name: str
    help: str
    """One line, without the verb itself."""
    page: str
    """Page of docs/ about it."""
    examples: Mapping[str, str]
    """Words behind `agenttrain`, mapped to what they are for; `<run>` stands for a run's name."""
    command: str
    """A module of this folder and its function: ``export:export_checkpoint``.

    It is imported when the verb runs, and gets the arguments and, if the verb takes any, the
    settings."""
    check: str | None = None
    """The function of `agenttrain check` for a verb that composes its settings itself, named and
    called as `command` is. None: they are composed and checked as those of a run."""
    add_arguments: Callable[[ArgumentParser], None] = lambda parser: None
    settings: Mapping[str, str] | None = None
    """Settings that users of the verb look for, and their meanings; None: it takes no settings."""
    shows: bool = False
    """True: it takes Hydra's options that print the composed settings (`--cfg job`)."""

    def run(self, args: Namespace, settings: list[str]) -> int:
        """Do the work; return the exit code. Raises ConfigError."""
        settings_of_verb = () if self.settings is None else (settings,)
        return call_command(self.command, args, *settings_of_verb)

    def parser(self) -> VerbParser:
        """Return the parser of the words behind the verb."""
        parser = VerbParser(self)
        self.add_arguments(parser)
        if self.settings is not None:
            add_settings(parser, shows=self.shows)
        return parser

    def parse(self, words: Sequence[str]) -> tuple[Namespace, list[str]]:
        """Return the arguments and the settings among the words; raises ConfigError."""
        return self.parser().parse_words(words)


def call_command(command: str, *arguments: Any) -> int:
    """Import and call a command of this folder, ``export:export_checkpoint``; return its code."""
    module, _, name = command.partition(":")
    code: int = getattr(import_module(f"agenttrain.commands.{module}"), name)(*arguments)
    return code


class VerbParser(ArgumentParser):
    """An argparse parser that leaves settings alone and raises ConfigError."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(
            prog=f"agenttrain {verb.name}",
            description=f"{verb.help[0].upper()}{verb.help[1:]}.",
            epilog=_epilog(verb),
            add_help=False,
            allow_abbrev=False,
            formatter_class=partial(RawTextHelpFormatter, max_help_position=32, width=100),
        )
        self.verb = verb

    @property
    def options(self) -> dict[str, Action]:
        """The options, by each of their spellings."""
        return {name: action for action in self._actions for name in action.option_strings}

    @property
    def positionals(self) -> list[Action]:
        """The verb's arguments that are no options, without the settings."""
        positionals = [action for action in self._actions if not action.option_strings]
        return [action for action in positionals if action.dest != "settings"]

    def parse_words(self, words: Sequence[str]) -> tuple[Namespace, list[str]]:
        """Return the arguments and the settings among the words; raises ConfigError."""
        arguments, settings = self._divide(words)
        if settings and self.verb.settings is None:
            raise ConfigError(self._unknown_message(settings[0]))
        parsed = self.parse_intermixed_args(arguments)
        # `add_settings` adds a positional `settings`, for the help. `_divide` has taken out all
        # real settings: words that argparse puts there are mistakes.
        if misplaced := getattr(parsed, "settings", None):
            if misplaced[0] in VERBS:
                raise ConfigError(
                    f"{misplaced[0]}: the verb comes first: agenttrain {misplaced[0]} …"
                )
            raise ConfigError(
                f"{misplaced[0]}: settings are written key=value; see {self.prog} --help"
            )
        return parsed, settings

    def _divide(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words for argparse (options, their values, arguments), and the settings.

        Example: for `rescore` ``["runs/a", "step=3", "seed=1"]`` -> ``(["runs/a", "--step=3"],
        ["seed=1"])``, because `--step` is an option of the verb.
        """
        options, seen = self.options, set[str]()
        arguments: list[str] = []
        settings: list[str] = []
        remaining = deque(words)
        while remaining:
            word = remaining.popleft()
            name, equals, _ = word.partition("=")
            if word.startswith("-"):
                option_name = name
            elif equals:
                option_name = _option_name(name)  # step=3 is --step=3
            else:
                option_name = ""
            option = options.get(option_name)
            if option is not None:
                if option.nargs != 0:  # an option without a value may be repeated
                    if option.dest in seen and not isinstance(option, _AppendAction):
                        raise ConfigError(f"{word}: {option.option_strings[0]} is there already")
                    seen.add(option.dest)
                arguments += _take_option_words(option, option_name, word, remaining)
            elif word.startswith("-") and word != "-":
                raise ConfigError(self._unknown_message(word))
            elif (equals and not self._names_folder(word)) or word.startswith(("+", "~")):
                settings.append(word)
            else:
                arguments.append(word)
        return arguments, settings

    def _names_folder(self, word: str) -> bool:
        """Return True if `word` is a folder, not a setting: a sweep's job may be ``seed=1``."""
        return bool(self.positionals) and Path(word).is_dir()

    def _unknown_message(self, word: str) -> str:
        """Return the error for a word that looks like an option or a setting and is none.

        It may be an option of Hydra's (``--run``), a setting that only this verb has, typed as an
        option (``--trust=true``), or another setting typed so, in the spelling of this package, TRL
        or verl (``--num_generations 8``). Any other word gets the list of options.
        """
        name, _, value = word.partition("=")
        if self.verb.settings is not None:
            from agenttrain.settings.messages import elsewhere, setting_keys

            if name in HYDRAS:
                return f"{name}: {HYDRAS[name]}"
            # TRL's spelling: --num_generations 8, --learning-rate=1e-5.
            key = name.removeprefix("--").replace("-", "_")
            # Settings of the verb beside those of a run. The keys of `verb.settings` are texts as
            # the help shows them: "trust=true", "run=FOLDER".
            for setting in self.verb.settings:
                if setting.startswith(f"{key}="):
                    return f"{word}: settings are written key=value; write {setting}"
            # Keys of TRL and verl -> ours, some with a remark: "engine.name (…)".
            keys_of_others = elsewhere()
            if key in keys_of_others or key in setting_keys():
                our_key, space, remark = keys_of_others.get(key, key).partition(" ")
                setting = f"{our_key}={value or '…'}{space}{remark}"
                return f"{word}: settings are written key=value; write {setting}"
        options = [option for option in self.options if option.startswith("--")]
        hint = did_you_mean(_option_name(name), options)
        listed = ", ".join(options) or "none"
        return f"{word}: is not an option of agenttrain {self.verb.name}{hint}; there are: {listed}"

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as ConfigError, with the option first.

        ``the following arguments are required: folder`` -> ``rescore: the following …; see …``
        ``argument --cfg/-c: expected one argument`` -> ``--cfg: expected one argument; see …``
        ``argument --rows: value many: expected …`` -> ``--rows many: expected …``
        ``argument folder: value runs/a: expected …`` -> ``runs/a: expected …``
        """
        if not message.startswith("argument "):
            raise ConfigError(f"{self.verb.name}: {message}; see {self.prog} --help")
        names, _, problem = message.removeprefix("argument ").partition(": ")
        name = names.partition("/")[0]
        if not problem.startswith(BAD_VALUE):  # argparse's own problem; the others are `bad_value`
            raise ConfigError(f"{name}: {problem}; see {self.prog} --help")
        value_and_problem = problem.removeprefix(BAD_VALUE)
        is_positional = not name.startswith("-")  # typed without a name
        raise ConfigError(value_and_problem if is_positional else f"{name} {value_and_problem}")


def bad_value(text: str, problem: str) -> ArgumentTypeError:
    """Return the error of an argument's type: ``--rows many: expected …``."""
    return ArgumentTypeError(f"{BAD_VALUE}{text}: {problem}")


def _option_name(name: str) -> str:
    """Return the option of a name: ``tokens_per_s`` -> ``--tokens-per-s``."""
    return f"--{name.lstrip('-').replace('_', '-')}"


def _is_optional_value(option: Action, word: str) -> bool:
    """Return True if `word` is the value of `option`, whose value may be left out (`--json`)."""
    if option.choices is not None:
        return word in option.choices
    return word.endswith(".json")


def _take_option_words(option: Action, name: str, word: str, remaining: deque[str]) -> list[str]:
    """Return the words of an option for argparse: `word`, and its values from those `remaining`.

    `name` is the option's spelling for argparse. Examples, with `name` before the arrow::

        --step  step=3         -> ["--step=3"]
        --step  --step 3       -> ["--step", "3"]
        --json  --json x.json  -> ["--json=x.json"]
        --json  --json runs/a  -> ["--json=-"], STDOUT; runs/a remains

    A word without "=" is typed as an option and is `name` itself.
    """
    typed_name, equals, value = word.partition("=")
    if equals and not value and option.nargs != 0:
        raise ConfigError(f"{word}: give {typed_name}= a value, or leave it out")
    if equals:
        return [f"{name}={value}"]
    if option.nargs == "?":
        # argparse would take any word that follows: a setting, a folder.
        has_value = bool(remaining) and _is_optional_value(option, remaining[0])
        return [f"{word}={remaining.popleft() if has_value else option.const}"]
    # nargs is a number of values, or None for one; no option here has "*" or "+".
    number = option.nargs if isinstance(option.nargs, int) else 1
    return [word, *(remaining.popleft() for _ in range(min(number, len(remaining))))]


def _epilog(verb: Verb) -> str:
    """Return the end of the help: settings, examples and the page of the documentation."""
    parts = []
    examples = {f"agenttrain {words}": meaning for words, meaning in verb.examples.items()}
    for title, rows in (("settings", verb.settings or {}), ("examples", examples)):
        width = max(map(len, rows), default=0)
        if rows:
            lines = "\n".join(f"  {left:<{width}}  {text}" for left, text in rows.items())
            parts.append(f"{title}:\n{lines}")
    if verb.settings is not None:
        parts.append("`agenttrain --help` prints the groups, `agenttrain settings` every setting.")
    return "\n\n".join([*parts, f"docs/{verb.page} has more."])


def add_settings(parser: ArgumentParser, *, shows: bool = False) -> None:
    """Add the arguments of every verb that composes settings.

    With `shows` they include Hydra's options that print settings instead of starting a run.
    """
    parser.add_argument(
        "settings", nargs="*", metavar=SETTINGS, help="settings, and options of groups"
    )
    add = parser.add_argument
    add("-m", "--multirun", action="store_true", help="a sweep: seed=1,2 makes two runs")
    add("--config-dir", "-cd", type=Path, metavar="FOLDER", help="add a folder of groups")
    add("--config-name", "-cn", metavar="NAME", help="a file in the place of train.yaml")
    if not shows:
        return
    kinds = ("job", "hydra", "all")
    add(
        *("--cfg", "-c"),
        choices=kinds,
        metavar="|".join(kinds),
        help="print the composed configuration",
    )
    add("--package", "-p", metavar="SECTION", help="with --cfg: this section alone")
    add("--resolve", action="store_true", help="with --cfg: interpolations resolved")
    info = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    text = "print what Hydra found: defaults-tree, searchpath, plugins, …"
    add("--info", "-i", nargs="?", const="all", choices=info, metavar="PART", help=text)
    add("--hydra-help", action="store_true", help="print Hydra's help")


def option_rows(parser: VerbParser) -> dict[str, str]:
    """Map each option of a parser, as it is written (``--step N``), to its meaning."""
    rows = {}
    for action in dict.fromkeys(parser.options.values()):
        # The long spelling, if there is one.
        name = max(action.option_strings, key=lambda text: text.startswith("--"))
        values = action.metavar or "|".join(action.choices or ())
        text = " ".join(values) if isinstance(values, tuple) else values
        if action.nargs == "?":
            text = f"[{text}]"
        rows[f"{name} {text}".strip()] = str(action.help)
    return rows


def add_folder(
    parser: ArgumentParser, metavar: str = "RUN", text: str = "the run's folder"
) -> None:
    """Add the folder that a verb reads."""
    parser.add_argument("folder", type=Path, metavar=metavar, help=text)


def add_json(parser: _ActionsContainer) -> None:
    """Add `--json [FILE]`. Its value is None without it, STDOUT without a file, or the file."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=str(STDOUT),
        type=report_file,
        metavar="FILE.json",
        help="print JSON, or write it to a file",
    )


def add_new_file(parser: ArgumentParser, text: str) -> None:
    """Add `--to FILE`."""
    parser.add_argument("--to", type=new_file, metavar="FILE", help=text)


def report_file(text: str) -> Path:
    """Return the file of a report, which may exist; for argparse."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise bad_value(text, "name a file in an existing folder")
    return path


def new_file(text: str) -> Path:
    """Return a file that does not exist and can be written; for argparse."""
    path = Path(text)
    folder = path.absolute().parent
    if path.exists():
        raise bad_value(text, "is there already; name another file")
    if not folder.is_dir():
        raise bad_value(text, f"there is no folder {path.parent}; make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise bad_value(text, f"{folder} may not be written; name a file in another folder")
    return path


def whole_number(minimum: int = 0, maximum: int | None = None) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from `minimum` to `maximum`, both included.

    `maximum` of None sets no upper bound.
    """

    def read(text: str) -> int:
        # -1 is below every minimum.
        number = int(text) if text.isascii() and text.isdecimal() else -1
        if number < minimum or (maximum is not None and number > maximum):
            bounds = f"{minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
            raise bad_value(text, f"expected a whole number, {bounds}")
        return number

    return read


def positive(text: str) -> float:
    """Return a finite number above 0; for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise bad_value(text, "expected a number above 0")
    return number


class OneOf:
    """A type for argparse that takes one of these names; give it a `metavar` too."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, text: str) -> str:
        if text not in self.names:
            expected = f"expected one of {', '.join(self.names)}"
            raise bad_value(text, f"{expected}{did_you_mean(text, self.names)}")
        return text


def values_of(action: Action) -> Sequence[str]:
    """Return the values that an argument takes; empty if they cannot be listed."""
    return action.type.names if isinstance(action.type, OneOf) else tuple(action.choices or ())


@contextmanager
def as_config_error() -> Iterator[None]:
    """Raise AgenttrainError, OSError and ValueError of the block as ConfigError, same text."""
    try:
        yield
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def write_report(report: Any, file: Path | None) -> None:
    """Print or write `report` as `--json` asks.

    `file` is the value of `--json`: None without the option, a path, or STDOUT. With STDOUT the
    JSON takes the place of the verb's text: the caller prints none. Raises ConfigError for a file
    that cannot be written.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if file is None:
        return
    if file == STDOUT:
        print(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror}; name another file") from error
