"""Settings of the rows and the curriculum, and checks of a source of rows before it is read.

The curriculum chooses the tasks of a step by the success that was measured of them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from glob import glob, has_magic
from pathlib import Path
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import Field, PlainValidator, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from agenttrain.utils.data_fields import Data
from agenttrain.utils.image_files import MOST_PIXELS
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import (
    SETTINGS,
    InvalidSettings,
    Number,
    Quoted,
    Whole,
    field_names,
    plain,
    problem_lines,
    raise_problems,
    shown,
)


class OnBadRow(StrEnum):
    """Consequence of a row that cannot become a task, or that the chat template refuses."""

    error = "error"
    """Stop the run before it begins, naming the first such rows. Two kinds are noticed only when a
    step uses them, and stop the run there: generated rows, which have no end, and texts that the
    template alters (strips, say)."""
    skip = "skip"
    """Leave it out, and print how many rows were left out; those that are drawn count in
    `data/bad_rows`."""


@dataclass(config=SETTINGS)
class CurriculumConfig:
    """Settings for drawing tasks by their success so far.

    Tasks that are solved now and then teach most: those whose share of successful rollouts is from
    `low` to `high` are in the band, and are drawn most often.
    """

    enabled: Data[bool] = False
    """False: tasks are drawn in the order of the rows, or of `data.shuffle`."""
    low: Number = Field(default=0.2, ge=0, le=1)
    """Least share of successful rollouts of a task in the band."""
    high: Number = Field(default=0.8, ge=0, le=1)
    """Largest share of successful rollouts of a task in the band."""
    explore: Number = Field(default=0.5, gt=0, le=1)
    """Share of drawn tasks whose row was never drawn before; new rows come in their order."""
    floor: Number = Field(default=0.1, gt=0, le=1)
    """How often a task outside the band is drawn, compared with one in it: no task is lost."""
    revisit: Whole = Field(default=50, ge=1)
    """Steps after which a measure is too old: such a task is drawn as if it were in the band."""
    memory: Number = Field(default=0.5, ge=0, lt=1)
    """Share of the earlier measures in a new one; 0: only the last group counts."""
    success: Number = 1.0
    """Reward from which on a rollout has succeeded."""

    @model_validator(mode="after")
    def _check(self) -> CurriculumConfig:
        """Check the bounds of the band, and keys without an effect."""
        problems = []
        if self.low > self.high:
            problems.append(
                f"data.curriculum.low={self.low}: needs 0 <= low <= high <= 1, and "
                f"data.curriculum.high={self.high}"
            )
        unused_names = () if self.enabled else field_names(CurriculumConfig)
        for name in unused_names:
            default = getattr(CurriculumConfig, name)
            if (value := getattr(self, name)) != default:
                problems.append(
                    f"data.curriculum.{name}={value}: has no effect without "
                    "data.curriculum.enabled=true"
                )
        raise_problems(problems)
        return self


def _paths(value: object) -> str | list[str] | None:
    """Return the value if it is a text, a list of texts or None."""
    texts = value if isinstance(value, list) else [value]
    if value is None or (texts and all(isinstance(text, str) for text in texts)):
        return value  # type: ignore[return-value]
    raise PydanticCustomError("paths", "expected a text or a list of texts")


Paths = Annotated[Any, PlainValidator(_paths, json_schema_input_type=str | list[str] | None)]
"""A text, a list of texts, or None. OmegaConf has no such type."""

SOURCES = "data.sources"
SOURCE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""Names of sources, which are parts of metrics and of links to checkpoints."""
OWN_SECTIONS = ("tools", "stop_tools", "environment", "reward")
"""Sections of a run that a source may have of its own."""
LEAVE_OUT_SOURCES = "to leave the sources out choose other rows, such as data=file data.path=…"
MIXTURE_KEYS = ("sources", "only")
"""Keys of `data` that a source lacks."""


def _read_sources(sections: object) -> dict[str, Any]:
    """Return the sections of `data.sources` as SourceConfig, by name; raises InvalidSettings."""
    if not isinstance(sections, Mapping):
        raise InvalidSettings(
            f"{SOURCES}={shown(sections)}: is a section; set its keys with {SOURCES}.<name>.<key>=…"
        )
    sources: dict[str, Any] = {}
    problems: list[str] = []
    for name, section in sections.items():
        try:
            sources[str(name)] = _read_source(str(name), section)
        except InvalidSettings as error:
            problems.append(str(error))
    raise_problems(problems)
    return sources


def _read_source(name: str, section: object) -> SourceConfig:
    """Return the section of a source as SourceConfig; raises InvalidSettings with its problems."""
    key = f"{SOURCES}.{name}"
    if isinstance(section, SourceConfig):
        return section
    if not SOURCE_NAME.fullmatch(name):
        raise InvalidSettings(
            f"{key}: a source's name begins with a letter, and has letters, digits, _ and - only; "
            "rename it"
        )
    if not isinstance(section, Mapping):
        raise InvalidSettings(
            f"{key}={shown(section)}: is a section; set its keys with {key}.<key>=…"
        )
    source_keys = [part for part in field_names(SourceConfig) if part not in MIXTURE_KEYS]
    problems = []
    for part, value in section.items():
        if part in MIXTURE_KEYS and value:  # a saved config.yaml has them, empty
            problems.append(
                f"{key}.{part}={shown(value)}: a source has no sources of its own; leave it out"
            )
        elif part not in (*source_keys, *MIXTURE_KEYS):
            hint = did_you_mean(str(part), source_keys)
            hint = hint or f"; its keys are: {', '.join(source_keys)}"
            problems.append(f"{key}.{part}={shown(value)}: unknown key{hint}")
    if not section.get("train"):
        problems.append(
            f"{key}.train: names no rows; set {key}.train._target_=…, or add a group: "
            f"+data@{key}=file"
        )
        raise_problems(problems)  # the other checks read `train`
    values = {part: value for part, value in section.items() if part in source_keys}
    # `test: null` takes the test rows of a group away: an empty section would be merged with them.
    if "test" in values and values["test"] is None:
        values["test"] = {}
    own_sections = [part for part in OWN_SECTIONS if section.get(part) is not None]
    try:
        source = TypeAdapter(SourceConfig).validate_python(values)
    except ValidationError as error:
        # The checks name data.where, tools.…; in the run these are keys of data.sources.<name>.
        problems += [at_source(name, own_sections, line) for line in problem_lines(error, key)]
    raise_problems(problems)
    return source


def at_source(name: str, own_keys: Collection[str], text: str) -> str:
    """Return a message about one source with its keys as they are in the run.

    The parts of a source are checked like those of a whole run, so that messages name ``data.…``,
    and for what the source sets itself (`own_keys`) ``tools.…``, ``stop_tools=…`` and the like.
    Examples for the source shop: ``data.where=a: …`` becomes ``data.sources.shop.where=a: …``, and
    with the own key eval.questions ``eval.questions=0`` becomes
    ``data.sources.shop.eval.questions=0``. An empty name stands for a run without sources, whose
    keys stay.
    """
    if not name:
        return text
    # Settings have a value: "stop_tools=…". The other keys are sections: "tools.find.…".
    settings = {"stop_tools", "eval.group_by", "eval.questions"} & set(own_keys)
    sections = {"data", *own_keys} - settings
    patterns = [
        *(rf"{re.escape(key)}(?=\.[A-Za-z_])" for key in sections),
        *(rf"{re.escape(key)}(?=[=:])" for key in settings),
    ]
    not_within_a_key = r"(?<![\w./-])"
    not_at_source_yet = rf"(?!{re.escape(SOURCES)}\b)"

    def key_in_run(match: re.Match[str]) -> str:
        key = match[0]
        return f"{SOURCES}.{name}" if key == "data" else f"{SOURCES}.{name}.{key}"

    pattern = f"{not_within_a_key}{not_at_source_yet}(?:{'|'.join(patterns)})"
    return re.sub(pattern, key_in_run, text)


Sources = Annotated[
    dict[str, Any], PlainValidator(_read_sources, json_schema_input_type=dict[str, Any])
]
"""SourceConfig by name. OmegaConf takes any key: `_read_sources` checks them."""


@dataclass(config=SETTINGS)
class DataConfig:
    """Sources of tasks: a bundled task generator (`_target_`), a file of rows, the hub."""

    train: dict[str, Any] = MISSING
    """`_target_` of a callable returning rows, with its arguments."""
    test: dict[str, Any] = field(default_factory=dict)
    """Rows of the evaluation, likewise; none: evaluations are left out."""
    shuffle: Data[bool] = False
    """Draw rows in an order seeded by (seed, epoch)."""
    path: Data[Paths] = None
    """data=file, data=rollouts: a file, a folder, a pattern such as rows/*.jsonl, or several in a
    list; data=hub: a dataset's id."""
    subset: Data[str | None] = None
    """data=hub: the dataset's configuration, where it has several (gsm8k: main)."""
    revision: Quoted = None
    """data=hub: a commit, branch or tag; None: the newest."""
    test_fraction: Number | None = Field(default=None, gt=0, lt=1)
    """Share of data.train held out for evaluation, where data.test has no rows of its own."""
    test_seed: Whole = 0
    """Chooses which rows are held out; not `seed`, so that runs are compared on the same ones."""
    where: Data[str | None] = None
    """JMESPath expression over a row as it was read; rows of which it is not true are left out."""
    min_reward: Number | None = None
    """data=rollouts: least reward of a rollout to learn from; None: all rollouts, also those
    without a reward."""
    map: Data[dict[str, str]] = field(default_factory=dict)
    """Column -> JMESPath expression over the row, e.g. {prompt: question}; others stay."""
    prompt: Data[str | None] = None
    """The user's message as a Jinja text over the columns: "{{ question }} Give a number."."""
    system: Data[str | None] = None
    """A system message, put before every prompt that has none."""
    executor: Data[str | None] = None
    """Tool of the run that does the work of the rows' own tools that name none; None: the run's
    tool of the same name."""
    max_image_pixels: Whole = Field(default=MOST_PIXELS, ge=1)
    """Pixels of the largest image that is read; a row with a larger one is a bad row."""
    max_images: Whole = Field(default=8, ge=1)
    """Images that the prompt of a row may have."""
    max_total_images: Whole = Field(default=1_000_000, ge=1)
    """Images of all rows of data.train, and of data.test likewise: each is read before the run
    starts. Rows without end are not counted."""
    image_urls: bool = False
    """Download the images that rows name by an address (https://…), once per machine; false: such
    a row is a bad row."""
    on_bad_row: Data[OnBadRow] = OnBadRow.error
    """Consequence of a row that cannot become a task, or that the chat template refuses."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    sources: Sources = field(default_factory=dict)
    """data=mix: name -> a source of rows, with tools, rewards and a share of its own."""
    only: Data[str | None] = None
    """Name of the one source of a mixture that the command uses; None: all."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        """Check keys without an effect on these rows, and keys that exclude each other."""
        # A mixture has no rows itself: data=mix sets `train` to {}. Its sources, which are
        # SourceConfig, a subclass, are checked as rows.
        if type(self) is DataConfig and (self.sources or self.train == {}):
            raise_problems(_mixture_problems(self))
        else:
            raise_problems(self._row_problems())
        return self

    @property
    def _is_endless(self) -> bool:
        """True for the rows of a bundled generator.

        Fails without rows: `train` is then the text "???" (MISSING). So ask only where a key of
        rows is set.
        """
        return self.train.get("_target_") in ENDLESS

    def _row_problems(self) -> Iterator[str]:
        """Yield the problems of the keys of rows."""
        if self.only is not None:
            yield f"data.only={self.only}: has no effect without data.sources"
        yield from self._find_unused_keys()
        if self.where is not None and self._is_endless:
            yield (
                f"data.where={self.where}: has no effect on rows without end, which are made one "
                "by one; leave it out"
            )
        if self.shuffle and self._is_endless:
            yield "data.shuffle=true: rows without end have no shuffled order; leave it out"
        if self.test_fraction is not None:
            # If train and test name the same rows, some of these are held out for the test.
            names_other_rows = names_test_rows(self) and self.train != self.test
            if names_other_rows or self._is_endless:  # endless rows are made for each split
                yield (
                    f"data.test_fraction={self.test_fraction}: data.test has rows of its own; "
                    "leave it out, or let both read the same: data=file data.path=…"
                )
        if self.test_fraction is None and self.test_seed:
            yield f"data.test_seed={self.test_seed}: has no effect without data.test_fraction"
        if self.prompt is not None:
            for name in {"messages", "prompt"} & set(self.map):
                yield (
                    f"data.map.{name}={self.map[name]}: data.prompt makes the question already; "
                    "drop one"
                )

    def _find_unused_keys(self) -> Iterator[str]:
        """Yield keys such as data.path that have no effect on these rows.

        Such a key is only the source of a value: the sections train and test of data=file have
        ``path: ${..path}``. It has no effect if the chosen rows have no such argument, or if the
        user has set another value in both sections.
        """
        sections = {f"data.{split}": getattr(self, split) for split in SPLITS}
        for name, group in GROUPS.items():
            value = getattr(self, name)
            if value is None or any(s.get(name) == value for s in (self.train, self.test)):
                continue  # not set, or a section reads it
            hiding_keys = [
                f"{key}.{name}" for key, section in sections.items() if section.get(name)
            ]
            remedy = f"add data={group}"
            if hiding_keys:  # the sections have another value
                overrides = " ".join(f"{key}={value}" for key in hiding_keys)
                remedy = f"set {overrides}, which come before it"
            yield f"data.{name}={value}: is not used by these rows; {remedy}"


def _mixture_problems(data: DataConfig) -> Iterator[str]:
    """Yield the keys of `data` that belong into one of its sources; or that there is no source."""
    if not data.sources:
        yield (
            f"{SOURCES}={{}}: names no source of rows; add some, e.g. "
            f"+data@{SOURCES}.shop=shop, or choose other rows with data=…"
        )
        return
    if data.only is not None and data.only not in data.sources:
        yield (
            f"data.only={data.only}: there is no such source{did_you_mean(data.only, data.sources)}"
            f"; there are: {', '.join(data.sources)}"
        )
    defaults = DataConfig()
    for name in field_names(DataConfig):
        value = getattr(data, name)
        if name not in ("sources", "only") and value not in ({}, getattr(defaults, name)):
            mix = ", or choose data=mix, which has no rows of its own" if name in SPLITS else ""
            yield (
                f"data.{name}={shown(plain(value))}: has no effect beside {SOURCES}; set it in a "
                f"source: {SOURCES}.{next(iter(data.sources))}.{name}=…{mix}"
            )


class AtEnd(StrEnum):
    """Continuation after the last row of a source of a mixture."""

    repeat = "repeat"
    """The source's rows come again."""
    drop = "drop"
    """The source has no more tasks, and the others share its part of the steps."""


@dataclass(config=SETTINGS)
class SourceEvalConfig:
    """Evaluation on the test rows of one source of a mixture."""

    questions: Whole | None = Field(default=None, ge=0)
    """Rows of one evaluation; 0: the source is not evaluated; None: as eval.questions."""
    group_by: Data[str | None] = None
    """Column by whose values the source's reward is broken down; None: as eval.group_by."""


@dataclass(config=SETTINGS)
class SourceConfig(DataConfig):
    """One source of a mixture (`data=mix`): rows, and tools and rewards of its own, if any."""

    weight: Number | None = Field(default=None, gt=0)
    """Share of the tasks that no `count` claims, relative to the other sources' weights; None: 1,
    unless there is a `count`."""
    count: Whole | None = Field(default=None, ge=1)
    """Tasks of a step; None: `weight` decides."""
    at_end: Data[AtEnd] = AtEnd.repeat
    """How the source goes on after its last row."""
    tools: dict[str, Any] | None = None
    """Its tools, as in `tools`; None: the run's."""
    stop_tools: Data[list[str] | None] = None
    """Those of its tools that end a rollout; None: the run's."""
    environment: dict[str, Any] | None = None
    """Its environments, as in `environment`; None: the run's."""
    reward: dict[str, Any] | None = None
    """Its rewards, as in `reward`; None: the run's."""
    eval: SourceEvalConfig = field(default_factory=SourceEvalConfig)

    @model_validator(mode="after")
    def _check_source(self) -> SourceConfig:
        """Check the keys that only a source has."""
        problems = []
        if self.weight is not None and self.count is not None:
            problems.append(
                f"data.weight={self.weight:g}: has no effect beside data.count={self.count}; leave "
                "one of them out"
            )
        if self.at_end is AtEnd.drop and self._is_endless:
            problems.append("data.at_end=drop: these rows have no end; leave it out")
        if self.at_end is AtEnd.drop and self.curriculum.enabled:
            problems.append(
                "data.at_end=drop: a curriculum draws rows again, so they have no end; leave it "
                "out, or set data.curriculum.enabled=false"
            )
        raise_problems(problems)
        return self


HOLD_OUT = "data.test_fraction=0.1 holds some of data.train out"


def names_test_rows(data: DataConfig) -> bool:
    """Return True if data.test names rows of its own.

    The groups file, hub and rollouts fill data.test like data.train, without a path. Such a section
    names no rows until it has a path, or another value that differs from that of data.train: the
    split, or a `_target_` of another group.
    """
    needs_path = data.test.get("_target_") in (FILE_ROWS, HUB_ROWS, ROLLOUT_ROWS)
    if not needs_path or data.test.get("path") is not None:
        return bool(data.test)
    return any(
        value is not None and value != data.train.get(name) for name, value in data.test.items()
    )


def has_test_rows(data: DataConfig) -> bool:
    """Return True if there are rows to evaluate on, of data.test or held out of data.train.

    Those of one source of a mixture are enough.
    """
    if data.sources:
        return any(map(has_test_rows, data.sources.values()))
    return data.test_fraction is not None or names_test_rows(data)


def has_questions(data: DataConfig, questions: int) -> bool:
    """Return True if evaluations have questions, where `eval.questions` is `questions`.

    Those of one source of a mixture are enough; a source may have a number of its own.
    """
    if not data.sources:
        return questions > 0 and has_test_rows(data)
    return any(
        has_questions(source, questions if source.eval.questions is None else source.eval.questions)
        for source in data.sources.values()
    )


FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
FILE_ROWS = "agenttrain.data.files.FileRows"
HUB_ROWS = "agenttrain.data.files.HubRows"
ROLLOUT_ROWS = "agenttrain.rollout.recorded.RolloutRows"
SPLITS = ("train", "test")
GROUPS = {
    "path": "file, data=rollouts or data=hub",
    "subset": "hub",
    "revision": "hub",
    "min_reward": "rollouts",
}
"""Setting -> the choices of `data` whose rows use it."""
ENDLESS = tuple(
    f"agenttrain.data.bundled.{name}.row"
    for name in (
        *("shop", "calculator", "code", "encyclopedia", "sight", "demonstrations", "seeds"),
        *("reverse_text", "alphabet_sort", "word_problems", "wordle"),
    )
)
"""The bundled generators: they have a row for every number."""
NO_PATH = "path=null: has no value; set data.path=…, or data.train.path=… and data.test.path=…"


def row_files(path: object) -> list[str]:
    """Return the files that `path` names: a file, a pattern, or a list of them.

    The files of a pattern are sorted, and a file that is named twice counts once. Example:
    ``row_files(["first.jsonl", "more/*.jsonl"])``. Raises ValueError that begins with the argument.
    """
    if path is None:
        raise ValueError(NO_PATH)
    entries = path if isinstance(path, list | tuple) else [path]
    if not entries or not all(isinstance(entry, str | Path) for entry in entries):
        raise ValueError(f"path={path}: give a file, a pattern such as rows/*.jsonl, or a list")
    files: dict[str, None] = {}  # an ordered set
    for entry in map(str, entries):
        # A file may be named rows[1].jsonl, which looks like a pattern.
        if not has_magic(entry) or Path(entry).expanduser().exists():
            files[entry] = None
            continue
        matches = sorted(glob(str(Path(entry).expanduser()), recursive=True))
        if not matches:
            where = "" if Path(entry).is_absolute() else f" in {Path.cwd()}"
            raise ValueError(f"path={entry}: the pattern matches no file{where}")
        files |= dict.fromkeys(matches)
    return list(files)


def check_row_files(path: object, split: object = None, limit: object = None) -> list[str]:
    """Return the files and folders that `path` names, each checked as by `check_row_file`.

    Files of several kinds are refused: a cell without a value has another meaning in each.
    """
    files = row_files(path)
    kinds = {check_row_file(file, split, limit).suffix for file in files}
    if len(kinds) > 1:
        raise ValueError(
            f"path={path}: names files that end in {', '.join(sorted(kinds))}; give files of one "
            "kind"
        )
    return files


def check_rollout_files(path: object, min_reward: object = None, limit: object = None) -> list[str]:
    """Return the files of rollouts that `path` names. Raises ValueError like `check_row_files`."""
    if min_reward is not None and (
        isinstance(min_reward, bool) or not isinstance(min_reward, int | float)
    ):
        raise ValueError(f"min_reward={min_reward}: must be a number, or null for any reward")
    files = check_row_files(path, limit=limit)
    if Path(files[0]).suffix != ".jsonl":
        raise ValueError(
            f"path={path}: a run writes its rollouts to <run>/rollouts/step-000001.jsonl; other "
            "rows are read by data=file"
        )
    return files


def check_row_file(path: object, split: object = None, limit: object = None) -> Path:
    """Return the file or folder at `path`. Raises ValueError that begins with the argument.

    A file has to exist, be of a kind that can be read, and not be empty. A folder must be one that
    `save_to_disk` of `datasets` wrote, and have the `split`.
    """
    check_limit(limit)
    file = Path(str(path)).expanduser()
    if file.is_dir():
        listing = file / "dataset_dict.json"  # of a folder with several splits
        if listing.is_file():
            splits = json.loads(listing.read_text(encoding="utf-8"))["splits"]
            if split not in splits:
                hint = did_you_mean(str(split), splits)
                raise ValueError(f"split={split}: {path} has {', '.join(splits)}{hint}")
        elif not (file / "state.json").is_file():  # of a folder with one dataset
            raise ValueError(
                f"path={path}: is a folder, and none that save_to_disk wrote; a folder of data "
                "files is read by data=hub"
            )
        elif split is not None:
            raise ValueError(
                f"split={split}: {path} is one dataset and has no splits; leave it out"
            )
        return file
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"path={path}: there is no such file{where}")
    if file.suffix not in FORMATS:
        raise ValueError(f"path={path}: its ending must be one of {', '.join(FORMATS)}")
    if file.stat().st_size == 0:
        raise ValueError(f"path={path}: the file has no rows")
    if split is not None:
        raise ValueError(f"split={split}: {path} is one file and has no splits; leave it out")
    return file


def check_limit(limit: object) -> None:
    """Raise ValueError unless `limit` is a number of rows, or None for all."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit}: must be a whole number of at least 1, or null for all")


def check_hub(
    path: object,
    subset: object = None,
    split: object = "train",
    revision: object = None,
    limit: object = None,
) -> None:
    """Raise ValueError for arguments of a hub dataset that cannot be right.

    Any `subset` is accepted here: a wrong one is found when the dataset is loaded.
    """
    if path is None or not str(path):
        raise ValueError(NO_PATH)
    if not isinstance(path, str):
        raise ValueError(f"path={path}: give the id of one dataset")
    if not isinstance(split, str) or not split:
        raise ValueError(f"split={split}: give a split's name, e.g. train")
    if not isinstance(revision, str | None):
        raise ValueError(f"""revision={revision}: expected a text; quote it: '"{revision}"'""")
    check_limit(limit)


def known_rows(section: Mapping[str, Any]) -> int | None:
    """Return the number of rows of a section `data.train` or `data.test`.

    Only the lines of JSONL files are counted; it is None for rows whose number is not cheap to get.
    Example: 2 for a JSONL file of two lines, `sys.maxsize` (no end) for
    ``agenttrain.data.bundled.shop.row``.
    """
    target = section.get("_target_")
    if target in ENDLESS:
        return sys.maxsize
    if target != FILE_ROWS:
        return None
    try:
        files = [Path(file).expanduser() for file in row_files(section.get("path"))]
    except ValueError:
        return None
    rows, limit = 0, section.get("limit")
    for file in files:
        if file.suffix != ".jsonl" or not file.is_file():
            return None
        with file.open("rb") as lines:
            rows += sum(1 for line in lines if line.strip())
    return rows if limit is None else min(rows, limit)
