"""Signs that a reward rises for another reason than a better policy.

A sign is a property of a rollout: it hands in nothing, or a copy of a tool's text, or the answer
that many other tasks get, or it ended for a reason or with a length that the run did not know. It
is an alarm if three things come together since the steps in which it was rarest: its share of the
rollouts rises by `limit`, the reward rises by more than noise, and rollouts with the sign are
rewarded at least as well as those without it. A policy that learns drops most of these signs, or
keeps them without a reward.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agenttrain.health.config import RewardHacking
from agenttrain.tracking.answers import answer_of, is_copied, is_empty
from agenttrain.types import Rollout

REWARD_ERRORS = 2.0
"""Standard errors of a difference by which the training reward has to rise."""
ERRORS = 3.0
"""Standard errors by which the share of a sign has to rise, or a held-out reward to fall. They are
over groups: an answer that is right for a quarter of a step's tasks is no sign."""
NEW = 0.05
"""Largest earlier share of a stop reason that is new."""
LENGTH_FACTOR = 1.5
"""Factor by which a length may leave the range of the first steps."""
LEAST_TASKS = 3
"""Tasks that show a sign before it counts: one group of a hard task may end alike."""
HELD_OUT = "held_out"
"""Sign of an evaluation that falls."""
SUSPECTS = 3
"""Rollouts that an alarm names."""
ANSWERS = 3
"""Most frequent answers of a step that are remembered."""
ANSWER_CHARACTERS = 200
"""Characters of an answer that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Mean over groups of rollouts, with its uncertainty."""

    value: float
    error2: float
    """Square of the standard error; infinite for a single group."""

    def rises_to(self, later: Mean, errors: float) -> bool:
        """Return True if `later` is higher by more than `errors` standard errors."""
        return later.value - self.value > errors * math.sqrt(self.error2 + later.error2)


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of the groups' values. Of one group the error is infinite."""
    if not values:
        return Mean(value=math.nan, error2=math.inf)
    count = len(values)
    variance = statistics.variance(values) if count > 1 else math.inf
    return Mean(value=statistics.fmean(values), error2=variance / count)


@dataclass(slots=True)
class Sign:
    """The rollouts of a step that have one sign of reward hacking, such as an empty answer."""

    count: int = 0
    """Number of the rollouts."""
    reward: float = 0.0
    """Sum of their rewards."""
    shares: dict[str, float] = field(default_factory=dict)
    """Group id -> share of the group's rollouts that have the sign; groups without any are left
    out."""
    tasks: list[str] = field(default_factory=list)
    """Ids of their tasks, each once."""
    suspects: list[str] = field(default_factory=list)
    """Ids of the best-rewarded ones, each of another task."""


@dataclass(slots=True)
class Tally:
    """The rollouts of a step that have a reward, and which of them show a sign of reward hacking.

    A sign is a property of a rollout that may betray hacking: it hands in nothing (``empty``), or
    the answer of many other tasks (``answer:42``).
    """

    step: int
    count: int = 0
    """Number of the rollouts, with a sign or without."""
    reward: float = 0.0
    """Sum of their rewards."""
    group_rewards: dict[str, float] = field(default_factory=dict)
    """Mean reward of each group, by its id."""
    signs: dict[str, Sign] = field(default_factory=dict)
    """Name of the sign -> the rollouts that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The steps in which a sign was rarest, up to `step`."""

    step: int
    share: Mean
    """Share of the rollouts that had the sign."""
    reward: Mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A finding of a step, and the rollouts to look at."""

    step: int
    signs: tuple[str, ...]
    """Signs that are new in this alarm. Rollouts hand in nothing (``empty``), a tool's text
    (``copied``) or the same answer for many tasks (``answer:<text>``); are longer or shorter than
    at first (``long``, ``short``); or end for a reason that is new to the run (``stop:<reason>``).
    ``held_out``: the reward of an evaluation falls as that of training rises."""
    text: str
    """The finding in words, for the warning or error."""
    rollouts: tuple[tuple[int, str], ...]
    """Step and id of each, the best rewarded first."""


@dataclass(slots=True, kw_only=True)
class RewardWatch:
    """Looks for signs in the rollouts of each step, and compares held-out with training rewards.

    `Guards` has one for each source of a mixture. It calls `check_step` after each step and
    `check_evaluation` after each evaluation. It keeps two memories:

    - Of training, the latest steps (`tallies`) and for each sign its reference: the window of steps
      in which the sign was rarest so far. A step compares the share of each sign, and the reward,
      with those of its reference.
    - Of evaluations, the best one so far (`held_out`), and the training reward at its time.

    A rise has to exceed chance: ERRORS (3) standard errors for a share or an evaluation,
    REWARD_ERRORS (2) for the training reward.
    """

    config: RewardHacking
    tallies: list[Tally] = field(default_factory=list)
    """The latest `config.window` steps."""
    references: dict[str, Reference] = field(default_factory=dict)
    """By sign: its share and the reward in the steps in which it was rarest."""
    lengths: tuple[float, float] | None = None
    """5th and 95th percentile of a rollout's sampled tokens in the first `config.window` steps.
    None: those steps are not over."""
    held_out: dict[str, tuple[Mean, Mean | None]] = field(default_factory=dict)
    """Best evaluation so far by name, with the training reward at its time; None: the first steps
    are not over yet."""
    raised: set[str] = field(default_factory=set)
    """Signs that an alarm has named and that still last: they give no further alarm."""
    _first_lengths: list[int] = field(default_factory=list)
    """Sampled tokens of each rollout so far, until `lengths` is made of them."""

    def check_step(self, step: int, rollouts: Sequence[Rollout]) -> Alarm | None:
        """Add a step. Return an alarm if a sign has become more frequent and pays, else None.

        A sign is a property of rollouts, ``empty`` or ``answer:42``. Its reference is the `window`
        of earlier steps in which it was rarest. A sign that lasts gives no second alarm.
        """
        rewarded = [rollout for rollout in rollouts if rollout.reward is not None]
        if not rewarded:
            return None
        tally = self._count(step, rewarded)
        window = self.config.window
        # Before the step is added: a reference has only steps before those it is compared with.
        if len(self.tallies) == window:
            self._lower_references(tally)
        self.tallies = [*self.tallies, tally][-window:]
        if self.lengths is None:
            self._learn_lengths(rewarded)
        if len(self.tallies) == window:
            # An evaluation from before the first steps is paired with their reward.
            for name, (evaluation, training) in self.held_out.items():
                if training is None:
                    self.held_out[name] = evaluation, _reward(self.tallies)
        rises = {sign: rise for sign in tally.signs if (rise := self._rise(sign)) is not None}
        new_signs = [sign for sign in rises if sign not in self.raised]
        # The largest rise first, and lengths last: they often come along with another sign.
        new_signs.sort(key=lambda sign: (sign in ("long", "short"), -rises[sign]))
        self.raised = {*rises, *(sign for sign in self.raised if self._lasts(sign))}
        return self._alarm(step, new_signs) if new_signs else None

    def _learn_lengths(self, rollouts: Sequence[Rollout]) -> None:
        """Add the lengths of a step, and set `lengths` once the first steps are over."""
        self._first_lengths += [rollout.sampled_length for rollout in rollouts]
        if len(self.tallies) == self.config.window:
            # 19 cuts between twentieths: the first is the 5th percentile, the last the 95th.
            cuts = statistics.quantiles(self._first_lengths, n=20, method="inclusive")
            self.lengths = cuts[0], cuts[-1]
            self._first_lengths = []

    def check_evaluation(self, name: str, rollouts: Sequence[Rollout]) -> Alarm | None:
        """Add an evaluation. Return an alarm if it fell while the training reward rose.

        `name` says which evaluation it is, without the time: ``sampled``.
        """
        means = group_means([r for r in rollouts if r.reward is not None])
        rewards = mean_of([*means.values()])
        if math.isnan(rewards.value):
            return None
        training = _reward(self.tallies) if self.tallies else None
        # The best evaluation before this one, and the training reward at its time. The first
        # evaluation stands for itself.
        best, training_at_best = self.held_out.get(name, (rewards, training))
        if best.value <= rewards.value:
            self.held_out[name] = rewards, training
            self.raised.discard(f"{HELD_OUT}:{name}")
            return None
        if training is None or training_at_best is None or f"{HELD_OUT}:{name}" in self.raised:
            return None
        has_risen = training_at_best.rises_to(training, REWARD_ERRORS)
        # A fall from `best` to `rewards` is a rise from `rewards` to `best`.
        has_fallen = rewards.rises_to(best, ERRORS)
        if not (has_risen and has_fallen):
            return None
        self.raised.add(f"{HELD_OUT}:{name}")
        tally = self.tallies[-1]
        # The best-rewarded rollouts of the latest training step: if its rewards rise for a wrong
        # reason, these show it. All rollouts have the sign "any".
        best_rollouts = tally.signs["any"].suspects
        return Alarm(
            step=tally.step,
            signs=(HELD_OUT,),
            text=f"the held-out reward ({name}) fell from {best.value:.3g} to {rewards.value:.3g} "
            f"as that of training rose from {training_at_best.value:.3g} to {training.value:.3g}",
            rollouts=tuple((tally.step, rollout_id) for rollout_id in best_rollouts),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state that later alarms depend on."""
        return {
            "tallies": [asdict(tally) for tally in self.tallies],
            "references": {sign: asdict(r) for sign, r in self.references.items()},
            "lengths": self.lengths,
            "first_lengths": [*self._first_lengths],
            "held_out": {
                name: [asdict(best), None if training is None else asdict(training)]
                for name, (best, training) in self.held_out.items()
            },
            "raised": sorted(self.raised),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.tallies = [
            Tally(**{**tally, "signs": {name: Sign(**s) for name, s in tally["signs"].items()}})
            for tally in state["tallies"]
        ]
        self.references = {
            sign: Reference(
                step=reference["step"],
                share=Mean(**reference["share"]),
                reward=Mean(**reference["reward"]),
            )
            for sign, reference in state["references"].items()
        }
        self.lengths = None if state["lengths"] is None else tuple(state["lengths"])
        self._first_lengths = list(state["first_lengths"])
        self.held_out = {
            name: (Mean(**best), None if training is None else Mean(**training))
            for name, (best, training) in state["held_out"].items()
        }
        self.raised = set(state["raised"])

    def _count(self, step: int, rollouts: Sequence[Rollout]) -> Tally:
        """Return the tally of a step's rollouts, all of which have a reward.

        It has the count, rewards and shares of each sign (``empty``, ``answer:42``). Of the answers
        only the `ANSWERS` most frequent ones are counted: most answers occur once.
        """
        tally = Tally(step, len(rollouts), group_rewards=group_means(rollouts))
        signs_by_id = {id(rollout): list(self._signs(rollout)) for rollout in rollouts}
        answers = Counter(
            sign for signs in signs_by_id.values() for sign in signs if sign.startswith("answer:")
        )
        frequent = {answer for answer, _ in answers.most_common(ANSWERS)}
        group_sizes = Counter(rollout.group_id for rollout in rollouts)
        # The best rewarded first: a sign's suspects, which an alarm names, are its first rollouts.
        for rollout in sorted(rollouts, key=lambda r: r.reward or 0.0, reverse=True):
            assert rollout.reward is not None
            tally.reward += rollout.reward
            for name in signs_by_id[id(rollout)]:
                if name.startswith("answer:") and name not in frequent:
                    continue
                sign = tally.signs.setdefault(name, Sign())
                sign.count += 1
                sign.reward += rollout.reward
                # This rollout's part of the group's share with the sign: 2 of 8 are 0.25.
                group_id = rollout.group_id
                sign.shares[group_id] = sign.shares.get(group_id, 0.0) + 1 / group_sizes[group_id]
                # One suspect of a task: several of one group would look alike.
                if rollout.task.task_id not in sign.tasks:
                    sign.tasks.append(rollout.task.task_id)
                    sign.suspects = [*sign.suspects, rollout.rollout_id][:SUSPECTS]
        return tally

    def _signs(self, rollout: Rollout) -> Iterator[str]:
        """Yield the signs of a rollout. All rollouts have the sign ``any``.

        Lengths are judged by `lengths`, the usual range of sampled tokens, once it is known.
        """
        answer = answer_of(rollout)
        yield "any"
        yield f"stop:{rollout.stop_reason}"
        if is_empty(answer):
            yield "empty"
        elif answer is not None:
            yield f"answer:{answer.strip()[:ANSWER_CHARACTERS]}"
        if is_copied(rollout, answer):
            yield "copied"
        if self.lengths is not None and rollout.sampled_length > self.lengths[1] * LENGTH_FACTOR:
            yield "long"
        if self.lengths is not None and rollout.sampled_length < self.lengths[0] / LENGTH_FACTOR:
            yield "short"

    def _lower_references(self, tally: Tally) -> None:
        """Make the latest steps (`self.tallies`) the reference of each sign that was never rarer.

        A reference is the window of steps in which a sign was rarest, with its share and the reward
        there. `tally` is the step after the window. It only adds names: a sign that it shows for
        the first time gets this window as reference, with a share of 0.
        """
        recent_signs = {sign for earlier in (*self.tallies, tally) for sign in earlier.signs}
        # Signs with a value, ``answer:42``, are forgotten once no recent step has them, or a run
        # would keep every answer.
        references = {
            sign: reference
            for sign, reference in self.references.items()
            if sign in recent_signs or ":" not in sign
        }
        reward = _reward(self.tallies)
        for sign in {*references, *recent_signs}:
            share = self._share(sign, self.tallies)
            # At an equal share the later window counts.
            if sign not in references or share.value <= references[sign].share.value:
                step = self.tallies[-1].step
                references[sign] = Reference(step=step, share=share, reward=reward)
        self.references = references

    def _rise(self, sign: str) -> float | None:
        """Return the rise of a sign's share since it was rarest, if it is an alarm, else None.

        It is one if all of this holds for the steps after the sign's reference (the window of steps
        in which it was rarest): the share has risen by `limit` and by more than chance, rollouts of
        several tasks show the sign, they are rewarded at least as well as the others, and the mean
        reward of all rollouts has risen too.
        """
        reference = self.references.get(sign)
        if sign == "any" or reference is None:  # all rollouts have "any"
            return None
        # A stop reason is a sign only if it is new to the run.
        if sign.startswith("stop:") and reference.share.value > NEW:
            return None
        since = self._since(reference)
        share = self._share(sign, since)
        rise = share.value - reference.share.value
        sign_by_step = [tally.signs[sign] for tally in since if sign in tally.signs]
        assert self.config.limit is not None, "without a limit nothing is watched"
        # The rise has to be larger than chance explains: ERRORS times its standard error.
        if rise < self.config.limit or not reference.share.rises_to(share, ERRORS):
            return None
        if len({task for step_sign in sign_by_step for task in step_sign.tasks}) < LEAST_TASKS:
            return None
        # Number and summed reward of the rollouts with the sign, then of the others.
        count = sum(step_sign.count for step_sign in sign_by_step)
        reward = sum(step_sign.reward for step_sign in sign_by_step)
        other_count = sum(tally.count for tally in since) - count
        other_reward = sum(tally.reward for tally in since) - reward
        # Rollouts with the sign earn less than the others: nothing rewards it.
        if other_count and reward / count < other_reward / other_count:
            return None
        # Means over groups, of all rollouts.
        has_risen = reference.reward.rises_to(_reward(since), REWARD_ERRORS)
        return rise if has_risen else None

    def _lasts(self, sign: str) -> bool:
        """Return True if a sign that an alarm has named still lasts, whatever its rewards are.

        An alarm came when the share of rollouts with the sign had risen by `config.limit` since its
        reference, the steps in which it was rarest. It lasts until the rise is below half of the
        limit: with the whole one a share near it would end and alarm again and again.
        """
        if sign.startswith(HELD_OUT):  # until `check_evaluation` removes it
            return True
        reference = self.references.get(sign)
        if reference is None:  # an answer of long ago
            return False
        assert self.config.limit is not None, "without a limit nothing is watched"
        share = self._share(sign, self._since(reference))  # in the steps after the reference
        rise = share.value - reference.share.value
        return rise >= self.config.limit / 2

    def _alarm(self, step: int, signs: Sequence[str]) -> Alarm:
        """Return the alarm of a step; the text is about the first of `signs`, and names others."""
        (first, *other_signs), rollouts = signs, []
        reference = self.references[first]
        since = self._since(reference)
        for tally in reversed(since):
            if first in tally.signs:
                rollouts += [(tally.step, name) for name in tally.signs[first].suspects]
        text = (
            f"the reward rose from {reference.reward.value:.3g} to {_reward(since).value:.3g} "
            f"since step {reference.step}, and the share of {self._describe(first)} from "
            f"{reference.share.value:.2f} to {self._share(first, since).value:.2f}"
        )
        if other_signs:
            text += f"; also of {', '.join(map(self._describe, other_signs))}"
        return Alarm(step=step, signs=tuple(signs), text=text, rollouts=tuple(rollouts[:SUSPECTS]))

    def _describe(self, sign: str) -> str:
        """Return a sign in words: ``stop:length`` -> ``rollouts that end as length``.

        The lengths are those from which on a rollout is `long` or `short`, by percentiles of the
        run's first steps.
        """
        kind, _, value = sign.partition(":")
        low, high = self.lengths or (0.0, 0.0)  # None: there is no sign of length either
        return {
            "stop": f"rollouts that end as {value}",
            "empty": "empty answers",
            "answer": f"the answer {value[:60]!r}",
            "copied": "answers copied from a tool's text",
            "long": f"rollouts of over {high * LENGTH_FACTOR:.0f} sampled tokens",
            "short": f"rollouts of under {low / LENGTH_FACTOR:.0f} sampled tokens",
        }[kind]

    def _since(self, reference: Reference) -> list[Tally]:
        """Return the latest steps that came after a reference."""
        return [tally for tally in self.tallies if tally.step > reference.step]

    def _share(self, sign: str, tallies: Sequence[Tally]) -> Mean:
        """Return the share of rollouts with a sign in some steps."""
        shares = [
            tally.signs[sign].shares.get(group, 0.0) if sign in tally.signs else 0.0
            for tally in tallies
            for group in tally.group_rewards
        ]
        return mean_of(shares)


def _reward(tallies: Sequence[Tally]) -> Mean:
    """Return the mean reward of some steps."""
    return mean_of([reward for tally in tallies for reward in tally.group_rewards.values()])


def group_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean reward of each group, by its id; all rollouts have a reward."""
    groups: dict[str, list[float]] = {}
    for rollout in rollouts:
        assert rollout.reward is not None
        groups.setdefault(rollout.group_id, []).append(rollout.reward)
    return {group_id: statistics.fmean(rewards) for group_id, rewards in groups.items()}
