"""Turn conversations into token ids, and completions back into messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from agenttrain.chat.boundary import (
    ANSWER,
    BODY,
    CALL,
    ReplyTexts,
    Suffix,
    TurnBoundary,
    build_suffix,
    fill_suffix,
    slot,
)
from agenttrain.chat.encoding import ChatError, Encoder, clean
from agenttrain.chat.fixes import Fix
from agenttrain.chat.grammar import ANY_FORM, AnswerForm, CallGrammar
from agenttrain.chat.omissions import (
    ROLES,
    Place,
    find_omitted,
    omission_remedy,
    places,
    role_of,
    texts_stand_in,
)
from agenttrain.chat.parsers.base import ResponseSpec, parse_response
from agenttrain.chat.probing import USER, adapt_message, probe_behaviour, render
from agenttrain.types import AssistantTurn, Finish, Image, Message, Origin, PlacedImage
from agenttrain.utils.content import content_of, images_in, parts
from agenttrain.utils.image_files import BadImage
from agenttrain.utils.messages import REASONING_KEYS, normal_message
from agenttrain.utils.placeholders import Placeholders

CACHED_SHAPES = CACHED_PLACES = 4096
"""Entries of the caches of turn shapes and of message places, before they are cleared."""
CHARACTERS_PER_TOKEN = 8
"""First guess at the amount of text that fills a limit; doubled until it does."""
PREFIX = 8
"""Tokens that a tokenizer may put before a text. An ASCII text has at most one per character
besides."""
WORD = "zqrolezq"
"""A text that no template contains or changes."""
LONG_MARKER, SHORT_MARKER = "… [{:,} characters clipped]", "…"
"""Marks at the end of a clipped text."""


class Chat:
    """Renders prompts and parses completions with one tokenizer, template and response schema.

    Example: the ids of a prompt, the parsed completion, and the ids of the suffix after it::

        ids = chat.prompt_ids([{"role": "user", "content": "3 + 4?"}], schemas)
        turn = chat.parse(sampled, schemas, turn=0)          # one call: add(a=3, b=4)
        replies = [{"role": "tool", "content": "7", "tool_call_id": turn.calls[0].id}]
        chat.suffix(turn, replies, completion_ids=sampled, finish=Finish.stop,
                    generation_prompt=True)   # [(template, […]), (tool, [29]), (template, […])]

    Its terms:

    - Texts of users and tools are *marked* before they are rendered: control tokens in them are
      wrapped (`Encoder.mark`), so that they stay text.
    - *Placeholders* are the tokens that stand for images.
    - `suffix` renders once for all turns of a *shape* (the tools called, the roles of the replies),
      with a *slot* in place of each text of a reply.
    - A message's *place* is its role and the roles beside it. Whether the template leaves out texts
      is checked once for each place.
    """

    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion: the end-of-sequence ids, then `turn_end_ids`."""
    turn_end_ids: tuple[int, ...]
    """Control tokens with which the template ends an assistant's turn; empty in some families."""
    template: str
    """Source of the template, after fixes."""
    tokenizer: Any
    fix: Fix
    """The model's own template, and the changes made to it."""
    thinking_is_off: bool
    """The generation prompt holds empty reasoning that is closed, so the model writes none."""
    renders_calls: bool
    """The template renders the assistant's tool calls."""
    renders_reasoning: bool
    """The template renders an assistant's reasoning anywhere."""
    one_call_per_turn: bool
    """The template renders at most one call per turn. Of several calls, `suffix` then renders the
    first, with the texts of all replies as its reply."""

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        response: ResponseSpec,
        *,
        kwargs: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        fix: Fix | None = None,
        plain: Mapping[str, str] | None = None,
        placeholders: Placeholders | None = None,
        no_images: str = "this model reads text only",
        roles: Mapping[str, str] | None = None,
    ) -> None:
        """`fix` is the model's own template with the changes that made `template`; None: unchanged.

        `plain` maps added tokens that are ordinary text to the reason, as in `Family.plain`.
        `placeholders` are those of the model's images. None: the model reads no images, for the
        reason `no_images`. `roles` maps roles of messages to the roles to render.
        """
        # The arguments.
        self.tokenizer = tokenizer
        self.template = template
        self.fix = fix or Fix(family=None, stock=template, template=template)
        self.kwargs = dict(kwargs or {})
        self.plain = dict(plain or {})
        self.placeholders, self.no_images = placeholders, no_images
        self.encoder = Encoder(tokenizer, template, self.plain)
        self.response = response
        self.eos_token_ids = tuple(eos_token_ids)
        self.roles = dict(roles or {})
        # Caches.
        self._probed_roles: dict[str, str] = {}
        """Role under another name, e.g. developer -> role to render, by `_role_to_render`. The
        setting `roles` goes before it."""
        self._shown_places: set[Place] = set()
        """Places of messages (role and neighbours' roles) whose texts the template has shown."""
        self._suffixes: dict[Any, Suffix] = {}
        """Shape of a turn and its replies -> suffix."""
        self._grammar: CallGrammar | None = None
        # What the template does, found by rendering. The order matters: `self.render` adapts
        # messages to `_behaviour`, which is therefore probed without it. The boundary needs
        # `self.render`, and the ends of a turn need the boundary.
        self._behaviour = probe_behaviour(partial(render, tokenizer, template, kwargs=self.kwargs))
        self.renders_calls = self._behaviour.renders_calls
        self.renders_reasoning = self._behaviour.reasoning_key is not None
        self.one_call_per_turn = self._behaviour.one_call_per_turn
        self._boundary = TurnBoundary(self.render, self.encoder)
        self._reply_text = ReplyTexts(self._boundary, self.encoder)
        # The tokens that end a completion.
        self.turn_end_ids = tuple(dict.fromkeys(self._find_turn_ends()))
        self.stop_token_ids = tuple(dict.fromkeys([*eos_token_ids, *self.turn_end_ids]))
        # The tokens that are left out of a completion's text: the stops and `steering_ids`, which
        # are the control tokens that are special or occur in the template. The response's marks of
        # reasoning and calls stay: the response schema parses them.
        self._response_marks = response.marks(self.encoder.control)
        self._stripped_ids = frozenset(self.stop_token_ids) | self.encoder.steering_ids
        self._stripped_ids -= {self.encoder.control[mark] for mark in self._response_marks}
        # Reasoning. Probed here: `parse` must not fail on a template that cannot be rendered.
        self._opens_reasoning = {role: self._probe_reasoning(role) for role in ("user", "tool")}
        prompt = self.render([USER], generation_prompt=True)
        reasoning = response.parse(prompt, in_reasoning=False, schemas=()).reasoning
        # The prompt holds reasoning, and that is closed: <think></think>.
        self.thinking_is_off = reasoning is not None and not self.opens_reasoning()

    @property
    def saved_template(self) -> str:
        """The template with `kwargs` as its defaults, to save beside the weights.

        A server with it builds the same contexts as the training.
        """
        defaults = [
            f"{{%- set {key} = {key} if {key} is defined else {json.dumps(value)} %}}\n"
            for key, value in self.kwargs.items()
            if value is not None
        ]
        # A template that was saved before has its defaults already.
        return "".join(line for line in defaults if line not in self.template) + self.template

    def opens_reasoning(self, after: str = "user") -> bool:
        """Return True if a completion after a message of role `after` begins inside reasoning."""
        return self._opens_reasoning["tool" if after == "tool" else "user"]

    def _probe_reasoning(self, role: str) -> bool:
        """Return True if the generation prompt after a message of `role` opens reasoning."""
        reply = {"role": "tool", "tool_call_id": CALL.calls[0].id, "name": "f", "content": "r"}
        messages = [USER, CALL.message(), reply] if role == "tool" else [USER]
        with suppress(ChatError):
            return self.response.opens_reasoning(self.render(messages, generation_prompt=True))
        return False

    def prompt_ids(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict],
        *,
        may_omit: Collection[str] = (),
    ) -> list[int]:
        """Return [T] the ids of the messages and the generation prompt.

        Messages are brought into `normal_message`'s form, with the roles of `chat_template.roles`.
        Control tokens in messages and schemas are encoded as plain text, except the marks of
        reasoning and calls in assistant messages. An image's placeholder is repeated as often as
        the image needs. Raises ChatError for content that the model cannot read, and if the
        template refuses the messages or leaves out the text or the calls of one of them. Messages
        of the roles in `may_omit` may be left out.
        """
        messages = self.normal_messages(messages)
        marked_messages = [self._mark_message(message) for message in messages]
        rendering = self._render_prompt(messages, schemas, marked_messages)
        self._check_texts(messages, schemas, rendering, may_omit, marked_messages)
        return self._encode_prompt(messages, rendering)

    def rendered_ids(self, messages: Sequence[Message], schemas: Sequence[dict]) -> list[int]:
        """Return [T] the ids as `prompt_ids` does; the template may leave out any text."""
        messages = self.normal_messages(messages)
        return self._encode_prompt(messages, self._render_prompt(messages, schemas))

    def normal_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in `normal_message`'s form, with roles to render. Raises ChatError."""
        normal = []
        for message in messages:
            role = message.get("role")
            try:
                normal_form = normal_message(message)
            except ValueError as error:
                raise ChatError(f"a message of the role {role}: {error}") from error
            if isinstance(role, str) and (rendered_role := self._role_to_render(role)) != role:
                normal_form["role"] = rendered_role
            normal.append(normal_form)
        return normal

    def _role_to_render(self, name: str) -> str:
        """Return the role to render for the role `name` of a message.

        The setting `chat_template.roles` goes first. Otherwise `developer`, which is another name
        of `system`, becomes `system` if the template renders that role but not `developer`. The
        same holds for the other names in `role_of`.
        """
        if name in self.roles:
            return self.roles[name]
        usual_name = role_of(name)
        if usual_name is None:  # `name` is a usual name itself, or no name of a known role
            return name
        if name not in self._probed_roles:
            renders_usual_name_only = self._omits_role(
                name, in_place_of=usual_name
            ) and not self._omits_role(usual_name, in_place_of=usual_name)
            self._probed_roles[name] = usual_name if renders_usual_name_only else name
        return self._probed_roles[name]

    def _omits_role(self, name: str, *, in_place_of: str) -> bool:
        """Return True if the template refuses or leaves out a message of the role `name`.

        It is tried where a message of the role `in_place_of`, one of ROLES, may stand: a system
        message before the user's, a tool's after a call.
        """
        message: Message = {"role": name, "content": WORD}
        if in_place_of == "user":
            conversation = [message]
        elif in_place_of == "assistant":
            conversation = [USER, message, USER]
        elif in_place_of == "tool":
            reply = {**message, "tool_call_id": CALL.calls[0].id, "name": CALL.calls[0].name}
            conversation = [USER, CALL.message(), reply]
        else:  # system
            conversation = [message, USER]
        try:
            return WORD not in self.render(conversation, generation_prompt=True)
        except ChatError:
            return True

    def _check_texts(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict],
        rendering: str,
        may_omit: Collection[str],
        marked_messages: Sequence[Message],
    ) -> None:
        """Raise ChatError if a rendering of messages lacks the text or the calls of one of them.

        `marked_messages` are the messages as they were rendered, with control tokens marked. Roles
        in `may_omit` raise nothing.

        A text that stands in `rendering` may still be left out: the same text, such as "yes", may
        stand there for another message. Only a second rendering with probe words, which are unique,
        shows that. It costs time, and is needed only if a text is missing, or if a message stands
        in a place (its role and the roles beside it, see `Place`) in which this chat has not yet
        seen that the template shows texts.
        """
        self._check_calls(messages, may_omit)
        knows_places = self._shown_places.issuperset(places(messages).values())
        # E.g. </think>: templates may leave out the reasoning in an assistant's text, so only the
        # text after this mark is looked for.
        reasoning_close = getattr(self.response, "reasoning_close", "")
        shows_texts = texts_stand_in(marked_messages, rendering, reasoning_close)
        if not knows_places or not shows_texts:
            self._check_with_probe_words(messages, schemas, may_omit)

    def _check_calls(self, messages: Sequence[Message], may_omit: Collection[str]) -> None:
        """Raise ChatError for a message with calls, if the template renders no calls."""
        for index, message in enumerate(messages):
            role = str(message.get("role"))
            if message.get("tool_calls") and not self.renders_calls and role not in may_omit:
                raise ChatError(
                    f"messages[{index}]: the chat template leaves out the calls of this message of "
                    f"the role {role}: remove them, or set chat_template to one that renders them, "
                    "such as hermes"
                )

    def _check_with_probe_words(
        self, messages: Sequence[Message], schemas: Sequence[dict], may_omit: Collection[str]
    ) -> None:
        """Render the messages with probe words as texts; raise ChatError if one is left out.

        Messages of the roles in `may_omit` raise nothing. Places whose message was shown are kept
        in `_shown_places`. A place is a message's role with the roles before and after it
        (`Place`), by which templates choose what they leave out.
        """
        omitted = find_omitted(messages, lambda probes: self._render_prompt(probes, schemas))
        if len(self._shown_places) >= CACHED_PLACES:
            self._shown_places.clear()
        place_of = places(messages)  # index of a message -> its place
        self._shown_places.update(place for i, place in place_of.items() if i not in omitted)
        for index in omitted:
            role = str(messages[index].get("role"))
            if role not in may_omit:
                # The usual roles that the template renders where such a message usually stands.
                rendered_roles = [
                    usual_role
                    for usual_role in ROLES
                    if not self._omits_role(usual_role, in_place_of=usual_role)
                ]
                raise ChatError(
                    f"messages[{index}]: the chat template leaves out the text of this message of "
                    f"the role {role}: {omission_remedy(messages, index, rendered_roles)}"
                )

    def check_places(self, messages: Sequence[Message], schemas: Sequence[dict]) -> None:
        """Raise ChatError if the template leaves out the text of a message.

        Cheaper than `prompt_ids`, which checks each text. Nothing is rendered if every message has
        a place (its role and the roles of its neighbours, see `Place`) in which the template has
        shown the text of an earlier message: templates choose by place what they leave out. Also
        raises for calls that the template does not render.
        """
        messages = self.normal_messages(messages)
        if not self._shown_places.issuperset(places(messages).values()):
            self._check_calls(messages, may_omit=())
            self._check_with_probe_words(messages, schemas, may_omit=())

    def _mark_message(self, message: Message) -> Message:
        """Return a message with its control tokens marked, except those that it may hold."""
        allowed = self._response_marks if message.get("role") == "assistant" else ()
        return self.encoder.mark(message, allowed)

    def _render_prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict],
        marked_messages: Sequence[Message] | None = None,
    ) -> str:
        """Render messages and the generation prompt to marked text.

        `marked_messages` are the messages with control tokens marked; None: they are marked here.
        Raises ChatError if the template refuses them, or the model cannot read a part of one.
        """
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list | tuple) else ():
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                is_image = kind == "image" and isinstance(part.get("image"), Image)
                if kind != "text" and not (is_image and self.placeholders):
                    supported = "only texts and images that were read are supported"
                    why = supported if self.placeholders else self.no_images
                    raise ChatError(
                        f"a message of the role {message.get('role')} holds a part of type "
                        f"{kind!r}: {why}; remove it from the data"
                    )
        if marked_messages is None:
            marked_messages = [self._mark_message(message) for message in messages]
        return self.render(marked_messages, self.encoder.mark(schemas), generation_prompt=True)

    def _encode_prompt(self, messages: Sequence[Message], rendering: str) -> list[int]:
        """Encode a rendering of messages; placeholders are repeated for their images."""
        ids = self.encoder.encode(rendering)
        return ids if self.placeholders is None else self._expand_placeholders(ids, messages)

    def _expand_placeholders(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Repeat the placeholders in `ids` for the images of the messages."""
        assert self.placeholders is not None
        try:
            return self.placeholders.expand(ids, [*images_in(messages)])
        except BadImage as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatError(
                f"{error} in messages of the roles {roles}; set chat_template"
            ) from error

    def place(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[PlacedImage, ...]:
        """Return the images of messages with the positions of their placeholders in `ids`."""
        if self.placeholders is None:
            return ()
        images = [*images_in(messages)]
        try:
            return self.placeholders.place(ids, images)
        except BadImage as error:
            raise ChatError(str(error)) from error

    def render(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict] = (),
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Render messages to text; texts of users and tools in them must be marked already."""
        return render(
            self.tokenizer,
            self.template,
            [adapt_message(message, self._behaviour) for message in messages],
            schemas,
            generation_prompt=generation_prompt,
            kwargs=self.kwargs,
        )

    def parse(
        self,
        token_ids: Sequence[int],
        schemas: Sequence[dict],
        *,
        turn: int | str,
        after: str = "user",
    ) -> AssistantTurn:
        """Parse a completion into content, reasoning and calls; never raises.

        Calls without an id of their own are named ``call_{turn}_{index}``. `schemas` give types to
        arguments in formats that write them as text. `after` is the role of the message before the
        completion: some generation prompts open the reasoning only after a user's message.
        """
        return self.parse_text(self.text_of(token_ids), schemas, turn=turn, after=after)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return a completion's text as `parse` reads it: without the tokens that end its turn."""
        return self.decode([token for token in token_ids if token not in self._stripped_ids])

    def parse_text(
        self, text: str, schemas: Sequence[dict], *, turn: int | str, after: str = "user"
    ) -> AssistantTurn:
        """Parse the text of a completion; never raises.

        For callers that have text in place of ids: `parse` is `text_of`, then this. The text has no
        tokens that end a turn, and may be cut anywhere, such as before a stop text. `turn` is the
        turn's number or name in the ids of its calls, ``call_{turn}_{index}``. `after` is the role
        of the message before the completion. It decides whether the generation prompt has opened
        the reasoning, in which the text then begins.
        """
        return parse_response(
            text,
            self.response,
            turn=turn,
            in_reasoning=self.opens_reasoning(after),
            schemas=schemas,
        )

    def grammar(
        self,
        schemas: Sequence[Mapping[str, Any]],
        *,
        after: str = "user",
        form: AnswerForm = ANY_FORM,
    ) -> str:
        """Return the grammar of completions whose calls fit these tools. Raises ChatError."""
        if self._grammar is None:
            self._grammar = CallGrammar(self.response, self.render)
        return self._grammar.grammar_for(
            schemas, in_reasoning=self.opens_reasoning(after), form=form
        )

    def suffix(
        self,
        turn: AssistantTurn,
        replies: Sequence[Message],
        *,
        completion_ids: Sequence[int],
        finish: Finish,
        generation_prompt: bool,
    ) -> list[tuple[Origin, list[int]]]:
        """Return the ids that follow a sampled completion, as (origin, ids).

        They are the end of the turn (only the part that the completion lacks), the replies as the
        template renders them, and the next generation prompt. The cost grows with the replies, not
        with the history: the template's text around the replies is the same for all turns of one
        shape (names of the calls, roles of the replies). It is rendered once per shape, with a slot
        for each text of a reply. Here the slots are filled with the texts.
        """
        turn, replies = self.as_rendered(turn, replies)
        suffix = self._suffix_of_shape(turn, replies, generation_prompt)
        texts: list[str] = []  # one for each slot; a reply with images has several texts, or none
        has_images = False
        for reply in replies:
            if isinstance(reply.get("content"), list):
                has_images = True
                texts += self._reply_text.texts_beside_images(reply)
            else:
                texts.append(self._reply_text(reply))
        spans = fill_suffix(suffix.blocks, texts, self.encoder)
        missing_end = list(_missing_end(suffix, completion_ids, finish))
        if missing_end and spans and spans[0][0] is Origin.template:
            spans[0][1][:0] = missing_end  # neighbours of one origin are one span
        elif missing_end:
            spans.insert(0, (Origin.template, missing_end))
        # So far each image is one placeholder in the template's constant text. How often it must be
        # repeated depends on the image, which is no part of the shape.
        return self._split_off_images(spans, replies) if has_images else spans

    def _split_off_images(
        self, spans: Sequence[tuple[Origin, list[int]]], replies: Sequence[Message]
    ) -> list[tuple[Origin, list[int]]]:
        """Repeat the placeholders of images in `spans`; give those of each image their own span.

        The origin of that span is `tool`, as that of the reply's texts: an image comes from outside
        too. Example, for an image that needs the placeholder P three times: ``(template, [1, P,
        8])`` becomes ``(template, [1]), (tool, [P, P, P]), (template, [8])``.
        """
        if self.placeholders is None:
            raise ChatError(f"a reply holds an image: {self.no_images}")
        ids = self._expand_placeholders(
            [token_id for _, part in spans for token_id in part], replies
        )
        origins = [origin for origin, part in spans for _ in part]  # of the ids before expansion
        split: list[tuple[Origin, list[int]]] = []
        position = 0  # in the expanded `ids`
        origin_index = 0  # of the same token in `origins`
        for image in self.place(ids, replies):
            text_length = image.start - position  # tokens between the last image and this one
            text_origins = origins[origin_index : origin_index + text_length]
            split += _spans_by_origin(ids[position : image.start], text_origins)
            split.append((Origin.tool, ids[image.start : image.end]))
            position = image.end
            origin_index += text_length + 1  # before expansion the image was one placeholder
        return split + _spans_by_origin(ids[position:], origins[origin_index:])

    def as_rendered(
        self, turn: AssistantTurn, replies: Sequence[Message]
    ) -> tuple[AssistantTurn, Sequence[Message]]:
        """Return the turn and the replies in the form in which they are rendered.

        Replies are the messages after the turn: tools' results, and what a user says next. They get
        the roles of `chat_template.roles`, as the messages of a prompt do. If the template renders
        one call per turn, only the first call stays, and one tool reply has the texts of all:
        ``7`` and ``Error: only one call per turn`` become one reply of two lines.
        """
        if self.one_call_per_turn and len(turn.calls) > 1:
            turn, replies = replace(turn, calls=turn.calls[:1]), _merge_tool_replies(replies)
        if self.roles:
            replies = [{**m, "role": self.roles.get(m["role"], m["role"])} for m in replies]
        return turn, replies

    def end_ids(
        self, turn: AssistantTurn, replies: Sequence[Message], *, generation_prompt: bool
    ) -> tuple[int, ...]:
        """Return the ids with which the template ends this turn; empty without a control token."""
        turn, replies = self.as_rendered(turn, replies)
        return self._suffix_of_shape(turn, replies, generation_prompt).end_ids

    def answer_end_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (the end of the last answer, the end of an answer before a user's message).

        The two differ in harmony: ``<|return|>`` and ``<|end|>``.
        """
        suffix = self._suffix_of_shape(ANSWER, [USER], generation_prompt=True)
        return suffix.last_end_ids or suffix.end_ids, suffix.end_ids

    def wrapper_length(
        self,
        turn: AssistantTurn,
        replies: Sequence[Message],
        *,
        completion_ids: Sequence[int],
        finish: Finish,
    ) -> int:
        """Return the number of tokens of `suffix` without the texts of its replies.

        They are the least that a turn adds to the context, whatever its tools return: the missing
        end of the turn, the template's text around the replies, and the next generation prompt.
        """
        turn, replies = self.as_rendered(turn, replies)
        suffix = self._suffix_of_shape(turn, replies, generation_prompt=True)  # without texts
        return suffix.glue_length + len(_missing_end(suffix, completion_ids, finish))

    def clip(self, text: str, max_tokens: int) -> str:
        """Return the text, or its head and a marker, in at most `max_tokens` plain tokens.

        Tokenises only as much of the text as can fit. If the long marker has no room, the marker is
        ``…``. If that has none either, the result is empty. Example: ``chat.clip("7 " * 9999, 12)``
        is ``"7 7 7… [19,993 characters clipped]"``.
        """
        text = clean(text)
        # Fits without tokenising: an ASCII character is at most one token, and PREFIX is the most
        # that a tokenizer puts before a text.
        if text.isascii() and len(text) + PREFIX <= max_tokens:
            return text
        # Tokenise a growing head of the text, until it has too many tokens or is the whole text.
        size = max(max_tokens, 1) * CHARACTERS_PER_TOKEN
        while True:
            ids, offsets = self.encoder.encode_plain_offsets(text[:size])
            if len(ids) > max_tokens:
                break
            if size >= len(text):
                return text
            size *= 2
        token_ends = [end for _, end in offsets]  # positions in the text
        for marker in (LONG_MARKER, SHORT_MARKER):
            head_tokens = max_tokens - len(self.encoder.encode_plain(marker.format(len(text))))
            # The long marker is worth its tokens only if most of the limit is left for the text.
            if marker == LONG_MARKER and 2 * head_tokens < max_tokens:
                continue
            while head_tokens >= 0:
                head = text[: token_ends[head_tokens - 1]] if head_tokens else ""
                clipped = head + marker.format(len(text) - len(head))
                # Head and marker together may have more tokens than each alone: the cut may divide
                # a character, whose parts are tokens of their own.
                excess = len(self.encoder.encode_plain(clipped)) - max_tokens
                if excess <= 0:
                    return clipped
                head_tokens -= excess  # try a head that is shorter by as many tokens
        return ""

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are ordinary text."""
        return self.encoder.encode_plain(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        return self.encoder.decode(token_ids)

    def _suffix_of_shape(
        self, turn: AssistantTurn, replies: Sequence[Message], generation_prompt: bool
    ) -> Suffix:
        """Return the suffix of the turn's shape, from the cache or by rendering it.

        The shape is everything about a turn that may change the text around its replies: names and
        ids of the calls, and every key of a reply but its content.
        """
        indices = {call.id: index for index, call in enumerate(turn.calls)}
        shapes = tuple(_shape_of(reply, indices) for reply in replies)
        shows_ids = self._behaviour.shows_ids
        calls_key = tuple((call.name, call.id if shows_ids else "") for call in turn.calls)
        cache_key = (generation_prompt, calls_key, shapes)
        cached = self._suffixes.get(cache_key)  # one look-up: another thread may clear the cache
        if cached is not None:
            return cached
        suffix = self._render_suffix(turn, replies, generation_prompt)
        if len(self._suffixes) >= CACHED_SHAPES:
            self._suffixes.clear()
        self._suffixes[cache_key] = suffix
        return suffix

    def _render_suffix(
        self, turn: AssistantTurn, replies: Sequence[Message], generation_prompt: bool
    ) -> Suffix:
        """Return a turn's suffix by rendering a numbered slot for each text of a reply."""
        mark = self.encoder.mark
        calls = tuple(replace(call, name=mark(call.name), id=mark(call.id)) for call in turn.calls)
        slots = count()
        stand_ins = []
        for reply in replies:
            content: Any = reply.get("content")
            if isinstance(content, list):
                content = content_of(
                    [
                        slot(next(slots)) if isinstance(part, str) else part
                        for part in parts(content)
                    ]
                )
            else:
                content = slot(next(slots))
            # All but the content is marked: slots must stay as they are.
            stand_ins.append({**mark({**reply, "content": None}), "content": content})
        # (end of the turn, text after it): ("<|im_end|>", "\n<|im_start|>user\n…").
        end, text_after = self._boundary.split(
            replace(turn, calls=calls), stand_ins, generation_prompt=generation_prompt
        )
        slots_used = next(slots)  # numbers begin with 0, so the next one is how many there are
        suffix = build_suffix(end, text_after, self.encoder, slots=slots_used)
        if end and not calls:
            # A model learns to end an answer as the template does if no message follows. That may
            # be another token than before a message: in Harmony <|return|>, not <|end|>. Phi-3 has
            # no other end: it writes the usual one, and an end of text after it.
            last_end = tuple(self.encoder.encode(self._boundary.answer_end()))
            has_other_token = last_end[-1:] != suffix.end_ids[-1:]
            begins_with_usual_end = last_end[: len(suffix.end_ids)] == suffix.end_ids
            if has_other_token and not begins_with_usual_end:
                suffix = replace(suffix, last_end_ids=last_end)
        return suffix

    def _find_turn_ends(self) -> list[int]:
        """Return the ids that end a turn and never occur inside of one: that of ``<|im_end|>``.

        Harmony's ``<|end|>`` ends the reasoning inside a turn too: sampling must not stop at it.
        """
        end_ids = []
        for reply_role in ("tool", "user"):  # after a turn with calls, and after an answer
            with suppress(ChatError):  # a template without tools still ends an answer
                end, _ = self._reply_text.after_turn(reply_role, "a reply")
                # Blanks may stand before the control token, which is the last one.
                end_ids += self.encoder.encode(end)[-1:]
        ids_inside = self._ids_before_content()
        return [token_id for token_id in end_ids if token_id not in ids_inside]

    def _ids_before_content(self) -> list[int]:
        """Return the ids of an answer from the generation prompt up to its content: the reasoning.

        Empty if the template refuses such an answer, or does not continue the prompt with it.
        """
        answer = {"role": "assistant", "content": BODY, REASONING_KEYS[0]: "reasoning"}
        try:
            prompt = self.render([USER], generation_prompt=True)
            before_content, _, _ = self.render([USER, answer]).partition(BODY)
        except ChatError:
            return []
        if not before_content.startswith(prompt):
            return []
        return self.encoder.encode(before_content.removeprefix(prompt))


def _spans_by_origin(
    ids: Sequence[int], origins: Sequence[Origin]
) -> list[tuple[Origin, list[int]]]:
    """Return ids as spans (origin, ids of neighbours of that origin)."""
    spans: list[tuple[Origin, list[int]]] = []
    for token_id, origin in zip(ids, origins, strict=True):
        if spans and spans[-1][0] is origin:
            spans[-1][1].append(token_id)
        else:
            spans.append((origin, [token_id]))
    return spans


def _merge_tool_replies(replies: Sequence[Message]) -> list[Message]:
    """Return the replies with one of role `tool`, which has the contents of all, a line each.

    It is the first; other replies follow.
    """
    tool_replies = [reply for reply in replies if reply["role"] == "tool"]
    other_replies = [reply for reply in replies if reply["role"] != "tool"]
    merged: list[str | Image] = []
    for reply in tool_replies:
        content = parts(reply.get("content"))
        merged += ["\n"] if merged and any(content) else []
        merged += [part for part in content if part]
    if tool_replies:
        tool_replies = [{**tool_replies[0], "content": content_of(merged)}]
    return [*tool_replies, *other_replies]


def _shape_of(reply: Message, indices: Mapping[str, int]) -> tuple[tuple[str, Any], ...]:
    """Return a reply without its texts, as a cache key; a call's id becomes its index in the turn.

    Example: ``(("role", "tool"), ("tool_call_id", 0))``. A list of texts and images is represented
    by the types of its parts.
    """
    shape: list[tuple[str, Any]] = []
    for key, value in reply.items():
        if key == "tool_call_id":
            shape.append((key, indices.get(value, value)))
        elif key != "content":
            # A value that is no text is keyed by its repr in a tuple: no text equals that.
            shape.append((key, value if isinstance(value, str) else (repr(value),)))
        elif isinstance(value, list):
            shape.append((key, tuple(type(part).__name__ for part in parts(value))))
    return tuple(shape)


def _missing_end(suffix: Suffix, completion_ids: Sequence[int], finish: Finish) -> Sequence[int]:
    """Return the part of the end of turn that a completion lacks.

    Example: with the end ``(5, 6)``, ``[1, 2]`` lacks all of it, ``[1, 5]`` lacks ``(6,)`` and
    ``[1, 5, 6]`` nothing. A completion that was cut off lacks all of it, whatever its last token
    is.

    A model may also end an answer as the template does if no message follows: Harmony's
    ``<|return|>`` (`last_end_ids`) in place of ``<|end|>`` (`end_ids`). That lacks nothing: a
    second end would make a context that no server builds.
    """
    end = suffix.end_ids
    if finish is not Finish.stop:
        return end
    # The last token shows that the end is there. The tokens before it cannot: of the end
    # ``\n<|end|>``, the newline may have merged with the text, ``.\n``.
    final_ids = {*end[-1:], *suffix.last_end_ids[-1:]}
    if end and completion_ids[-1] in final_ids:
        return ()
    # The longest beginning of the end that the completion ends with.
    for length in range(min(len(end), len(completion_ids)), 0, -1):
        if tuple(completion_ids[-length:]) == tuple(end[:length]):
            return end[length:]
    return end
