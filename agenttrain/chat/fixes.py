"""Model families as data, and the fixes that they make to a model's own template.

A family is one file in ``conf/chat_template/`` whose key `family` holds the fields of `Family`: how
its templates are recognised, fixed and parsed. A user's file in ``<--config-dir>/chat_template/``
is read the same way. `Fix` holds a changed template and the reasons for the changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import unified_diff
from functools import cache
from typing import Any

from agenttrain.chat.encoding import ChatError
from agenttrain.utils.files import conf_folder, parse_yaml

# Forks of a template differ in these: quotes, dashes of tags, attribute or item access, blanks.
_TOKEN = re.compile(
    r"(?P<tag>\{[%{]-?\s*|\s*-?[%}]\})|(?P<quote>['\"])|(?P<blank>\s+)|(?<=\w)\.(?P<key>[A-Za-z_]\w*)"
    r"|(?P<other>.)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of a template: `put` replaces `find`, or begins the template if `find` is empty.

    Example: ``Edit(why="keeps past reasoning", find="loop.index0 > ns.last and reasoning",
    put="reasoning")``
    """

    put: str
    find: str = ""
    """Matched regardless of blanks, kinds of quotes, dashes of tags, and `.key` or `['key']`."""
    why: str = ""
    """Purpose of the edit, given once per fix."""

    def apply(self, template: str) -> str | None:
        """Return the edited template; None if it has nothing to edit.

        Examples, of replacing ``a`` by ``b``::

            "xa"  ->  "xb"
            "xb"  ->  "xb"     edited before
            "x"   ->  None
        """
        if not self.find:  # `put` begins the template
            return template if self.put in template else self.put + template
        find = template_pattern(self.find)  # also finds it with other blanks, quotes and dashes
        has_put = bool(self.put) and template_pattern(self.put).search(template) is not None
        put_contains_find = find.search(self.put) is not None
        if has_put and put_contains_find:
            # Edited before. `find` stands in the template only as a part of `put`: replacing "a" by
            # "ab" once more would make "abb".
            return template
        # A function, because a replacement text would be read for escapes such as \1.
        edited, count = find.subn(lambda _: self.put, template)
        if count:
            return edited
        return template if has_put else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Added tokens that are ordinary text to a model.

    Example: ``Plain(why="HTML", tokens=("<table>", "</table>"))``
    """

    why: str
    """Purpose of the tokens."""
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its templates, their fixes and its tokens."""

    models: str = ""
    """Names of the models, for people."""
    response: str = "hermes"
    """Name of the response schema."""
    tools: bool = True
    """The fixed template renders tools."""
    marks: tuple[str, ...] = ()
    """Texts in the source of every template of this family, matched like `Edit.find`. A family
    without marks, such as hermes, is no family of models but a format for calls, which its fix adds
    to any template. A template is recognised as such by the calls that it writes."""
    absent: tuple[str, ...] = ()
    """Texts that no template of this family contains."""
    fixes: tuple[tuple[Edit, ...], ...] = ()
    """Fixes, each for some revisions of the template; the first whose edits all apply is used."""
    originals: tuple[str, ...] = ()
    """Names of its templates in `commands/templates.py`."""
    control: tuple[str, ...] = ()
    """Special tokens of the tokenizer that `agenttrain templates` makes to try a template. The
    first is the end of sequence."""
    added: tuple[str, ...] = ()
    """Added tokens of that tokenizer that are not special."""
    bos: str | None = None
    """The token of that tokenizer that begins a sequence."""
    plain: tuple[Plain, ...] = ()
    """Added tokens that are ordinary text in real tokenizers. There, every other added token,
    special or not, is a control token, which no text of a user or a tool can become; white space
    is not."""


def template_pattern(find: str) -> re.Pattern[str]:
    """Compile a pattern that finds `find` in a template with other blanks, quotes or dashes.

    Example: the pattern of ``{{- m['role'] }}`` also finds ``{{ m.role -}}``.
    """
    parts = []
    for token in _TOKEN.finditer(find):
        if tag := token["tag"]:  # {%- or -%}
            opens = tag.startswith("{")
            mark = re.escape(tag.strip().replace("-", ""))
            parts.append(rf"{mark}[-+]?\s*" if opens else rf"\s*[-+]?{mark}")
        elif token["quote"]:
            parts.append("['\"]")
        elif token["blank"]:
            parts.append(r"\s*")
        elif key := token["key"]:  # .role or ['role']
            parts.append(rf"(?:\.{key}\b|\[['\"]{key}['\"]\])")
        else:
            parts.append(re.escape(token["other"]))
    return re.compile("".join(parts))


def parse_family(name: str, content: Mapping[str, Any]) -> Family:
    """Make a family of the content of its YAML file. Raises ChatError that names a wrong key."""
    keys = {field.name for field in fields(Family)}
    if unknown := sorted(set(map(str, content)) - keys):
        raise ChatError(
            f"chat_template={name}: family.{unknown[0]} is no key; they are "
            f"{', '.join(sorted(keys))}"
        )
    lists = {
        key: tuple(content.get(key) or ())
        for key in ("marks", "absent", "originals", "control", "added")
    }
    try:
        fixes = tuple(tuple(Edit(**edit) for edit in fix) for fix in content.get("fixes") or ())
    except TypeError as error:
        raise ChatError(f"chat_template={name}: family.fixes: {error}") from error
    try:
        plain = tuple(
            Plain(why=str(entry["why"]), tokens=tuple(map(str, entry["tokens"])))
            for entry in content.get("plain") or ()
        )
    except (KeyError, TypeError) as error:
        raise ChatError(
            f"chat_template={name}: family.plain: must be a list of {{why: …, tokens: […]}}"
        ) from error
    return Family(**{**content, **lists, "fixes": fixes, "plain": plain})


@cache
def families() -> dict[str, Family]:
    """Read the families of ``conf/chat_template/``, by name."""
    by_name = {}
    for file in sorted((conf_folder() / "chat_template").glob("*.yaml")):
        content = parse_yaml(file.read_text(encoding="utf-8"))
        if content and "family" in content:
            by_name[content["name"]] = parse_family(content["name"], content["family"])
    return by_name


MAX_FIND = 60
REMEDY = "set chat_template=none, or chat_template=file with chat_template.path=<file.jinja>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A template, and the changes that were made to it.

    Example: ``Fix(family="qwen3", stock="…", template="…", changes=("keeps past reasoning",))``
    """

    family: str | None
    """Name of the family; None if none was recognised."""
    stock: str
    """The template of the model, or of the user's file, without changes."""
    template: str
    """The template after the changes."""
    changes: tuple[str, ...] = ()
    """Reasons for the changes."""
    problem: str | None = None
    """Reason why a fix that the family may need was not made."""
    chosen: str | None = None
    """Note on which template this is, if the tokenizer carries several."""

    def text(self) -> str:
        """Return a heading with the reasons and a unified diff; empty without changes."""
        if not self.changes:
            return ""
        diff = unified_diff(
            self.stock.splitlines(), self.template.splitlines(), "stock", "fixed", lineterm="", n=1
        )
        heading = f"chat template fixed as {self.family}: {'; '.join(self.changes)}"
        return "\n".join([heading, *diff, ""])


def apply_fix(name: str, family: Family, stock: str) -> Fix:
    """Apply the first of the family's fixes that fits the template. Raises ChatError if none does.

    Each fix is a list of edits for some revisions of the template. It fits if every edit finds its
    text. A family may end its list with a fix without edits, which leaves any other revision as it
    is: only the certificate shows if that template works, and `Fix.problem` names the text that the
    first fix did not find.
    """
    if not family.fixes:
        return Fix(family=name, stock=stock, template=stock)
    first_problem = ""  # of the first fix that does not fit
    for edits in family.fixes:
        template = stock
        reasons: dict[str, None] = {}  # an ordered set: several edits may have one reason
        missing_text: str | None = None  # the text that an edit replaces and the template lacks
        for edit in edits:
            edited = edit.apply(template)
            if edited is None:
                missing_text = " ".join(edit.find.split())
                break
            # Only one edit of a fix need state its reason. An edit made before changes nothing.
            if edited != template and edit.why:
                reasons[edit.why] = None
            template = edited
        if missing_text is None:  # all edits applied
            return Fix(
                family=name,
                stock=stock,
                template=template,
                changes=tuple(reasons),
                # A fix without edits is used only where those before it did not fit.
                problem=None if edits else first_problem or None,
            )
        if not first_problem:
            if len(missing_text) > MAX_FIND:
                missing_text = missing_text[: MAX_FIND - 1] + "…"
            first_problem = (
                f"the model's template does not hold {missing_text!r}, which the fix of {name} "
                "replaces"
            )
    raise ChatError(f"chat_template={name}: {first_problem}; {REMEDY}")


def recognise(
    source: str, all_families: Mapping[str, Family], reads_back: Callable[[Family, str], bool]
) -> str | None:
    """Return the name of a template's family, judged by its source and proven by its behaviour.

    `reads_back(family, template)` is True if the family's parser reads a call that the template
    rendered. Families with marks, all of which occur, are tried first, the longest marks first.
    Then come the families without marks. Return None if the parser of none reads the template's
    calls.
    """
    # `matches_source` is True only for families with marks.
    names = [name for name, family in all_families.items() if matches_source(source, family)]
    names.sort(key=lambda name: -sum(map(len, all_families[name].marks)))
    for name in names:
        family = all_families[name]
        if not family.tools:  # its templates render no calls that could prove it: the marks decide
            return name
        if reads_back(family, source):
            return name
        with suppress(ChatError):  # its templates may write calls only once they are fixed
            if reads_back(family, apply_fix(name, family, source).template):
                return name
    for name, family in all_families.items():
        # Without their fix, which adds their format to any template: it would prove nothing.
        if family.tools and not family.marks and reads_back(family, source):
            return name
    return None


def matches_source(source: str, family: Family) -> bool:
    """Return True if a template contains all marks of a family, and none of its absent texts.

    False for a family without marks.
    """
    if not family.marks or any(
        template_pattern(mark).search(source) is None for mark in family.marks
    ):
        return False
    return not any(template_pattern(text).search(source) for text in family.absent)
