"""`ranking`: a language model compares the rollouts of a group, over a chat API.

The reward is relative: it says how a rollout did among those of its group, not how good it is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from agenttrain.rewards.builtin.answers import final_text
from agenttrain.rewards.builtin.judge import as_lines, last_question
from agenttrain.rewards.function import RewardUnavailable
from agenttrain.types import Rollout
from agenttrain.utils.chat_api import ChatApi, ChatBackend, ChatUnavailable, Transient
from agenttrain.utils.data_fields import Data, DataWhere
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.role_names import is_role
from agenttrain.utils.text_templates import TextTemplate

GROUP_FIELDS = ("question", "answers", "count", "instructions")
"""Fields of a prompt that `Ranking` fills in itself; all others are columns of the row."""
BYTES_PER_TOKEN = 3
"""Bytes of UTF-8 that count as one token: the judge's tokenizer is not here. SmolLM2's tokens have
2.8 to 3.8 of them in text and code, and 1.5 in lists of numbers."""
LEAST_TOKENS = 16
"""Tokens of each rollout without which a comparison makes no sense."""
FRAME_TOKENS = 28
"""Tokens of the tags around a rollout, and of the mark where text was left out."""

# Not \d+: Python refuses to read a number of more than 4,300 digits. A text may follow, but none
# that shows that the ranking or the scores were read only in part.
RANKING = re.compile(
    r"\s*(?P<ranking>\d{1,4}(?:\s*[>=]\s*\d{1,4})*)(?!\.?\d|[^\S\n]*\d|\s*[>=])", re.ASCII
)
SCORE = r"\d{1,4}\s*[=:]\s*-?\d{1,20}(?:\.\d{1,20})?"
SCORES = re.compile(
    rf"\s*(?P<scores>{SCORE}(?:[^\S\n]*[,;\n]\s*{SCORE})*)(?!\.?\d|[^\S\n]*\d|\s*[=:/])", re.ASCII
)
DECORATION = re.compile(r"(?i)\banswers?\b|\\boxed|[*_`#$\[\](){}\"']")


class ReplyForm(StrEnum):
    """Form of the judge's reply."""

    ranking = "ranking"
    """The numbers from best to worst: ``Ranking: 2 > 1 = 3``."""
    scores = "scores"
    """A score for each: ``Scores: 1=7, 2=9.5, 3=7``."""


class Show(StrEnum):
    """Part of a rollout that the judge sees."""

    conversation = "conversation"
    """All messages after the prompt, with calls and replies."""
    final = "final"
    """The last message of the assistant."""


class Ranking:
    """A model's comparison of all rollouts of a group in one request, as rewards in [0, 1].

    With `reply` ``ranking``, the reward is the share of the group's other rollouts that it beats,
    where a tie counts half: ``2 > 1 = 3`` gives 0.25, 1 and 0.25. With ``scores``, the lowest score
    of the group becomes 0 and the highest 1; equal ones are 0.5. Rollouts that look the same are
    shown once and get the same reward. A group of one has nothing to compare: None.

    `show` is the part of a rollout that is shown: its `conversation`, or the `final` message. It is
    cut to `max_rollout_tokens` in the middle, further if a request is over `max_request_tokens`.

    `prompt` has `answers` (all rollouts, each in a tag with its number), and may have columns of
    the row, `question` (the last user message of the prompt), `count` and `instructions` (the form
    of the reply). Rollouts are shown in an order that depends on `seed`, the group and the try.

    A reply that lacks a rollout, repeats one or cannot be read is no result: `retries` more orders
    are asked for, then it raises RewardUnavailable for the group. Failures of the server are tried
    again as often. Raises ValueError for a key or an address that the server refuses.
    """

    def __init__(
        self,
        *,
        # Data is never reached over a network: of addresses, only ``role:<name>`` is data.
        url: Annotated[str | ChatBackend, DataWhere(is_role)],
        model: Data[str | None] = None,
        prompt: Data[str],
        system: Data[str | None] = None,
        reply: Data[str] = ReplyForm.ranking,
        low: Data[float] = 0.0,
        high: Data[float] = 10.0,
        show: Data[str] = Show.conversation,
        max_rollout_tokens: Data[int] = 1024,
        max_request_tokens: Data[int] = 16384,
        seed: Data[int] = 0,
        api_key_env: str | None = None,
        retries: Data[int] = 4,
        backoff_s: Data[float] = 1.0,
        request_timeout_s: Data[float] = 120.0,
        temperature: Data[float] = 0.0,
        max_tokens: Data[int] = 1024,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the settings; those of the judgement are explained at the class.

        `url` is the address of a chat API, ``role:<name>`` for servers of the run, or a backend.
        With `reply` ``scores``, scores are from `low` to `high`. The others are for requests, see
        ChatApi. `extra` has further fields of a request's body, and `max_tokens` limits a reply.
        """
        self._api = ChatApi(
            url=url,
            model=model,
            api_key_env=api_key_env,
            retries=retries,
            backoff_s=backoff_s,
            request_timeout_s=request_timeout_s,
            temperature=temperature,
            max_tokens=max_tokens,
            extra=extra,
        )
        for name, value, choices in (("reply", reply, [*ReplyForm]), ("show", show, [*Show])):
            if value not in choices:
                hint = did_you_mean(value, choices)
                raise ValueError(f"{name}={value}: expected {' or '.join(choices)}{hint}")
        if not low < high:
            raise ValueError(f"low={low}: must be below high={high}")
        if max_rollout_tokens < LEAST_TOKENS:
            bound = f"must be at least {LEAST_TOKENS}"
            raise ValueError(f"max_rollout_tokens={max_rollout_tokens}: {bound}")
        if max_request_tokens < max_rollout_tokens:
            bound = f"must be at least max_rollout_tokens={max_rollout_tokens}"
            raise ValueError(f"max_request_tokens={max_request_tokens}: {bound}")
        self._prompt, self._system = TextTemplate(prompt, "prompt"), system
        if "answers" not in self._prompt.fields:
            raise ValueError("prompt: has no {{ answers }}, where the rollouts stand; add it")
        self.columns = tuple(name for name in self._prompt.fields if name not in GROUP_FIELDS)
        self._reply, self._low, self._high = ReplyForm(reply), low, high
        self._shows_all = show == Show.conversation
        self._max_rollout_tokens, self._max_request_tokens = max_rollout_tokens, max_request_tokens
        self._seed, self._retries = seed, retries

    def __call__(self, rollouts: Sequence[Rollout], **columns: Any) -> Sequence[float | None]:
        """Return a reward for each rollout of a group; None for a group of one."""
        if len(rollouts) == 1:
            return [None]
        texts = [self._shown_text(rollout) for rollout in rollouts]
        # Sorted: the request does not depend on the order of the rollouts.
        distinct = sorted(set(texts))
        if len(distinct) == 1:
            return [0.5] * len(rollouts)
        fields = {**columns, "question": last_question(rollouts[0]), "count": len(distinct)}
        values = self._compare(distinct, fields, rollouts[0].group_id)
        value_of = dict(zip(distinct, values, strict=True))
        group_values = [value_of[text] for text in texts]
        is_ranking = self._reply is ReplyForm.ranking
        return shares_beaten(group_values) if is_ranking else scaled_to_unit(group_values)

    def _shown_text(self, rollout: Rollout) -> str:
        """Return the part of a rollout that the judge sees, uncut."""
        if not self._shows_all:
            return final_text(rollout)
        return as_lines(m for t in rollout.trajectories for m in t.added_messages)

    def _compare(
        self, texts: Sequence[str], fields: Mapping[str, Any], group_id: str
    ) -> list[float]:
        """Return the judge's value for each of `texts`, higher for better ones.

        Raises RewardUnavailable if no try gets a reply that can be read.
        """
        fields = {**fields, "instructions": self._instructions(len(texts))}
        cut_texts = self._fit(texts, fields)
        order = list(range(len(texts)))
        random.Random(f"{self._seed} {group_id}").shuffle(order)
        reply = problem = ""
        for _ in range(self._retries + 1):
            # Another order at each try: the same request would get the same reply at temperature 0.
            order = [*order[1:], order[0]]
            answers = "\n\n".join(
                f'<answer number="{number}">\n{cut_texts[index]}\n</answer>'
                for number, index in enumerate(order, start=1)
            )
            try:
                reply = self._api.ask(self._messages({**fields, "answers": answers}), str)
                values = self._read(reply, len(texts))
            except ChatUnavailable as error:
                raise RewardUnavailable(str(error)) from error
            except Transient as error:
                problem = str(error)
                continue
            # `values[n]` is that of the text shown at place n, whose index is `order[n]`.
            value_at = dict(zip(order, values, strict=True))
            return [value_at[index] for index in range(len(texts))]
        raise RewardUnavailable(
            f"{problem}, in the reply {reply[-300:]!r} (after {self._retries + 1} tries)"
        )

    def _instructions(self, count: int) -> str:
        """Return the text that asks for the form of the reply."""
        if self._reply is ReplyForm.ranking:
            return (
                f"Rank all {count} answers from best to worst. Think briefly, then end with one "
                'line such as "Ranking: 2 > 1 = 3", where = joins equally good ones.'
            )
        return (
            f"Score each of the {count} answers from {self._low:g} to {self._high:g}. Think "
            'briefly, then end with one line such as "Scores: 1=7, 2=9.5, 3=7".'
        )

    def _messages(self, fields: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages of a request."""
        messages = [{"role": "user", "content": self._prompt.fill(fields)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def _fit(self, texts: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
        """Cut the texts so that the request fits into its tokens; raise RewardUnavailable."""
        texts = [escape_tags(text) for text in texts]
        frame = self._messages({**fields, "answers": ""})
        frame_tokens = sum(tokens_of(message["content"]) for message in frame)
        frame_tokens += FRAME_TOKENS * len(texts)
        limit = fair_limit(
            [tokens_of(text) for text in texts],
            self._max_request_tokens - frame_tokens,
            self._max_rollout_tokens,
        )
        if limit < LEAST_TOKENS:
            raise RewardUnavailable(
                f"max_request_tokens={self._max_request_tokens}: {frame_tokens} of them are the "
                f"prompt and the frame of {len(texts)} rollouts, and what is left is too little to "
                "compare"
            )
        return [cut_middle(text, limit) for text in texts]

    def _read(self, reply: str, count: int) -> list[float]:
        """Return the value that a reply gives to each of the answers 1 to `count`, in that order.

        Raises Transient, so that the judge is asked again, if the reply cannot be read, has other
        numbers, or has a score out of range.
        """
        is_ranking = self._reply is ReplyForm.ranking
        value_by_number = read_ranking(reply) if is_ranking else read_scores(reply)
        numbers = sorted(value_by_number)
        if numbers != list(range(1, count + 1)):
            raise Transient(f"{self._reply} of {numbers}, and there are 1 to {count}")
        values = [value_by_number[number] for number in numbers]
        if not is_ranking and not all(self._low <= value <= self._high for value in values):
            raise Transient(f"a score is not in [{self._low:g}, {self._high:g}]")
        return values


def shares_beaten(values: Sequence[float]) -> list[float]:
    """Return for each value the share of the others that are lower; equal ones count half.

    Example: [2, 3, 2] -> [0.25, 1.0, 0.25]. The mean is 0.5.
    """
    other_count = len(values) - 1
    return [
        (sum(other < value for other in values) + (values.count(value) - 1) / 2) / other_count
        for value in values
    ]


def scaled_to_unit(values: Sequence[float]) -> list[float]:
    """Return the values scaled so that the lowest is 0 and the highest 1; 0.5 if all are equal."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]


def read_ranking(reply: str) -> dict[int, float]:
    """Return number -> value, 0 for the best place and less for later ones; raise Transient.

    Example: "Ranking: 2 > 1 = 3" -> {2: 0, 1: -1, 3: -1}
    """
    match = RANKING.match(_text_after(reply, "ranking"))
    if match is None:
        raise Transient("no ranking")
    values: dict[int, float] = {}
    for place, tied in enumerate(match["ranking"].split(">")):
        for number in map(int, tied.split("=")):
            if number in values:
                raise Transient(f"a ranking with {number} twice")
            values[number] = -float(place)
    return values


def read_scores(reply: str) -> dict[int, float]:
    """Return number -> score; raise Transient. Example: "Scores: 1=7, 2=9.5" -> {1: 7, 2: 9.5}."""
    match = SCORES.match(_text_after(reply, "scores"))
    if match is None:
        raise Transient("no scores")
    values: dict[int, float] = {}
    for entry in re.split(r"[,;\n]", match["scores"]):
        number, value = re.split("[=:]", entry)
        if int(number) in values:
            raise Transient(f"scores with {number.strip()} twice")
        values[int(number)] = float(value)
    return values


def _text_after(reply: str, title: str) -> str:
    """Return the text after the last ``<title>:``, or "" if there is none.

    Each mark around a number and each word "answer" is a blank: of ``Ranking: **Answer [2]** > 1``
    it returns the same as of ``Ranking: 2 > 1``, but for blanks.
    """
    _, *after_titles = re.split(rf"(?i){title}[^:\n\d]{{0,60}}:", reply)
    return DECORATION.sub(" ", after_titles[-1] if after_titles else "")


def tokens_of(text: str) -> int:
    """Return the number of tokens that a text counts as, rounded up."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def fair_limit(lengths: Sequence[int], total: int, most: int) -> int:
    """Return the largest limit, up to `most`, under which lengths cut to it sum to `total` or less.

    Short texts leave their room to longer ones: of [10, 50, 90] and a total of 100, 45.
    """
    remaining = total
    for place, length in enumerate(sorted(lengths)):  # the shortest text first
        share = remaining // (len(lengths) - place)  # of each text that is left
        if min(length, most) > share:
            return min(share, most)
        remaining -= min(length, most)
    return most  # all texts fit, or are cut to `most`


def cut_middle(text: str, tokens: int) -> str:
    """Return the text, or its beginning and twice as much of its end, with a mark between.

    A text of up to `tokens` tokens (`tokens_of`) is not cut.
    """
    if tokens_of(text) <= tokens:
        return text
    raw, room = text.encode(), tokens * BYTES_PER_TOKEN
    head = raw[: room // 3].decode(errors="ignore")
    tail = raw[len(raw) - (room - room // 3) :].decode(errors="ignore")
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[{left_out} characters are left out here]\n{tail}"


def escape_tags(text: str) -> str:
    """Return a text that cannot end its own answer, or begin another one."""
    return re.sub(r"(?i)<(?=\s*/?\s*answer)", "&lt;", text)
