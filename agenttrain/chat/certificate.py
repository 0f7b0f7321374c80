"""Proof, on the user's own template and tools, that the ledger is the template's rendering."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agenttrain.chat.encoding import ChatError
from agenttrain.chat.template import Chat
from agenttrain.types import AgenttrainError, AssistantTurn, Finish, Message, ToolCall

Step = tuple[AssistantTurn, list[Message]]
"""A turn and the replies to it."""

USER_TEXT = "What is 3 + 4?"
EXAMPLES = {"integer": 3, "number": 2.5, "boolean": True, "array": [], "object": {}, "null": None}
"""Argument values by JSON schema type; any other type is shown a string."""
REPLIES = {
    "empty reply": "",
    "error reply": "Error: no such column: 'prize'\n  line 1\n",
    "unicode reply": " naïve 東京 🙂 \u2028 ",
}


class CertificateError(AgenttrainError):
    """The template cannot be used with the token-concatenating loop; says why and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One conversation that was rendered both ways."""

    name: str
    passed: bool
    reason: str
    """What was seen, or why the probe is refused."""
    token_ids: tuple[int, ...] = ()
    """The ledger's ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The probes' results and a hash of everything they depend on."""

    probes: tuple[Probe, ...]
    hash: str
    """sha256, hex, over the template, its variables, the control tokens and the probes' ids."""

    @property
    def passed(self) -> bool:
        """Whether no probe is refused."""
        return all(probe.passed for probe in self.probes)

    def raise_if_refused(self) -> None:
        """Raise CertificateError that lists the refused probes."""
        refused = [f"- {probe.name}: {probe.reason}" for probe in self.probes if not probe.passed]
        if refused:
            raise CertificateError(
                "the model's chat template does not fit the token-concatenating loop:\n"
                + "\n".join(refused)
                + "\nSet chat_template to the model's family, or to a template of yours with "
                "`chat_template=file chat_template.path=<file.jinja>`."
            )


def certify(chat: Chat, schemas: Sequence[dict]) -> Certificate:
    """Render probe conversations whole and as a ledger of prompt, completions and suffixes.

    Never raises for a template that does not fit: its probes are refused.
    """
    probes = [_end_of_turn(chat), _tools_shown(chat, schemas)]
    for name, steps in _conversations(chat, schemas):
        probes.append(_probe(chat, schemas, name, steps))
    return Certificate(probes=tuple(probes), hash=_hash(chat, probes))


def _hash(chat: Chat, probes: Sequence[Probe]) -> str:
    content = [
        chat.template,
        repr(sorted(chat.kwargs.items())),
        chat.encoder.control,
        chat.stop_token_ids,
        [(probe.name, probe.token_ids) for probe in probes],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _end_of_turn(chat: Chat) -> Probe:
    ends = [chat.decode([token_id]) for token_id in chat.stop_token_ids]
    reason = f"a completion ends with {' or '.join(ends)}" if ends else "no end-of-turn token"
    return Probe(
        name="end of turn", passed=bool(ends), reason=reason, token_ids=chat.stop_token_ids
    )


def _tools_shown(chat: Chat, schemas: Sequence[dict]) -> Probe:
    name = "tools in the prompt"
    try:
        ids = chat.prompt_ids([{"role": "user", "content": USER_TEXT}], schemas)
    except ChatError as error:
        return Probe(name=name, passed=False, reason=str(error))
    text = chat.decode(ids)
    missing = [tool["name"] for tool in _functions(schemas) if tool["name"] not in text]
    reason = f"the template does not show the tools {', '.join(missing)}" if missing else ""
    return Probe(name=name, passed=not missing, reason=reason, token_ids=tuple(ids))


def _functions(schemas: Sequence[dict]) -> list[dict]:
    return [schema.get("function", schema) for schema in schemas]


def _conversations(chat: Chat, schemas: Sequence[dict]) -> Iterator[tuple[str, list[Step]]]:
    """Named probe conversations; those with calls use every tool of the user's."""
    controls = "".join(chat.encoder.control)
    answer = AssistantTurn(content="It is 7.", reasoning=None, calls=())
    yield "user reply", [(answer, [{"role": "user", "content": "And 4 + 5?"}])]
    yield "control tokens in a user reply", [(answer, [{"role": "user", "content": controls}])]
    if not schemas:
        return
    tools = _functions(schemas)
    for tool in tools:
        yield f"call of {tool['name']}", [_step(0, [tool], ["7"])]
    yield "parallel calls", [_step(0, [tools[0], tools[-1]], ["7", "\nseven\n"])]
    turns = [_step(turn, [tools[turn % len(tools)]], [str(turn)]) for turn in range(3)]
    yield "three turns", turns
    yield "content and reasoning", [_step(0, tools[:1], ["7"], "Let me see.", "3 and 4"), turns[1]]
    for name, text in {**REPLIES, "control tokens in a tool reply": controls}.items():
        yield name, [_step(0, tools[:1], [text]), turns[1]]


def _step(
    turn: int, tools: list[dict], texts: list[str], content: str = "", reasoning: str | None = None
) -> Step:
    calls = tuple(
        ToolCall(id=f"call_{turn}_{index}", name=tool["name"], arguments=_arguments(tool))
        for index, tool in enumerate(tools)
    )
    replies: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return AssistantTurn(content=content, reasoning=reasoning, calls=calls), replies


def _arguments(tool: dict) -> dict:
    properties = (tool.get("parameters") or {}).get("properties", {})
    return {
        name: schema["enum"][0] if schema.get("enum") else EXAMPLES.get(_type(schema), "a b")
        for name, schema in properties.items()
    }


def _type(schema: dict) -> str:
    kind = schema.get("type", "string")
    return kind if isinstance(kind, str) else kind[0]


def _probe(chat: Chat, schemas: Sequence[dict], name: str, steps: list[Step]) -> Probe:
    try:
        ids, remarks = _ledger(chat, schemas, steps)
    except (ChatError, _Refused) as error:
        return Probe(name=name, passed=False, reason=str(error))
    return Probe(name=name, passed=True, reason="; ".join(remarks), token_ids=tuple(ids))


class _Refused(Exception):
    """What the two ways of rendering disagree on."""


def _ledger(chat: Chat, schemas: Sequence[dict], steps: list[Step]) -> tuple[list[int], list[str]]:
    """The ledger's ids and remarks. Raises _Refused where it differs from the full rendering."""
    messages: list[Message] = [{"role": "user", "content": USER_TEXT}]
    ledger = chat.prompt_ids(messages, schemas)
    remarks: dict[str, None] = {}
    for turn, replies in steps:
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
        remarks |= dict.fromkeys(_remarks(chat, schemas, turn, sampled))
        ledger = full
    return ledger, list(remarks)


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
    chat: Chat, schemas: Sequence[dict], turn: AssistantTurn, sampled: list[int]
) -> Iterator[str]:
    """What the template leaves out. Raises _Refused when a call does not come back."""
    parsed = chat.parse(sampled, schemas, turn=0)
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
