"""Requests matched with the turns that were issued, message by message.

A client sends its conversation anew with every request. Its turns from us are recognised, so that
the ids that were sampled go on. Nothing is rendered and tokenised again::

    issued     [system, user] -> A            [system, user, A, tool 7] -> B
    sent       system, user, A, tool 7        the last turn is A, and goes on
    sent       system*, user, A, tool 7       A stands after another system message: no match
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.wire.normal import HANDLE
from agenttrain.chat.wire.openai import RequestError
from agenttrain.types import AssistantTurn, Finish, Message, Origin
from agenttrain.utils.json_schema import SchemaResolver, without_nullable

if TYPE_CHECKING:
    from _hashlib import HASH

CUT_CALL = "Error: the client ended the answer before this call"
"""Reply to a call that the client was not given."""


@dataclass(slots=True, eq=False, kw_only=True)
class IssuedTurn:
    """A turn that was sent to a client, whose next requests may continue it.

    `agenttrain serve` and the endpoint of a training run each have a subclass, which adds the place
    where that server keeps the ids of the prompt before the turn.

    A client was not given every call of the turn as a call. A malformed call may have been sent as
    text, and a call after a stop text was not sent at all.
    """

    turn: AssistantTurn
    """The turn as it was parsed, with the ids of its calls that the model wrote."""
    completion_ids: tuple[int, ...]
    """Its sampled tokens."""
    finish: Finish
    """Why the sampling ended."""
    call_ids: tuple[str, ...]
    """Ids that the client was given, one for each call. "" for a call that it was not given."""
    conversation: tuple[Message, ...]
    """Messages of the request, and the answer as it was issued."""
    tools: bytes
    """Digest of the request's tools."""
    request_hash: HASH
    """SHA-256 of the messages of the request. Take a copy to add a message to it."""

    @property
    def message(self) -> Message:
        """The answer as it was issued."""
        return self.conversation[-1]

    @property
    def keys(self) -> list[str]:
        """Its handle (a random id, under HANDLE in the message) and the ids of its calls.

        No other turn has any of them.
        """
        return [key for key in (self.message[HANDLE], *self.call_ids) if key]

    @property
    def digest(self) -> bytes:
        """Digest of the conversation."""
        conversation_hash = self.request_hash.copy()
        conversation_hash.update(canonical_bytes(self.message))
        return conversation_hash.digest()

    def replies(self, new_messages: Sequence[Message]) -> list[Message]:
        """Return the client's messages after the turn, with the model's ids of the calls.

        The template needs a reply to each call, also to those that the client was not given.
        """
        contents = {m["tool_call_id"]: m["content"] for m in new_messages if m["role"] == "tool"}
        replies: list[Message] = []
        for call_id, call in zip(self.call_ids, self.turn.calls, strict=True):
            if call_id in contents:
                content = contents[call_id]
            elif call.malformed is not None:  # it was sent as text: the reply says what is wrong
                content = call.malformed_reply
            else:  # it stands after a stop text, so it was not sent
                content = CUT_CALL
            replies.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            )
        # Handles are for matching requests with turns; no template knows them.
        return [*replies, *(without_handle(m) for m in new_messages if m["role"] != "tool")]

    def continuation(
        self, chat: Chat, new_messages: Sequence[Message], *, generation_prompt: bool
    ) -> tuple[list[Message], list[tuple[Origin, list[int]]]]:
        """Return the messages after the turn, and the ids that follow the turn, by origin.

        The messages are those of `replies` as the template can show them: if it refuses a system
        message after a turn, that becomes the user's. Raises ChatError.
        """

        def render_suffix(replies: list[Message]) -> list[tuple[Origin, list[int]]]:
            return chat.suffix(
                self.turn,
                replies,
                completion_ids=self.completion_ids,
                finish=self.finish,
                generation_prompt=generation_prompt,
            )

        # From index 0 on, every system message is late: they all stand after a turn.
        return _render_with_late_system(render_suffix, self.replies(new_messages), first=0)


T = TypeVar("T", bound=IssuedTurn)
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match(Generic[T]):
    """How a request relates to the turns that were issued: the result of `IssuedTurns.match`."""

    turn: T | None = None
    """The turn that the request continues. None: it has to be rendered."""
    new_messages: tuple[Message, ...] = ()
    """Messages of the request after that turn."""
    ambiguous: bool = False
    """Several turns match, and this is the newest."""
    other_tools: bool = False
    """The request would continue a turn if its tools were those of that turn."""
    request_hash: HASH = field(default_factory=hashlib.sha256)
    """SHA-256 of the request's messages."""


@dataclass(slots=True)
class IssuedTurns(Generic[T]):
    """The turns that a server issued, found by the conversation that they end or by a key.

    A key is the handle of a turn or the id of one of its calls.
    """

    turns: list[T] = field(default_factory=list)
    """All of them, the oldest first."""
    _by_digest: dict[bytes, list[T]] = field(default_factory=dict)
    """Digest of a conversation -> the turns that end it, the oldest first."""
    _by_key: dict[str, T] = field(default_factory=dict)
    """Handle of a turn, or id of one of its calls -> the turn."""

    def add(self, turn: T) -> None:
        """Remember an issued turn."""
        self.turns.append(turn)
        self._by_key.update(dict.fromkeys(turn.keys, turn))
        self._by_digest.setdefault(turn.digest, []).append(turn)

    def forget(self, turn: T) -> None:
        """Remove a turn, which no request continues from now on."""
        self.turns.remove(turn)
        for key in turn.keys:
            del self._by_key[key]
        turns = self._by_digest[turn.digest]
        turns.remove(turn)
        if not turns:
            del self._by_digest[turn.digest]

    def find_message(self, key: str) -> Message | None:
        """Return the answer as it was issued with a handle or the id of a call, or None."""
        turn = self._by_key.get(key)
        return None if turn is None else turn.message

    def twins(self, turn: T) -> list[T]:
        """Return the turns that equal `turn` in conversation, reasoning and tools.

        A client cannot tell twins apart: it sends the same messages back for each. `turn` is among
        them once it was added.
        """
        return [
            twin
            for twin in self._by_digest.get(turn.digest, ())
            if (twin.tools, twin.turn.reasoning) == (turn.tools, turn.turn.reasoning)
        ]

    def restore_calls(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], set[str]]:
        """Return messages with calls as they were issued, and the ids of calls that were respelled.

        `match` finds a turn only if its calls come back as they were issued. But clients write
        defaults of a tool's schema into calls, or leave them out, and replace a malformed call by
        one of their own. A call with an issued id that differs only in these ways counts as
        respelled, and is replaced by the issued call. If any call of a message differs in another
        way, the client has edited it, and the message stays. Numbers spelled otherwise, such as 3.0
        for 3, are left to `match`, which takes them for equal.
        """
        restored, respelled = list(messages), set()
        for index, message in enumerate(messages):
            sent_calls = message.get("tool_calls")
            if not sent_calls:
                continue
            # The id of any call finds the turn that it was issued in.
            turn = self._by_key.get(sent_calls[0]["id"])
            issued_calls = [] if turn is None else turn.message.get("tool_calls", [])
            issued_ids = [call["id"] for call in issued_calls]
            if issued_ids != [call["id"] for call in sent_calls]:
                continue  # another server's calls, or not all of the turn's
            differing = [
                (sent, issued)
                for sent, issued in zip(sent_calls, issued_calls, strict=True)
                if sent != issued and _call_key(sent) != _call_key(issued)
            ]
            are_respelled = all(
                is_respelled(sent["function"], issued["function"], schemas)
                for sent, issued in differing
            )
            if differing and are_respelled:
                restored[index] = {**message, "tool_calls": issued_calls}
                respelled |= {issued["id"] for _, issued in differing}
        return restored, respelled

    def match(self, messages: Sequence[Message], tools: bytes) -> Match[T]:
        """Find the turn that a request continues: that of its last answer, if we issued it.

        `messages` are those of the request, `in_call_order`. `tools` is the digest of its tools.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        end = answers[-1] + 1 if answers else 0  # after the last answer
        # The hash of the messages up to the last answer finds the turn. Then the other messages are
        # added: the turn that will answer this request keeps the hash, to add its own message.
        request_hash = hashlib.sha256(b"".join(map(canonical_bytes, messages[:end])))
        answered_digest = request_hash.digest()
        request_hash.update(b"".join(map(canonical_bytes, messages[end:])))
        if not answers:
            return Match(request_hash=request_hash)
        # Digests leave out reasoning and handles (the ids of turns), which only some clients send.
        # If they were sent, they must agree too.
        candidates = [
            turn
            for turn in self._by_digest.get(answered_digest, ())
            if reasoning_agrees(messages[:end], turn.conversation)
        ]
        # The tools are a part of the prompt, so that a turn goes on only with its own.
        same_tools = [turn for turn in candidates if turn.tools == tools]
        return Match(
            # Several turns may have equal conversations. The newest is as good as any, and the
            # caller can tell by `ambiguous`.
            turn=same_tools[-1] if same_tools else None,
            new_messages=tuple(messages[end:]),
            ambiguous=len(same_tools) > 1,
            other_tools=bool(candidates) and not same_tools,
            request_hash=request_hash,
        )


def render_prompt(
    chat: Chat, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]
) -> tuple[list[Message], list[int]]:
    """Return a request's messages as the template can show them, and the ids of their prompt.

    System messages after the first message become the user's where the template can show none
    there. Raises ChatError. Answers that this server issued may hold their handle, by which they
    are recognised: templates do not know that key.
    """
    # The template may leave out texts of the assistant: text beside calls is the model's own, and
    # a client cannot change what the template does.
    return _render_with_late_system(
        lambda shown: chat.prompt_ids(shown, schemas, may_omit=("assistant",)),
        [without_handle(message) for message in messages],
        first=1,  # the first message is the usual place of a system message
    )


def _render_with_late_system(
    render: Callable[[list[Message]], R], messages: list[Message], *, first: int
) -> tuple[list[Message], R]:
    """Return (messages as the template can show them, their rendering).

    Some templates refuse late system messages: those at the index `first` or after it. If the
    template refuses the messages as they are, late system messages become the user's. Raises
    ChatError if it refuses both forms.
    """
    try:
        return messages, render(messages)
    except ChatError as error:
        if all(message["role"] != "system" for message in messages[first:]):
            raise
        merged = _merge_late_system(messages, first)
        try:
            return merged, render(merged)
        except ChatError:
            raise error from None


def _merge_late_system(messages: Sequence[Message], first: int) -> list[Message]:
    """Return messages in which late system messages, from index `first` on, are the user's.

    For templates that refuse system messages there. The text of a late message is appended to the
    message before it, if that is the user's or the system's; else it becomes a message of the user.
    A message of the user that follows is appended too, so that no two messages of the user stand
    side by side. Examples, with `first` = 1::

        user "a", system "b", user "c"      user "a\\n\\nb\\n\\nc"
        tool "a", system "b", user "c"      tool "a", user "b\\n\\nc"
        system "a", system "b", user "c"    system "a\\n\\nb", user "c"
    """
    merged: list[Message] = []
    ends_with_late = False  # the last message is the user's and holds the text of a late one
    for index, message in enumerate(messages):
        is_late = message["role"] == "system" and index >= first
        role = "user" if is_late else message["role"]
        last = merged[-1] if merged else None
        late_joins = is_late and last is not None and last["role"] in ("user", "system")
        user_joins = role == "user" and ends_with_late
        if last is not None and (late_joins or user_joins):
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
            ends_with_late = merged[-1]["role"] == "user"
        else:
            merged.append({**message, "role": role})
            ends_with_late = is_late
    return merged


def without_handle(message: Message) -> Message:
    """Return a message without the keys that templates do not know."""
    return {key: value for key, value in message.items() if key != HANDLE}


@lru_cache(maxsize=1024)  # clients send the same tools with each request
def tools_digest(schemas_json: str) -> bytes:
    """Return a digest of tools, given as JSON, that is the same in any order of them."""
    texts = sorted(_json(_without_nulls(schema)) for schema in json.loads(schemas_json))
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).digest()


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the replies to each turn's calls in the order of the calls.

    Raises RequestError unless each call of an assistant message has exactly one reply right after
    it, and each reply has a call.
    """
    result: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if message["role"] == "tool":
            raise RequestError(
                f"messages: the tool message for {message['tool_call_id']} has no place here; it "
                "follows the assistant message with its call",
                param="messages",
            )
        result.append(message)
        if message["role"] != "assistant":
            continue
        replies: dict[str, Message] = {}
        call_ids = [call["id"] for call in message.get("tool_calls", ())]
        while index < len(messages) and messages[index]["role"] == "tool":
            call_id = messages[index]["tool_call_id"]
            if call_id in replies or call_id not in call_ids:
                raise RequestError(
                    f"messages: the tool message for {call_id} is there twice, or has no call in "
                    "the assistant message before it",
                    param="messages",
                )
            replies[call_id] = messages[index]
            index += 1
        if len(replies) < len(call_ids):
            unanswered = [call_id for call_id in call_ids if call_id not in replies]
            # If each id has its reply, there are fewer ids than calls.
            same_id = "an id has two calls"
            problem = f"{', '.join(unanswered)} has none" if unanswered else same_id
            raise RequestError(
                f"messages: the assistant made the calls {', '.join(call_ids)}, and each needs "
                f"exactly one tool message behind it; {problem}",
                param="messages",
            )
        result += [replies[call_id] for call_id in call_ids]
    return result


def reasoning_agrees(sent: Sequence[Message], issued: Sequence[Message]) -> bool:
    """Return True if reasoning and handles that were sent are those that were issued."""
    return all(
        message.get(key) in (None, issued[index].get(key))  # most clients send no reasoning
        for index, message in enumerate(sent)
        if message["role"] == "assistant"
        for key in ("reasoning_content", HANDLE)
    )


def canonical_bytes(message: Message) -> bytes:
    """Return a message without reasoning in a form that is the same for all spellings of it.

    Blanks around an answer, and 3.0 in place of 3 in arguments, do not matter. The bytes of several
    messages may be joined without a separator: no other list of messages has the same bytes.
    """
    content = str(message["content"])
    if message["role"] == "assistant":
        content = content.strip()
    # `repr` escapes what could be taken for the end of a text. It takes a fifth of JSON's time, and
    # every request has all messages before it.
    text = repr((message["role"], content, message.get("tool_call_id")))
    if calls := message.get("tool_calls"):
        text += _json([_call_key(call) for call in calls])
    return text.encode()


def _call_key(call: Mapping[str, Any]) -> list[Any]:
    """Return a call's parts to compare: two calls are the same if their keys are equal.

    Other parts and spellings of a call, such as 3.0 in place of 3, may differ.
    """
    function = call["function"]
    text = function.get("text")  # of arguments that are no JSON object
    arguments = _whole_numbers(function["arguments"]) if text is None else {"text": text}
    return [call["id"], function["name"], text is None, arguments]


def is_respelled(
    sent: Mapping[str, Any], issued: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]
) -> bool:
    """Return True if a client's call equals the issued one apart from defaults of its schema.

    `sent` and `issued` are the ``{"name": …, "arguments": …}`` of two calls that differ. Arguments
    that are no JSON object have their text under `text`: the call is malformed. A malformed call
    counts as respelled whatever was sent in its place: clients replace it. A call of a tool without
    a schema has no defaults, so that a difference is an edit.
    """
    if issued.get("text") is not None:
        return True
    if sent["name"] != issued["name"] or sent.get("text") is not None:
        return False
    for schema in schemas:
        if schema["function"]["name"] == sent["name"]:
            resolver = SchemaResolver(without_nullable(schema["function"].get("parameters") or {}))
            # Clients also write 3 as 3.0.
            sent_arguments, issued_arguments = (
                _whole_numbers(resolver.with_defaults(function["arguments"]))
                for function in (sent, issued)
            )
            return bool(sent_arguments == issued_arguments)
    return False


def _whole_numbers(value: Any) -> Any:
    """Return a JSON value in which 3.0 is 3, as some languages write it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null, which some clients leave out."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_json = json.JSONEncoder(sort_keys=True).encode
