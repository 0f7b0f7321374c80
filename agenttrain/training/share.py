"""Which rollouts of a group are computed with their common prompt once.

Shapes as in `batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.training.batch import Bundle, Row

CALL_FLOPS = 18e6
"""What one more attention call per layer costs, forward and backward, in the arithmetic that a CPU
core does meanwhile. Measured at hidden size 128, groups of 6 and 90 tokens after the prompt: shared
prompts of 10 / 20 / 40 tokens take 1.08 / 0.92 / 0.83 times as long as prompts that are not."""
TOKEN_FLOPS = 72
"""Of a token in a layer, forward and backward, per squared hidden size: 12 H^2 weights, 2 each
forward and 4 backward."""


def bundle_rows(rows: Sequence[Row], *, share: bool, least: int = 1) -> list[Bundle]:
    """`rows` in bundles: groups that share a prompt of at least `least` tokens, and rows alone.

    Rows of a group whose prompts differ are apart. Bundles stand in the order of their first rows.
    """
    alike: dict[tuple[object, ...], list[Row]] = {}
    for index, row in enumerate(rows):
        long = share and row.trajectory.prompt_length >= least
        alike.setdefault(_prompt(row) if long else (index,), []).append(row)
    return [_bundle(found) for found in alike.values()]


def _prompt(row: Row) -> tuple[object, ...]:
    ids = row.token_ids_T[: row.trajectory.prompt_length]
    return row.rollout.group_id, *ids.tolist()


def _bundle(rows: Sequence[Row]) -> Bundle:
    by_length = tuple(sorted(rows, key=lambda row: -row.length))
    return Bundle(by_length, rows[0].trajectory.prompt_length if len(rows) > 1 else 0)


def least_prompt(hidden_size: int) -> int:
    """Tokens of the shortest prompt that is worth sharing.

    Each rollout that does not compute its prompt saves its tokens in every layer, and costs an
    attention call of its own there. Example: 4 tokens at hidden size 256, 62 at 64.
    """
    return 1 + int(CALL_FLOPS / (TOKEN_FLOPS * hidden_size**2))
