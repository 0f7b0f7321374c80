"""Seeds that depend on what a draw is for and never on when it happens."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (run seed, step, occurrence, sample, turn).

    Neighbouring paths give unrelated seeds, and ("a", 1) differs from ("a1",).
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
