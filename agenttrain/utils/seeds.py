"""Seeds that depend on the purpose of a random draw and never on its time."""

from __future__ import annotations

import hashlib


def seeds_of(rollout_id: str, seed: int) -> tuple[int, int]:
    """Return a rollout's own seed and its group's, from its id and the run's seed.

    An id is the path of both: ``train-3-r1-2-0`` is sample 0 of the 3rd task (number 2) of the
    first extra round of step 3. Raises ValueError for an id that no run makes.
    """
    *path, occurrence, sample = rollout_id.split("-")
    parts = [int(part) if part.isdecimal() else part for part in path]
    group = (seed, *parts, int(occurrence))
    # The 0 ends every rollout's path: see `BatchRequest.rollouts`.
    return derive_seed(*group, int(sample), 0), derive_seed(*group)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for a path such as (run seed, step, occurrence, sample, turn).

    Neighbouring paths give unrelated seeds, and ("a", 1) differs from ("a1",).
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
