"""The answer that a rollout hands in, and signs of answers that earn a reward without the work.

The shares of these signs are metrics (`answers/<sign>`), and `guards.reward_hacking` watches them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from agenttrain.types import MAIN, Rollout, StopReason
from agenttrain.utils.content import parts, text_of

COPIED_CHARACTERS = 80
"""Length of a passage that two texts do not share by chance. Shorter answers, such as a number that
a tool returned, are no copies."""
PASSAGES = 64
"""Most passages of one answer that are looked for in the tools' texts."""


def answer_of(rollout: Rollout) -> str | None:
    """Return the text that a rollout hands in; None if it ended without handing anything in.

    It is the last message of a rollout that ended as `completed`, or the arguments of the call that
    ended it as `stop_tool`: ``final_answer(answer="7")`` hands in ``7``.
    """
    if rollout.stop_reason is StopReason.completed:
        main = next(t for t in reversed(rollout.trajectories) if t.role == MAIN)
        answers = [m for m in main.added_messages if m["role"] == "assistant"]
        content = answers[-1].get("content") if answers else None
        return text_of(parts(content)) if content else ""
    if rollout.stop_reason is StopReason.stop_tool and rollout.tool_results:
        arguments = rollout.tool_results[-1].call.arguments
        values = arguments.values() if isinstance(arguments, Mapping) else [arguments]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return "\n".join(texts) if texts else None
    return None


def is_empty(answer: str | None) -> bool:
    """Return True for an answer that was handed in without any text."""
    return answer is not None and not answer.strip()


def is_copied(rollout: Rollout, answer: str | None) -> bool:
    """Return True if at least half of the answer's passages stand word for word in a tool's text.

    A passage has COPIED_CHARACTERS characters; an answer shorter than one is no copy.
    """
    if answer is None or len(answer) < COPIED_CHARACTERS:
        return False
    stride = max(COPIED_CHARACTERS // 2, len(answer) // PASSAGES)
    starts = range(0, len(answer) - COPIED_CHARACTERS + 1, stride)
    passages = [answer[start : start + COPIED_CHARACTERS] for start in starts]
    # A stop tool may return the answer itself, as `final_answer` does.
    texts = [result.content for result in rollout.tool_results if not result.stop]
    copied = sum(any(passage in text for text in texts) for passage in passages)
    return 2 * copied >= len(passages)


def answer_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the shares of rollouts with an empty, a copied, and the most frequent answer.

    Copied: word for word from what a tool returned in the same rollout (`is_copied`). The most
    frequent answer is that among answers with a text. All are shares of all rollouts; one that
    hands nothing in counts for none of them.

    Example: of four rollouts that hand in ``7``, ``7``, ``""`` and ``8``, a quarter is empty, and
    the most frequent answer is that of a half.
    """
    if not rollouts:
        return dict.fromkeys(("answers/empty", "answers/copied", "answers/repeated"), math.nan)
    answers = [answer_of(rollout) for rollout in rollouts]
    counts = Counter(answer for answer in answers if answer is not None and answer.strip())
    most_common = counts.most_common(1)
    copied = [is_copied(rollout, a) for rollout, a in zip(rollouts, answers, strict=True)]
    return {
        "answers/empty": fmean(map(is_empty, answers)),
        "answers/copied": fmean(copied),
        "answers/repeated": most_common[0][1] / len(rollouts) if most_common else 0.0,
    }
