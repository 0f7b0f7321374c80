"""Seeds that depend on the purpose of a random draw and never on its time."""

from __future__ import annotations

import hashlib


def seeds_of(rollout_id: str, seed: int) -> tuple[int, int]:
    """Return a rollout's own seed and its group's, from its id and the run's seed.

    Both are derived from the same parts as the id. ``train-3-r1-2-0`` is sample 0 of the task at
    place 2 (from 0) in the first extra round ("r1") of step 3. With the run's seed 7, its group has
    the seed ``derive_seed(7, "train", 3, "r1", 2)``. Raises ValueError for an id that no run makes.
    """
    *request_name, place, sample = rollout_id.split("-")
    # Numbers and texts as in the request's `seed_path`: a seed of 3 differs from one of "3".
    parts = [int(part) if part.isdecimal() else part for part in request_name]
    group_path = (seed, *parts, int(place))
    # `BatchRequest.rollouts` ends the path of every rollout with a 0, which is not in its id.
    return derive_seed(*group_path, int(sample), 0), derive_seed(*group_path)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for a path such as (run seed, step, place, sample, turn).

    Neighbouring paths give unrelated seeds, and ("a", 1) differs from ("a1",).
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
