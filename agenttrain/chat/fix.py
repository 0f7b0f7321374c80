"""A model's own template, changed by the edits of its family; and what they changed, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.families import Edit, Family, pattern

MAX_FIND = 60
REMEDY = "set chat_template=none, or chat_template=file with chat_template.path=<file.jinja>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A template, and the changes that a fix made to it.

    Example: ``Fix(family="qwen3", stock="…", template="…", changes=("keeps past reasoning",))``
    """

    family: str | None
    """None: not one of ours."""
    stock: str
    """The template as the model or the user's file has it."""
    template: str
    changes: tuple[str, ...] = ()
    """Reasons of the changes, one each."""
    problem: str | None = None
    """Why a fix that the family may need was not made."""
    chosen: str | None = None
    """The one of the tokenizer's templates that this is, where it carries several."""

    def text(self) -> str:
        """The changes for people: a heading, the reasons, a unified diff; empty without any."""
        if not self.changes:
            return ""
        diff = unified_diff(
            self.stock.splitlines(), self.template.splitlines(), "stock", "fixed", lineterm="", n=1
        )
        heading = f"chat template fixed as {self.family}: {'; '.join(self.changes)}"
        return "\n".join([heading, *diff, ""])


def fixed(name: str, family: Family, stock: str) -> Fix:
    """`stock` with the first of the family's fixes whose every edit applies.

    An edit that a template holds already is left out. Raises ChatError when no fix applies.
    """
    if not family.fixes:
        return Fix(family=name, stock=stock, template=stock)
    problem = ""
    for fix in family.fixes:
        template = stock
        changes: dict[str, None] = {}
        for edit in fix:
            edited = _apply(edit, template)
            if edited is None:
                text = " ".join(edit.find.split())
                text = text if len(text) <= MAX_FIND else text[: MAX_FIND - 1] + "…"
                problem = problem or (
                    f"the model's template does not hold {text!r}, which the fix of {name} replaces"
                )
                break
            if edited != template:
                changes[edit.why] = None
            template = edited
        else:
            # Without edits it is for any revision: only a certificate tells whether that will do.
            return Fix(
                family=name,
                stock=stock,
                template=template,
                changes=tuple(filter(None, changes)),
                problem=None if fix else problem or None,
            )
    raise ChatError(f"chat_template={name}: {problem}; {REMEDY}")


def _apply(edit: Edit, template: str) -> str | None:
    """Return the template with the edit; None where it does not apply."""
    if not edit.find:
        return template if edit.put in template else edit.put + template
    find = pattern(edit.find)
    held = bool(edit.put) and pattern(edit.put).search(template) is not None
    if held and find.search(edit.put):
        return template
    edited, count = find.subn(lambda _: edit.put, template)
    return edited if count else template if held else None


def recognise(
    source: str, known: Mapping[str, Family], reads_back: Callable[[Family, str], bool]
) -> str | None:
    """The family of a template: by what its source holds, proven by how it behaves.

    `reads_back(family, template)` says whether the family's parser reads a call that the template
    has rendered. Of the families whose marks are all there, the one with the most of them is
    taken. A template that none describes has the first family without fixes whose calls it
    renders; None where there is no such family.
    """
    names = [name for name, family in known.items() if described(source, family)]
    names.sort(key=lambda name: -sum(map(len, known[name].marks)))
    for name in names:
        family = known[name]
        if not family.tools or reads_back(family, source):
            return name
        with suppress(ChatError):
            if reads_back(family, fixed(name, family, source).template):
                return name
    for name, family in known.items():
        if family.tools and not family.marks and reads_back(family, source):
            return name
    return None


def described(source: str, family: Family) -> bool:
    """Check that a template holds all marks of a family, and nothing that it must not hold."""
    if not family.marks or any(pattern(mark).search(source) is None for mark in family.marks):
        return False
    return not any(pattern(text).search(source) for text in family.absent)
