"""Proof, on the user's own template and tools, that the ledger is the template's rendering."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.probes import Step, conversations
from agenttrain.chat.template import Chat
from agenttrain.types import AgenttrainError, AssistantTurn, Finish, Message

USER_TEXT = "What is 3 + 4?"
REASONING_PROBES = ("reasoning", "reasoning without a call", "later user message")
FEATURES = ("generation prompt", "end of turn", "tools in the prompt")
"""Probes that are no conversations."""
THOUGHT = "Well."
SERVE = (
    "serve checkpoints with the chat_template.jinja that is saved in them (vllm and transformers "
    "take it by themselves; elsewhere: --chat-template <checkpoint>/chat_template.jinja)"
)


class CertificateError(AgenttrainError):
    """The template cannot be used with the token-concatenating loop; says why and what to try."""


class Status(StrEnum):
    """What a probe found."""

    passed = "passed"
    """The ledger is what the template renders."""
    fixed = "fixed"
    """It is, thanks to the fix; the model's own template would not do."""
    refused = "refused"
    """It is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One conversation that was rendered both ways."""

    name: str
    status: Status
    reason: str
    """What was seen, or why the probe is refused, or what the fix is for."""
    token_ids: tuple[int, ...] = ()
    """What the template writes between turns, end to end."""

    @property
    def passed(self) -> bool:
        """Whether the template can be used so."""
        return self.status is not Status.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The probes' results and a hash of everything they depend on."""

    probes: tuple[Probe, ...]
    hash: str
    """sha256, hex, over the template, its variables, the tools, the control tokens and the ids
    between turns."""
    family: str | None
    changes: tuple[str, ...]
    """What the fix changed."""
    preserving: bool
    """Whether the model's own template, before any fix, renders past turns always the same."""
    one_call_per_turn: bool
    warnings: tuple[str, ...]
    """What to heed when the trained model is served."""
    remedy: str
    """What to set where probes are refused."""

    @property
    def passed(self) -> bool:
        """Whether no probe is refused."""
        return all(probe.passed for probe in self.probes)

    @property
    def status(self) -> Status:
        """The worst of the probes'."""
        found = {probe.status for probe in self.probes}
        return max(found, key=list(Status).index)

    def raise_if_refused(self) -> None:
        """Raise CertificateError that lists the refused probes."""
        refused = [f"- {p.name}: {p.reason}" for p in self.probes if not p.passed]
        if refused:
            raise CertificateError(
                "the model's chat template does not fit the token-concatenating loop:\n"
                + "\n".join(refused)
                + f"\n{self.remedy}"
            )

    def lines(self) -> list[str]:
        """For people: one line per probe, then what was fixed and what to heed."""
        name = self.family or "of no known family"
        found = [f"chat template  {name}; certificate {self.status}, {self.hash[:12]}"]
        found += [f"  {p.status:<8} {p.name:<32} {p.reason}".rstrip() for p in self.probes]
        found += [f"  fix      {change}" for change in self.changes]
        found += [f"  warning  {warning}" for warning in self.warnings]
        return found if self.passed else [*found, f"  remedy   {self.remedy}"]


def certify(chat: Chat, schemas: Sequence[dict]) -> Certificate:
    """Render probe conversations whole and as a ledger of prompt, completions and suffixes.

    Never raises for a template that does not fit: its probes are refused. A fixed template is
    compared with the model's own, so that it is known what the fix was for.
    """
    probes = _probes(chat, schemas)
    preserving = all(_held(probe) for probe in probes)
    if chat.fix.changes:
        stock = _probes(chat.stock(), schemas)
        preserving = all(_held(probe) for probe in stock)
        probes = [_judged(now, before) for now, before in zip(probes, stock, strict=True)]
    return Certificate(
        probes=tuple(probes),
        hash=_hash(chat, schemas, probes),
        family=chat.fix.family,
        changes=chat.fix.changes,
        preserving=preserving,
        one_call_per_turn=chat.one_call_per_turn,
        warnings=tuple(_warnings(chat, probes)),
        remedy=_remedy(chat, probes),
    )


def _held(probe: Probe) -> bool:
    return probe.passed or probe.name in FEATURES


def _judged(now: Probe, before: Probe) -> Probe:
    if now.passed and not before.passed:
        return replace(now, status=Status.fixed, reason=f"stock: {before.reason}")
    return now


def _probes(chat: Chat, schemas: Sequence[dict]) -> list[Probe]:
    probes = [_generation_prompt(chat), _end_of_turn(chat), _tools_shown(chat, schemas)]
    return [*probes, *(_probe(chat, schemas, *found) for found in conversations(chat, schemas))]


def _hash(chat: Chat, schemas: Sequence[dict], probes: Sequence[Probe]) -> str:
    content = [
        chat.template,
        repr(sorted(chat.kwargs.items())),
        schemas,
        chat.encoder.control,
        chat.stop_token_ids,
        [(probe.name, probe.token_ids) for probe in probes],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _warnings(chat: Chat, probes: Sequence[Probe]) -> Iterator[str]:
    if any(p.name in REASONING_PROBES and p.status is Status.fixed for p in probes):
        yield (
            "the model is trained with its past reasoning in view, which its own template drops: "
            + SERVE
        )
    elif chat.fix.changes:
        yield f"the model's own template writes another context: {SERVE}"
    if any("leaves out reasoning" in probe.reason for probe in probes) and chat.renders_reasoning:
        yield (
            "the loop shows the model its past reasoning, which the template leaves out when a "
            "conversation is rendered anew: append to the ids while serving, as training does"
        )
    if chat.one_call_per_turn:
        yield "the template renders one call per turn: rollout.on_parallel_calls decides on more"


def _remedy(chat: Chat, probes: Sequence[Probe]) -> str:
    refused = {probe.name for probe in probes if not probe.passed}
    if "tools in the prompt" in refused or not chat.renders_calls:
        return (
            "The template has no tools: `chat_template=hermes` adds a generic tool format to it; "
            "training without tools needs no change."
        )
    why = f"{chat.fix.problem}. " if chat.fix.problem else ""
    return (
        f"{why}Set chat_template to auto or to the model's family, or to a template of yours with "
        "`chat_template=file chat_template.path=<file.jinja>`."
    )


def _generation_prompt(chat: Chat) -> Probe:
    """The header of an assistant's turn is the template's to write, never the model's to sample."""
    name = "generation prompt"
    user = [{"role": "user", "content": USER_TEXT}]
    try:
        bare, opened = chat.render(user), chat.render(user, generation_prompt=True)
        answered = chat.render([*user, {"role": "assistant", "content": "ok"}])
    except ChatError as error:
        return Probe(name=name, status=Status.refused, reason=str(error))
    header = answered.removeprefix(bare).partition("ok")[0]
    if opened == bare and answered.startswith(bare) and header.strip():
        reason = f"the template writes none, though a turn begins with {header!r}"
        return Probe(name=name, status=Status.refused, reason=reason)
    return Probe(name=name, status=Status.passed, reason="")


def _end_of_turn(chat: Chat) -> Probe:
    ends = [chat.decode([token_id]) for token_id in chat.stop_token_ids]
    reason = f"a completion ends with {' or '.join(ends)}" if ends else "no end-of-turn token"
    status = Status.passed if ends else Status.refused
    return Probe(name="end of turn", status=status, reason=reason, token_ids=chat.stop_token_ids)


def _tools_shown(chat: Chat, schemas: Sequence[dict]) -> Probe:
    name = "tools in the prompt"
    try:
        ids = chat.prompt_ids([{"role": "user", "content": USER_TEXT}], schemas)
    except ChatError as error:
        return Probe(name=name, status=Status.refused, reason=str(error))
    text = chat.decode(ids)
    tools = [schema.get("function", schema) for schema in schemas]
    missing = [tool["name"] for tool in tools if tool["name"] not in text]
    reason = f"the template does not show the tools {', '.join(missing)}" if missing else ""
    return Probe(name=name, status=Status.refused if missing else Status.passed, reason=reason)


def _probe(chat: Chat, schemas: Sequence[dict], name: str, steps: list[Step]) -> Probe:
    try:
        ids, remarks = _ledger(chat, schemas, steps)
    except (ChatError, _Refused) as error:
        return Probe(name=name, status=Status.refused, reason=str(error))
    if name == "parallel calls" and chat.one_call_per_turn:
        remarks.append("one call per turn: the first is rendered, and all replies as its reply")
    return Probe(name=name, status=Status.passed, reason="; ".join(remarks), token_ids=tuple(ids))


class _Refused(Exception):
    """What the two ways of rendering disagree on."""


def _ledger(chat: Chat, schemas: Sequence[dict], steps: list[Step]) -> tuple[list[int], list[str]]:
    """The ids between turns, and remarks. Raises _Refused where the full rendering differs."""
    messages: list[Message] = [{"role": "user", "content": USER_TEXT}]
    ledger = chat.prompt_ids(messages, schemas)
    context: list[int] = []
    remarks: dict[str, None] = {}
    for said, answered in steps:
        after = messages[-1]["role"]
        turn, replies = chat.shown(as_parsed(chat, said, after), answered)
        messages += [turn.message(), *replies]
        full = chat.prompt_ids(messages, schemas)
        _compare(chat, full[: len(ledger)], ledger, "earlier messages are rendered anew")
        end = chat.end_ids(turn, replies, generation_prompt=True)
        spans = chat.suffix(
            turn, replies, completion_ids=end, finish=Finish.stop, generation_prompt=True
        )
        ours = [token_id for _, ids in spans for token_id in ids]
        # A finished completion is what stands between the prompt and the suffix.
        length = max(len(full) - len(ours) - len(ledger), 0)
        sampled = full[len(ledger) :][:length]
        _compare(chat, full[len(ledger) + length :], ours, "replies are rendered differently")
        _compare(chat, sampled[-1:], end[-1:] or sampled[-1:], "the turn ends differently")
        remarks |= dict.fromkeys(_remarks(chat, schemas, turn, sampled, after))
        context += ours
        ledger = full
    return context, list(remarks)


def as_parsed(chat: Chat, turn: AssistantTurn, after: str) -> AssistantTurn:
    """The turn as a completion could give it: with reasoning where the prompt has opened it, and
    without where the prompt has ended it.

    An empty thought would merge its line break with the prompt's in the full rendering alone.
    """
    if chat.thinking_is_off:
        return replace(turn, reasoning=None)
    opened = chat.opens_reasoning(after) and not turn.reasoning
    return replace(turn, reasoning=THOUGHT) if opened else turn


def _compare(chat: Chat, full: Sequence[int], ours: Sequence[int], what: str) -> None:
    if list(full) == list(ours):
        return
    pairs = enumerate(zip(full, ours, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(full), len(ours)))
    raise _Refused(
        f"{what}: the full rendering has {chat.decode(full[at:][:12])!r} where the ledger has "
        f"{chat.decode(ours[at:][:12])!r}"
    )


def _remarks(
    chat: Chat, schemas: Sequence[dict], turn: AssistantTurn, sampled: list[int], after: str
) -> Iterator[str]:
    """What the template leaves out. Raises _Refused when a call does not come back."""
    parsed = chat.parse(sampled, schemas, turn=0, after=after)
    calls = [(call.name, call.arguments) for call in turn.calls]
    found = [(call.name, call.arguments) for call in parsed.calls]
    if calls != found or any(call.malformed for call in parsed.calls):
        raise _Refused(
            f"the template renders calls as {chat.decode(sampled)!r}, which parses to {found} "
            f"instead of {calls}; set response_schema to the format of the template"
        )
    if turn.content != parsed.content:
        yield "the template leaves out content beside calls; the ledger keeps what was sampled"
    if turn.reasoning and turn.reasoning != parsed.reasoning:
        yield "the template leaves out reasoning; the ledger keeps what was sampled"
