"""The invariants of a finished rollout, checked for every rollout at run time in O(T)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, groupby
from typing import NamedTuple

from agenttrain.chat.chat import Chat
from agenttrain.types import (
    Finish,
    LedgerError,
    Message,
    Origin,
    PlacedImage,
    Rollout,
    Span,
    Trajectory,
    shift_images,
)
from agenttrain.utils.content import images_in


class TurnKey(NamedTuple):
    """Identity of a turn among all rollouts."""

    rollout_id: str
    trajectory: int
    turn: int


class ParsedTurn(NamedTuple):
    """A parsed completion: its ids, the role of the message before it, and its message."""

    token_ids: tuple[int, ...]
    after: str
    """Role of the message before: a chat template may open an answer to a user with a think tag,
    and an answer to a tool without one, so the same ids parse differently."""
    message_digest: bytes


@dataclass(slots=True)
class ParsedTurns:
    """Record of the turns that the loop has parsed, so that `verify` need not parse them again.

    A turn is skipped only if its ids, its message and the role of the message before it (`after`,
    on which parsing depends) are the recorded ones. One record may serve many rollouts of different
    ids. It holds a digest of each message instead of the message, which tools and reward functions
    may change later.
    """

    _turns: dict[TurnKey, ParsedTurn] = field(default_factory=dict)

    def record(
        self,
        trajectory: Trajectory,
        token_ids: tuple[int, ...],
        message: Message,
        *,
        turn: int,
        after: str,
    ) -> None:
        """Record that a turn's ids parse to `message`, so that `verify` need not parse them again.

        `after` is the role of the message before the turn, on which parsing depends: a template may
        open the model's reasoning after a user's message and not after a tool's.
        """
        key = TurnKey(trajectory.rollout_id, trajectory.index, turn)
        # A hash, not the message itself: tools and reward functions may change the message later.
        self._turns[key] = ParsedTurn(token_ids, after, _hash_message(message))

    def matches(
        self,
        trajectory: Trajectory,
        token_ids: tuple[int, ...],
        message: Message,
        *,
        turn: int,
        after: str,
    ) -> bool:
        """Return True if the turn was recorded with these ids, this message and this `after`.

        The loop has then parsed the ids to the message already. Otherwise `verify` parses them.
        `after` is the role of the message before the turn, on which parsing depends.
        """
        key = TurnKey(trajectory.rollout_id, trajectory.index, turn)
        return self._turns.get(key) == ParsedTurn(token_ids, after, _hash_message(message))


def _hash_message(message: Message) -> bytes:
    """Hash a message. Equal messages may get different hashes (1 and 1.0), which costs one parse;
    different messages never get equal ones."""
    return blake2b(repr(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def verify(
    rollout: Rollout, chat: Chat, schemas: Sequence[dict], parsed_turns: ParsedTurns | None = None
) -> None:
    """Raise LedgerError unless tokens, mask, logprobs and messages agree.

    `Trajectory.append_sampled` has already compared the ids that were sent to the engine. Turns
    that `parsed_turns` holds with the same ids and message are not parsed again.
    """
    for trajectory in rollout.trajectories:
        ids = _check_ids(trajectory, rollout.trajectories[: trajectory.index])
        _check_images(trajectory, ids, chat)
        _check_turns(trajectory, chat, schemas_of(trajectory, schemas), parsed_turns)


def _check_ids(trajectory: Trajectory, earlier: Sequence[Trajectory]) -> Sequence[int]:
    """Return the trajectory's ids, put together from the `earlier` trajectories and its spans.

    Raises LedgerError unless they equal its `token_ids`, begin with its one prompt, and the turn
    that called a sub-agent exists.
    """
    if trajectory.delegation is not None:
        index, turn = trajectory.delegation.caller
        if not 0 <= index < len(earlier) or not 0 <= turn < earlier[index].turns:
            raise LedgerError(
                f"{trajectory.name}: called from turn {turn} of trajectory {index}, which is "
                "not there before it"
            )
    ids = trajectory.context(earlier)  # the parent's up to the branch, if there is a parent
    for span in trajectory.spans:
        ids.extend(span.token_ids)
    if ids != trajectory.token_ids:
        raise LedgerError(f"{trajectory.name}: its ids are not those of its spans")
    first_origin = trajectory.spans[0].origin if trajectory.spans else None
    prompts = sum(span.origin is Origin.prompt for span in trajectory.spans)
    begins_with_prompt = prompts == 1 and first_origin is Origin.prompt
    prompt_is_in_context = prompts == 0 and trajectory.parent is not None
    if not begins_with_prompt and not prompt_is_in_context:
        raise LedgerError(
            f"{trajectory.name}: {prompts} prompt spans, the first span is {first_origin}"
        )
    return ids


def _check_turns(
    trajectory: Trajectory, chat: Chat, schemas: Sequence[dict], parsed_turns: ParsedTurns | None
) -> None:
    """Raise LedgerError unless the ids of each sampled turn parse to its assistant message."""
    # Each assistant message with the role of the message before it, which parsing depends on.
    assistant_messages = [
        (message, trajectory.messages[position - 1]["role"])
        for position, message in enumerate(trajectory.messages)
        if position >= trajectory.prompt_messages and message["role"] == "assistant"
    ]
    sampled = trajectory.sampled_spans()
    turns = [list(spans) for _, spans in groupby(sampled, key=lambda span: span.turn)]
    if len(turns) != len(assistant_messages):
        raise LedgerError(
            f"{trajectory.name}: {len(turns)} sampled turns, but {len(assistant_messages)} "
            "assistant messages"
        )
    parsed_turns = parsed_turns or ParsedTurns()
    for spans, (message, after) in zip(turns, assistant_messages, strict=True):
        turn, token_ids = spans[0].turn, _turn_ids(trajectory, spans, chat)
        if parsed_turns.matches(trajectory, token_ids, message, turn=turn, after=after):
            continue
        name = trajectory.turn_name(turn)
        parsed = chat.parse(token_ids, schemas, turn=name, after=after).message()
        if parsed != message:
            raise LedgerError(
                f"{_where(trajectory, spans[0])}: the sampled tokens decode to "
                f"{chat.decode(token_ids)!r}, which parses to {parsed!r}, but the recorded "
                f"message is {message!r}"
            )


def _check_images(trajectory: Trajectory, ids: Sequence[int], chat: Chat) -> None:
    """Raise LedgerError unless images, their placeholders and the messages agree.

    The model makes vectors of an image, in a grid of rows and columns: a grid of (2, 3) is 6
    vectors. Each takes the place of one placeholder token among `ids`.

    The images are those of the messages, in order. Only sampled spans may hold placeholders that
    stand for no image.
    """
    if chat.placeholders is None:
        if trajectory.images:
            raise LedgerError(f"{trajectory.name}: has images, and {chat.no_images}")
        return
    placeholder = chat.placeholders.token_id
    # 1. The trajectory's images are those of its spans. A branch also has the images of its
    # parent's context (the first `context_length` tokens), which none of its own spans has.
    own_images = [image for span in trajectory.spans for image in _images_of(trajectory, span)]
    if own_images != [i for i in trajectory.images if i.start >= trajectory.context_length]:
        raise LedgerError(f"{trajectory.name}: its images are not those of its spans")
    # 2. Each image has its grid, and a placeholder for each vector.
    for placed in trajectory.images:
        grid = chat.placeholders.grid(placed.image)
        count = sum(token_id == placeholder for token_id in ids[placed.start : placed.end])
        if grid != placed.grid or count != placed.tokens:
            raise LedgerError(
                f"{trajectory.name} position {placed.start}: the {placed.image} has {grid} "
                f"vectors, its span says {placed.grid}, and {count} placeholders stand there"
            )
    # 3. There are no placeholders without an image, except sampled ones.
    context = [span for span in trajectory.spans if span.origin is not Origin.sampled]
    count = sum(token_id == placeholder for span in context for token_id in span.token_ids)
    expected_count = sum(image.tokens for image in own_images)
    if count != expected_count:
        raise LedgerError(
            f"{trajectory.name}: {count} placeholders of images, but its spans know images with "
            f"{expected_count}"
        )
    # 4. The images are those of the messages.
    in_messages = [image.sha256 for image in images_in(trajectory.messages)]
    in_spans = [placed.image.sha256 for placed in trajectory.images]
    if in_messages != in_spans:
        raise LedgerError(
            f"{trajectory.name}: its messages hold the images {[*map(_short, in_messages)]}, its "
            f"spans {[*map(_short, in_spans)]}"
        )


def _images_of(trajectory: Trajectory, span: Span) -> tuple[PlacedImage, ...]:
    """Return a span's images at their positions in the trajectory."""
    return shift_images(span.images, _position(trajectory, span)) if span.images else ()


def _short(digest: str) -> str:
    return digest[:8]


def schemas_of(trajectory: Trajectory, schemas: Sequence[dict]) -> Sequence[dict]:
    """Return the tool schemas that a trajectory's prompt shows.

    They are those recorded for the trajectory, else those of its delegation, else `schemas`, the
    task's.
    """
    recorded_schemas = trajectory.schemas
    if recorded_schemas is None and trajectory.delegation is not None:
        recorded_schemas = trajectory.delegation.schemas
    return schemas if recorded_schemas is None else [dict(schema) for schema in recorded_schemas]


def _turn_ids(trajectory: Trajectory, spans: list[Span], chat: Chat) -> tuple[int, ...]:
    """Return the ids of a turn's sampled spans.

    A turn has several spans if several policy versions sampled it. Raises LedgerError unless the
    last span alone has a finish, and `stop` follows a stop token.
    """
    token_ids = tuple(chain.from_iterable(span.token_ids for span in spans))
    finish = spans[-1].finish
    if finish is None or any(span.finish is not None for span in spans[:-1]):
        raise LedgerError(
            f"{trajectory.name} turn {spans[0].turn}: only its last sampled span says how it "
            "finished"
        )
    if finish is Finish.stop and token_ids[-1] not in chat.stop_token_ids:
        raise LedgerError(
            f"{_where(trajectory, spans[-1])}: finished with `stop`, but its last token "
            f"{token_ids[-1]} ({chat.decode(token_ids[-1:])!r}) is no stop token "
            f"({list(chat.stop_token_ids)})"
        )
    return token_ids


def _where(trajectory: Trajectory, span: Span) -> str:
    """Return the place of a span in an error's text, e.g. ``rollout r trajectory 0 turn 1 position
    7``."""
    return f"{trajectory.name} turn {span.turn} position {_position(trajectory, span)}"


def _position(trajectory: Trajectory, span: Span) -> int:
    """Return the position of a span's first token."""
    position = trajectory.context_length
    for earlier in trajectory.spans:
        if earlier is span:
            break
        position += len(earlier.token_ids)
    return position
