"""Proof, on the user's own template and tools, that the loop's token ids are the template's.

`conversations` yields the probes: every shape of turn and reply that a rollout may have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from agenttrain.chat.boundary import CALL
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.features import (
    CLOCK,
    FEATURES,
    QUESTION,
    Misfit,
    Probe,
    Status,
    feature_probes,
    refused_probe,
)
from agenttrain.chat.loading import load_spec, reads_back, spec_names
from agenttrain.chat.parsers.export import response_template
from agenttrain.types import AgenttrainError, AssistantTurn, Finish, Image, Message, ToolCall
from agenttrain.utils.content import content_of

Step = tuple[AssistantTurn, list[Message]]
"""A turn and the replies to it."""

EXAMPLES = {"integer": 3, "number": 2.5, "boolean": True, "array": [], "object": {}, "null": None}
"""Values of arguments, by JSON schema type."""
TEXT = "a b"
"""Value of an argument of any other type."""
LONG = "17 lamps, 4 chairs\n" * 400
PARALLEL_CALLS = "parallel calls"
"""Name of the probe whose turn has two calls."""
REPLIES = {
    "empty reply": "",
    "error reply": "Error: no such column: 'prize'\n  line 1\n",
    "unicode reply": " naïve 東京 🙂 \u2028 ",
    "long reply": LONG,
}


def conversations(chat: Chat, schemas: Sequence[dict]) -> Iterator[tuple[str, list[Step]]]:
    """Yield (name, steps) of probe conversations; together they call each of the run's tools.

    The name says what a template may treat in a way of its own, such as an empty reply. A second
    step shows whether the first is rendered the same once the conversation goes on.
    """
    control_tokens = "".join(chat.encoder.control)
    answer = AssistantTurn(content="It is 7.", reasoning=None, calls=())
    next_question: list[Message] = [{"role": "user", "content": "And 4 + 5?"}]
    yield "no call", [(answer, next_question)]
    yield (
        "reasoning without a call",
        [
            (replace(answer, reasoning="3 and 4"), next_question),
            (replace(answer, reasoning="4 and 5"), [{"role": "user", "content": "Thanks."}]),
        ],
    )
    user_reply: Message = {"role": "user", "content": control_tokens}
    yield "control tokens in a user reply", [(answer, [user_reply])]
    if not schemas:
        return
    tools = [schema.get("function", schema) for schema in schemas]
    for tool in tools:
        yield f"call of {tool['name']}", [_make_step(turn=0, called=[tool], replies=["7"])]
    # Two tools if the run has two; otherwise both calls are of the same tool.
    two_calls = _make_step(turn=0, called=[tools[0], tools[-1]], replies=["7", "\nseven\n"])
    yield PARALLEL_CALLS, [two_calls]
    turns = [
        _make_step(turn=turn, called=[tools[turn % len(tools)]], replies=[str(turn)])
        for turn in range(3)
    ]
    yield "three turns", turns
    first = tools[:1]
    with_content = _make_step(turn=0, called=first, replies=["7"], content="Let me see.")
    yield "content beside a call", [with_content, turns[1]]
    reasoned = _make_step(turn=0, called=first, replies=["7"], reasoning="3 and 4")
    reasoned_again = _make_step(turn=1, called=first, replies=["8"], reasoning="one more")
    yield "reasoning", [reasoned, reasoned_again]
    for name, text in {**REPLIES, "control tokens in a tool reply": control_tokens}.items():
        yield name, [_make_step(turn=0, called=first, replies=[text]), turns[1]]
    # Many templates drop the reasoning that stands before the last user message.
    answered = (replace(answer, reasoning="7 it is"), next_question)
    later_call = _make_step(turn=2, called=first, replies=["9"], reasoning="4 and 5")
    yield "later user message", [reasoned, answered, later_call]


PICTURES = tuple(
    Image(data=b"", sha256=f"probe{number}", width=width, height=height)
    for number, (width, height) in enumerate(((64, 64), (192, 64), (64, 320)))
)
"""Images of the probes: only their sizes matter, which give different numbers of placeholders."""


def image_conversations(schemas: Sequence[dict]) -> Iterator[tuple[str, Message, list[Step]]]:
    """Yield (name, first message, steps) of probe conversations with images.

    The images stand in the first message, in a reply of the user, and in replies of tools, beside
    text and alone.
    """
    first, second, third = PICTURES
    text_question = QUESTION[0]
    answer = AssistantTurn(content="It is 7.", reasoning=None, calls=())
    question: Message = {
        "role": "user",
        "content": content_of(["Read ", first, " and ", second, "."]),
    }
    reply_with_image: Message = {"role": "user", "content": content_of([third, "And this?"])}
    yield "images in the prompt", question, [(answer, [{"role": "user", "content": "Again."}])]
    yield "image in a user reply", text_question, [(answer, [reply_with_image])]
    if not schemas:
        return
    tools = [schema.get("function", schema) for schema in schemas]
    captioned = _make_step(turn=0, called=tools[:1], replies=["it: "], images=[first])
    yield "image in a tool reply", question, [captioned]
    # Each of the two replies holds its text, empty in the first, and then both images.
    with_images = _make_step(
        turn=0, called=[tools[0], tools[-1]], replies=["", "both"], images=[second, third]
    )
    later_turns = [
        _make_step(turn=1, called=tools[:1], replies=["8"]),
        _make_step(turn=2, called=tools[:1], replies=["9"]),
    ]
    yield "several images in a turn", text_question, [with_images, *later_turns]


def _make_step(
    *,
    turn: int,
    called: list[dict],
    replies: list[str],
    content: str = "",
    reasoning: str | None = None,
    images: Sequence[Image] = (),
) -> Step:
    """Return a turn that calls the tools `called`, and the messages that reply to its calls.

    `replies` are the texts of these messages, one for each call. Each message holds all `images`
    after its text. `turn` is the turn's number in its conversation, which makes the ids of the
    calls unique.
    """
    calls = []
    for index, tool in enumerate(called):
        properties = (tool.get("parameters") or {}).get("properties", {})
        examples = {name: _example_value(schema) for name, schema in properties.items()}
        # A key whose value is None is left out of a message, so it would not come back.
        arguments = {name: value for name, value in examples.items() if value is not None}
        calls.append(ToolCall(id=f"call_{turn}_{index}", name=tool["name"], arguments=arguments))
    messages: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "name": call.name,
            "content": content_of([text, *images]),
        }
        for call, text in zip(calls, replies, strict=True)
    ]
    return AssistantTurn(content=content, reasoning=reasoning, calls=tuple(calls)), messages


def _example_value(schema: Any) -> Any:
    """Return a value that fits the JSON schema of an argument."""
    if not isinstance(schema, dict):  # `true` allows any value
        return TEXT
    if schema.get("enum"):
        return next((value for value in schema["enum"] if value is not None), None)
    types = schema.get("type", "string")
    types = [types] if isinstance(types, str) else [name for name in types if name != "null"]
    if not types:  # null is the only value
        return None
    return EXAMPLES.get(types[0], TEXT)


REASONING_PROBES = ("reasoning", "reasoning without a call", "later user message")
THOUGHT = "Well."
REASONING_LEFT_OUT = "the template leaves out reasoning"
"""The remark of a probe in which reasoning was left out."""
EXCERPT_LENGTH = 160
"""Characters of a text that a probe's reason quotes."""
SERVE = (
    "serve checkpoints with the chat_template.jinja that is saved in them (vllm and transformers "
    "take it by themselves; elsewhere: --chat-template <checkpoint>/chat_template.jinja)"
)


class CertificateError(AgenttrainError):
    """Raised if the template does not fit the token-concatenating loop; says what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of `certify`: each probe of the chat template, and a hash of what they depend on.

    A run starts only if no probe is refused.
    """

    probes: tuple[Probe, ...]
    hash: str
    """sha256, hex, over the template, its variables, the tools, the control tokens and the ids
    between turns."""
    family: str | None
    """The template's family; None if none was recognised."""
    changes: tuple[str, ...]
    """Changes that the fix made."""
    preserving: bool
    """The model's own template renders earlier messages the same in every turn, as a context that
    only grows demands. Judged before any fix, so that it says whether the model needs one."""
    one_call_per_turn: bool
    """If a turn has several calls, the template renders only one of them."""
    warnings: tuple[str, ...]
    """Warnings about training with this template and about serving the trained model."""
    remedy: str
    """Advice for refused probes: the setting to change."""
    left_out: tuple[str, ...] = ()
    """Kinds of messages, in words, whose text the template leaves out or refuses. A row of the data
    that has one is refused."""
    chosen: str | None = None
    """Note for people on which template was chosen; None unless the tokenizer carries several."""

    @property
    def passed(self) -> bool:
        """True if no probe is refused."""
        return all(probe.passed for probe in self.probes)

    @property
    def status(self) -> Status:
        """The worst status of the probes."""
        return max((probe.status for probe in self.probes), key=list(Status).index)

    def raise_if_refused(self) -> None:
        """Raise CertificateError that lists the refused probes."""
        by_reason: dict[str, list[Probe]] = {}
        for probe in self.probes:
            if not probe.passed:
                by_reason.setdefault(probe.reason, []).append(probe)
        if by_reason:
            refused = [
                f"- {', '.join(probe.name for probe in probes)}: {probes[0].why}"
                for probes in by_reason.values()
            ]
            raise CertificateError(
                "the model's chat template does not fit the token-concatenating loop:\n"
                + "\n".join(refused)
                + f"\n{self.remedy}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the certificate as JSON data, for `agenttrain templates <folder> --json FILE`."""
        fields = {key: value for key, value in asdict(self).items() if key != "probes"}
        probes = [
            {"name": p.name, "status": str(p.status), "reason": p.why, "misfit": p.misfit}
            for p in self.probes
        ]
        remedy = None if self.passed else self.remedy
        return {"status": str(self.status), **fields, "remedy": remedy, "probes": probes}

    def markdown(self) -> str:
        """Return the probes as a Markdown table."""
        cells = [(p.name, str(p.status), p.why.replace("|", "\\|")) for p in self.probes]
        lines = [f"| {' | '.join(line)} |" for line in cells]
        return "\n".join(["| probe | result | what was seen |", "|---|---|---|", *lines])

    def lines(self) -> list[str]:
        """Return lines to print: one per probe, then the changes and the warnings."""
        name = self.family or "of no known family"
        lines = [f"chat template  {name}; certificate {self.status}, {self.hash[:12]}"]
        lines += [f"  note     {self.chosen}"] if self.chosen else []
        groups: dict[tuple[Status, str], list[Probe]] = {}
        for number, probe in enumerate(self.probes):
            # Probes that fail for the same reason share a line, which shows the first one's `why`:
            # its reason and details. A passed probe has a line of its own.
            reason = probe.reason if probe.status is not Status.passed else str(number)
            groups.setdefault((probe.status, reason), []).append(probe)
        for (status, _), probes in groups.items():
            lines.append(f"  {status:<8} {probes[0].name:<32} {probes[0].why}".rstrip())
            if len(probes) > 1:
                names = ", ".join(probe.name for probe in probes[1:])
                lines.append(f"{'':11}and for the same reason: {names}")
        lines += [f"  fix      {change}" for change in self.changes]
        lines += [f"  warning  {warning}" for warning in self.warnings]
        if self.left_out:
            lines.append(f"  note     rows must not have: {', '.join(self.left_out)}")
        return lines if self.passed else [*lines, f"  remedy   {self.remedy}"]


def certify(chat: Chat, schemas: Sequence[dict]) -> Certificate:
    """Return the certificate of a chat's template with these tools.

    Each probe conversation is rendered whole, and as prompt, completions and suffixes, and the ids
    are compared. A template that does not fit raises nothing: its probes are refused. If the
    template was fixed, the model's own is probed too, to show which probes the fix repairs.
    """
    probes = stock_probes = _run_probes(chat, schemas)
    if chat.fix.changes:
        stock_probes = _run_probes(_stock_chat(chat), schemas)
        probes = [
            _mark_fixed(probe, stock) for probe, stock in zip(probes, stock_probes, strict=True)
        ]
    # Reported, not required: users see whether the model needs the fix. A conversation passes only
    # if each turn leaves the ids before it as they were. Other probes (FEATURES) have no turns.
    preserving = all(probe.passed or probe.name in FEATURES for probe in stock_probes)
    # The hash is recorded with a run: it differs if the run's token ids may differ.
    hashed_content = [
        chat.template,
        repr(sorted(chat.kwargs.items())),
        schemas,
        chat.encoder.control,
        chat.stop_token_ids,
        [(probe.name, probe.token_ids) for probe in probes],
    ]
    return Certificate(
        probes=tuple(probes),
        hash=hashlib.sha256(json.dumps(hashed_content, sort_keys=True).encode()).hexdigest(),
        family=chat.fix.family,
        changes=chat.fix.changes,
        preserving=preserving,
        one_call_per_turn=chat.one_call_per_turn,
        warnings=tuple(_warnings(chat, probes)),
        remedy=_remedy(chat, probes),
        chosen=chat.fix.chosen,
        left_out=tuple(_messages_left_out(chat, schemas)),
    )


def _stock_chat(chat: Chat) -> Chat:
    """Return a chat with the model's own template, without the changes of the fix."""
    return Chat(
        chat.tokenizer,
        chat.fix.stock,
        chat.response,
        kwargs=chat.kwargs,
        eos_token_ids=chat.eos_token_ids,
        plain=chat.plain,
        placeholders=chat.placeholders,
        roles=chat.roles,
    )


def _mark_fixed(probe: Probe, stock: Probe) -> Probe:
    """Return a probe as fixed if it passes and `stock`, of the model's own template, does not."""
    if not probe.passed or stock.passed:
        return probe
    reason = f"stock: {stock.reason}"
    return replace(probe, status=Status.fixed, reason=reason, detail=stock.detail)


def _messages_left_out(chat: Chat, schemas: Sequence[dict]) -> Iterator[str]:
    """Yield a description of each kind of message whose text the template leaves out or refuses.

    Example: ``a second system message``. `TEXT` and `CALL` are arbitrary texts and calls.
    """
    answer: Message = {"role": "assistant", "content": "It is 7."}
    extra: Message = {"role": "system", "content": TEXT}
    reply: Message = {
        "role": "tool",
        "tool_call_id": CALL.calls[0].id,
        "name": "f",
        "content": TEXT,
    }
    call = replace(CALL, content=TEXT).message()
    conversations = {
        "a system message": [extra, *QUESTION],
        "a second system message": [extra, extra, *QUESTION],
        "a system message after an answer": [*QUESTION, answer, extra, *QUESTION],
        "a message of the developer": [{**extra, "role": "developer"}, *QUESTION],
    }
    if schemas:
        conversations["a tool's message without its call"] = [*QUESTION, reply, *QUESTION]
        conversations["text beside a call"] = [*QUESTION, call, reply]
    for description, messages in conversations.items():
        try:
            chat.check_places(messages, schemas)  # raises if the template leaves a text out
            chat.prompt_ids(messages, schemas)  # raises if the template refuses them
        except ChatError:
            yield description


def _run_probes(chat: Chat, schemas: Sequence[dict]) -> list[Probe]:
    """Return the results of all probes: of features, and of conversations.

    A conversation passes with remarks, such as what the template leaves out. It is refused with a
    reason, and with its misfit: the settings to change, template or response schema.
    """
    probes = feature_probes(chat, schemas)
    (question,) = QUESTION
    cases = [(name, question, steps) for name, steps in conversations(chat, schemas)]
    if chat.placeholders is not None:
        cases += image_conversations(schemas)
    for name, first_message, steps in cases:
        try:
            ids, remarks = _replay(chat, schemas, first_message, steps)
        except _Mismatch as error:
            probe = refused_probe(name, error.reason, error.detail)
            probes.append(replace(probe, misfit=error.misfit))
            continue
        except ChatError as error:
            probes.append(refused_probe(name, str(error)))
            continue
        if name == PARALLEL_CALLS and chat.one_call_per_turn:
            remarks.append("one call per turn: the first is rendered, and all replies as its reply")
        reason = "; ".join(remarks)
        probes.append(Probe(name=name, status=Status.passed, reason=reason, token_ids=tuple(ids)))
    return probes


def _warnings(chat: Chat, probes: Sequence[Probe]) -> Iterator[str]:
    """Yield warnings about training with the template and about serving the trained model.

    They are independent of each other. A fixed probe is one that only the changed template passes.
    SERVE says to serve the trained model with that changed template, which is saved with it.
    """
    if any(p.name in REASONING_PROBES and p.status is Status.fixed for p in probes):
        yield (
            "the model is trained with its past reasoning in view, which its own template drops: "
            + SERVE
        )
    elif chat.fix.changes:
        yield f"the model's own template writes another context: {SERVE}"
    # A template that renders no reasoning anywhere never shows it, to no server either.
    if any(REASONING_LEFT_OUT in probe.reason for probe in probes) and chat.renders_reasoning:
        yield (
            "the loop shows the model its past reasoning, which the template leaves out when a "
            "conversation is rendered anew: append to the ids while serving, as training does"
        )
    if CLOCK.search(chat.template) and "date_string" not in chat.kwargs:
        has_variable = "date_string" in chat.template
        remedy = ": chat_template.kwargs.date_string='26 Jul 2024' pins it" if has_variable else ""
        yield f"prompts hold the day's date, so a run repeats exactly on the same day only{remedy}"
    if ends := _answer_end_texts(chat):
        last_answer_end, earlier_answer_end = ends  # in harmony, <|return|> and <|end|>
        yield (
            f"an answer is sampled with {last_answer_end} at its end, where the template writes "
            f"{earlier_answer_end} once a user's message follows: then the model is trained with "
            f"{last_answer_end} in view and served with {earlier_answer_end}, one token in place "
            "of the other"
        )
    if response_template(chat) is None:
        yield (
            "transformers' tokenizer.parse_response cannot read this format of calls: checkpoints "
            "carry no response_template, a server needs a tool parser of its own for it"
        )
    if chat.one_call_per_turn:
        yield "the template renders one call per turn: rollout.on_parallel_calls decides on more"


def _answer_end_texts(chat: Chat) -> tuple[str, str] | None:
    """Return the texts that end the last answer and an earlier one; None if they are the same."""
    with suppress(ChatError):
        last, earlier = chat.answer_end_ids()
        return (chat.decode(last), chat.decode(earlier)) if last != earlier else None
    return None


def _remedy(chat: Chat, probes: Sequence[Probe]) -> str:
    """Return advice for the refused probes: the setting to change."""
    refused = [probe for probe in probes if not probe.passed]
    names = {probe.name for probe in refused}
    if refused and all(probe.misfit is Misfit.response_schema for probe in refused):
        for name in spec_names():
            if reads_back(chat.tokenizer, chat.template, load_spec(name), chat.kwargs):
                return f"Set response_schema={name}, which reads the template's calls."
        return (
            "Set `response_schema=file response_schema.path=<file.yaml>` to a format of yours that "
            "reads the template's calls; docs/guides/response-schemas.md says how to write one."
        )
    if "tools in the prompt" in names or not chat.renders_calls:
        return (
            "The template has no tools: `chat_template=hermes` adds a generic tool format to it; "
            "training without tools needs no change."
        )
    why = f"{chat.fix.problem}. " if chat.fix.problem else ""
    return (
        f"{why}Set chat_template to auto or to the model's family, or to a template of yours with "
        "`chat_template=file chat_template.path=<file.jinja>`."
    )


@dataclass(eq=False)  # an exception must stay hashable
class _Mismatch(Exception):
    """Raised by `_replay` if a conversation has other ids when it is rendered whole than by turns.

    Raised also if the calls of a turn are not read back as they were rendered.
    """

    reason: str
    detail: str
    misfit: Misfit = Misfit.chat_template
    """The settings to change: the template's or the response schema's."""


def _replay(
    chat: Chat, schemas: Sequence[dict], question: Message, steps: list[Step]
) -> tuple[list[int], list[str]]:
    """Replay a conversation as the rollout loop does; return (ids between the turns, remarks).

    The loop appends each completion and its suffix to a ledger of ids. The remarks say what the
    template leaves out. Raises _Mismatch if the full rendering has other ids than the ledger, or if
    a call is not parsed as it was rendered.
    """
    messages: list[Message] = [question]
    ledger = chat.rendered_ids(messages, schemas)
    between_turns: list[int] = []
    remarks: dict[str, None] = {}  # an ordered set
    for probe_turn, probe_replies in steps:
        after = messages[-1]["role"]
        # The turn as a model could sample it after this prompt, with what the template renders.
        turn, replies = chat.as_rendered(as_parsed(chat, probe_turn, after), probe_replies)
        messages += [turn.message(), *replies]
        # No model samples here: the completion is cut out of the full rendering, which must be
        # ledger + completion + suffix.
        full = chat.rendered_ids(messages, schemas)
        _require_equal(chat, full[: len(ledger)], ledger, "earlier messages are rendered anew")
        end = chat.end_ids(turn, replies, generation_prompt=True)
        # Of a completion, `suffix` needs only to know that it ends the turn. `end` does.
        spans = chat.suffix(
            turn, replies, completion_ids=end, finish=Finish.stop, generation_prompt=True
        )
        suffix = [token_id for _, ids in spans for token_id in ids]
        suffix_start = max(len(full) - len(suffix), len(ledger))
        completion = full[len(ledger) : suffix_start]
        _require_equal(chat, full[suffix_start:], suffix, "replies are rendered differently")
        if end:
            # Only the last token: blanks before it may have merged with the text.
            _require_equal(chat, completion[-1:], end[-1:], "the turn ends differently")
        parsed = chat.parse(completion, schemas, turn=0, after=after)
        _require_same_calls(turn, parsed, chat.decode(completion))
        if turn.content != parsed.content:
            remarks[
                "the template leaves out content beside calls; the ledger keeps what was sampled"
            ] = None
        if turn.reasoning and turn.reasoning != parsed.reasoning:
            remarks[f"{REASONING_LEFT_OUT}; the ledger keeps what was sampled"] = None
        if not turn.calls and probe_replies and (ends := _answer_end_texts(chat)):
            # Of an answer, sampled as the last one: in harmony, <|return|> for the later <|end|>.
            sampled_end, rendered_end = ends
            remarks[f"{sampled_end} stays where it was sampled, in place of {rendered_end}"] = None
        between_turns += suffix
        ledger = full  # = ledger + completion + suffix, as was checked
    return between_turns, list(remarks)


def as_parsed(chat: Chat, turn: AssistantTurn, after: str) -> AssistantTurn:
    """Return the turn as it is parsed from a completion after a message of role `after`.

    The generation prompt decides whether a completion has reasoning::

        the prompt ends with    the turn's reasoning
        <think></think>         removed
        <think>                 kept, or THOUGHT if it has none
        anything else           kept
    """
    if chat.thinking_is_off:  # the prompt closes the reasoning
        return replace(turn, reasoning=None)
    # THOUGHT, not "": `_replay` compares the prompt's ids with those of the full conversation.
    # There a tokenizer merges the prompt's last line break with one that follows at once, and the
    # template would seem not to fit.
    needs_reasoning = chat.opens_reasoning(after) and not turn.reasoning
    return replace(turn, reasoning=THOUGHT) if needs_reasoning else turn


def _require_same_calls(turn: AssistantTurn, parsed: AssistantTurn, completion: str) -> None:
    """Raise _Mismatch if the calls of a turn are not those parsed from its completion."""
    calls = [(call.name, call.arguments) for call in turn.calls]
    parsed_calls = [(call.name, call.arguments) for call in parsed.calls]
    if calls != parsed_calls or any(call.malformed for call in parsed.calls):
        raise _Mismatch(
            "the response schema does not read the calls that the template renders",
            f"{_excerpt(completion)} parses to {_excerpt(parsed_calls)} "
            f"instead of {_excerpt(calls)}",
            Misfit.response_schema,
        )


def _require_equal(chat: Chat, full: Sequence[int], ledger: Sequence[int], reason: str) -> None:
    """Raise _Mismatch that shows the first difference of two lists of ids, if they differ."""
    if list(full) == list(ledger):
        return
    pairs = enumerate(zip(full, ledger, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(full), len(ledger)))
    raise _Mismatch(
        reason,
        f"the full rendering has {chat.decode(full[first:][:12])!r} where the ledger has "
        f"{chat.decode(ledger[first:][:12])!r}",
    )


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= EXCERPT_LENGTH else f"{text[: EXCERPT_LENGTH - 1]}…"
