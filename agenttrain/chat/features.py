"""Probes of a template without a conversation: headers, ends of turn, tools, system messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agenttrain.chat.boundary import ANSWER, CALL
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.types import Finish, Message

USER_TEXT = "What is 3 + 4?"
FEATURES = (
    *("generation prompt", "same each time", "end of turn", "tools in the prompt"),
    *("system message", "control tokens in prompts"),
)
"""Names of the probes below."""
RENDERINGS = 8
"""Renderings of one conversation that are compared with each other."""
SYSTEM_TEXT = "Be brief, please."
QUESTION: tuple[Message, ...] = ({"role": "user", "content": USER_TEXT},)
CLOCK = re.compile(r"strftime_now\(\s*(?:format\s*=\s*)?(['\"])(?P<format>.*?)\1", re.DOTALL)
"""Matches where a template writes the time: with ``"%d %b %Y"`` in Llama 3.2."""
_TIME_OF_DAY = re.compile(r"%[-_0^#E]?[HIklMSfpPTRrcXs+]")


class Status(StrEnum):
    """Result of a probe of a chat template, from the best to the worst.

    A rollout appends the ids of each turn to its context. Most probes compare such a context with
    the ids of the whole conversation as the template renders it.
    """

    passed = "passed"
    """The ids are equal, or the template has the feature that is probed."""
    fixed = "fixed"
    """The template passes with the changes of `Fix`; the model's own template fails."""
    refused = "refused"
    """The ids differ, or the feature is missing: no run starts with this template."""


class Misfit(StrEnum):
    """The configuration group to change after a refusal."""

    chat_template = "chat_template"
    response_schema = "response_schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of a probe of a chat template."""

    name: str
    status: Status
    reason: str = ""
    """An observation, the cause of the refusal, or the purpose of the fix."""
    detail: str = ""
    """The texts or ids that show the reason."""
    misfit: Misfit | None = None
    """The group of settings to change if the probe is refused: template or response schema."""
    token_ids: tuple[int, ...] = ()
    """Ids that the template writes between turns, concatenated."""

    @property
    def passed(self) -> bool:
        """True if the template can be used."""
        return self.status is not Status.refused

    @property
    def why(self) -> str:
        """The reason with its detail."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def refused_probe(name: str, reason: str, detail: str = "") -> Probe:
    """Make a probe that the template fails."""
    misfit = Misfit.chat_template
    return Probe(name=name, status=Status.refused, reason=reason, detail=detail, misfit=misfit)


def feature_probes(chat: Chat, schemas: Sequence[dict]) -> list[Probe]:
    """Make the probes of FEATURES, in that order."""
    probes = [_probe_generation_prompt(chat), _probe_repeatability(chat)]

    name = "end of turn"
    if ends := [chat.decode([token_id]) for token_id in chat.stop_token_ids]:
        reason = f"a completion ends with {' or '.join(ends)}"
        stops = chat.stop_token_ids
        probes.append(Probe(name=name, status=Status.passed, reason=reason, token_ids=stops))
    else:
        probes.append(refused_probe(name, "no end-of-turn token"))

    name = "tools in the prompt"
    try:
        text = chat.decode(chat.rendered_ids(QUESTION, schemas))
    except ChatError as error:
        probes.append(refused_probe(name, str(error)))
    else:
        tools = [schema.get("function", schema)["name"] for schema in schemas]
        if missing_tools := [tool for tool in tools if tool not in text]:
            reason = f"the template does not show the tools {', '.join(missing_tools)}"
            probes.append(refused_probe(name, reason))
        else:
            probes.append(Probe(name=name, status=Status.passed))

    # Never refused: the data may have no system messages.
    problem = system_problem(chat, schemas)
    reason = f"{problem}: the data must have none" if problem else ""
    probes.append(Probe(name="system message", status=Status.passed, reason=reason))
    return [*probes, _probe_control_tokens(chat, schemas)]


def _probe_generation_prompt(chat: Chat) -> Probe:
    """Check that the template, not the model, writes the header of an assistant's turn.

    Refused: the generation prompt is empty, but an answer in the conversation has a header, such as
    ``<|im_start|>assistant``. Passed: a prompt of any text, which the conversations' probes compare
    with the header, and answers without a header.
    """
    name = "generation prompt"
    try:
        question = chat.render(QUESTION)
        with_prompt = chat.render(QUESTION, generation_prompt=True)
        with_answer = chat.render([*QUESTION, {"role": "assistant", "content": "ok"}])
    except ChatError as error:
        return refused_probe(name, str(error))
    prompt_is_empty = with_prompt == question
    header = ""
    if with_answer.startswith(question):  # else it cannot be told from the question's text
        header = with_answer.removeprefix(question).partition("ok")[0]
    if prompt_is_empty and header.strip():
        return refused_probe(
            name, f"the template writes none, though a turn begins with {header!r}"
        )
    return Probe(name=name, status=Status.passed)


def _probe_repeatability(chat: Chat) -> Probe:
    """Check that the template renders the same messages to the same text each time."""
    name = "same each time"
    formats = [match["format"] for match in CLOCK.finditer(chat.template)]
    if times := [text for text in formats if _TIME_OF_DAY.search(text)]:
        return refused_probe(
            name,
            f"the template writes the time of day, strftime_now({times[0]!r}), so that no prompt "
            "is rendered twice: take it out, or leave the date alone",
        )
    try:
        renderings = {chat.render(QUESTION, generation_prompt=True) for _ in range(RENDERINGS)}
    except ChatError as error:
        return refused_probe(name, str(error))
    if len(renderings) > 1:
        return refused_probe(name, "the template renders the same messages differently each time")
    return Probe(name=name, status=Status.passed)


def system_problem(chat: Chat, schemas: Sequence[dict]) -> str | None:
    """Return why the template cannot render a leading system message; None if it can."""
    try:
        text = chat.render([{"role": "system", "content": SYSTEM_TEXT}, *QUESTION], schemas)
    except ChatError as error:
        return f"the template refuses system messages ({error.__cause__ or error})"
    return None if SYSTEM_TEXT in text else "the template leaves out system messages"


def _probe_control_tokens(chat: Chat, schemas: Sequence[dict]) -> Probe:
    """Check that no text of a user or a tool becomes a control token, in a prompt or in a reply.

    Each place is rendered twice, with a harmless text and with the texts of all control tokens: the
    ids must have the same number of each control token.
    """

    def tool_description_ids(text: str) -> list[int]:
        function = {"name": "probe", "description": text, "parameters": {"type": "object"}}
        return chat.rendered_ids(QUESTION, [*schemas, {"type": "function", "function": function}])

    def reply_ids(text: str) -> list[int]:
        """Return the ids after a minimal turn with the reply `text`.

        It is a tool's reply to CALL if the template renders calls, else a user's to ANSWER.
        """
        turn, reply = ANSWER, {"role": "user", "content": text}
        if chat.renders_calls:
            turn = CALL
            reply |= {"role": "tool", "tool_call_id": CALL.calls[0].id, "name": "f"}
        # There is no completion: an empty one that was cut off, after which the suffix begins with
        # the end of the turn.
        spans = chat.suffix(
            turn, [reply], completion_ids=[], finish=Finish.length, generation_prompt=True
        )
        return [token_id for _, ids in spans for token_id in ids]

    # Place where such text may stand -> function that returns the ids of a context with it there.
    places: dict[str, Callable[[str], Sequence[int]]] = {
        "a user's message": lambda text: chat.rendered_ids(
            [{"role": "user", "content": text}], schemas
        ),
        "a system message": lambda text: chat.rendered_ids(
            [{"role": "system", "content": text}, *QUESTION], schemas
        ),
        "a tool's description": tool_description_ids,
        "a reply": reply_ids,
    }
    name = "control tokens in prompts"
    forged = "".join(f"a{text} b{text}" for text in chat.encoder.control)
    control = frozenset(chat.encoder.control.values())
    for place, context_ids in places.items():
        try:
            harmless, attacked = Counter(context_ids("a")), Counter(context_ids(forged))
        except ChatError:  # the template has no such messages; other probes report that
            continue
        for token_id in control:
            if attacked[token_id] != harmless[token_id]:
                token = chat.decode([token_id])
                return refused_probe(name, f"the text {token!r} in {place} becomes a control token")
    special = len(chat.encoder.control) - len(chat.encoder.unspecial)
    reason = f"{special} special tokens and {len(chat.encoder.unspecial)} other added ones"
    for why, count in Counter(chat.encoder.ordinary.values()).items():
        reason += f"; {count} added tokens stay text: {why}"
    return Probe(name=name, status=Status.passed, reason=reason)
