"""Routing: which server gets a request.

All turns of a session go to the same server, whose prefix cache holds the earlier turns, unless it
is much busier than the other servers. The order is a hash, so no table of sessions is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import ceil

SLACK = 1.25
"""Most requests of a server as a multiple of the mean."""
LEAST = 8
"""Requests that a server may have in any case: so few gain nothing on another server."""


def preferred(session: str, servers: Iterable[int]) -> list[int]:
    """Return a session's servers in order of preference (rendezvous hashing)."""

    def weight(server: int) -> bytes:
        return blake2b(f"{session}/{server}".encode(), digest_size=8).digest()

    return sorted(servers, key=weight)


def choose(session: str, loads: Mapping[int, int]) -> int:
    """Return the first preferred server below the bound. `loads`: its requests, by server.

    Example: loads {0: 9, 1: 1}: the new request makes 11, 5.5 a server; the bound is
    max(8, ceil(1.25 x 5.5)) = 8, so every session goes to server 1.
    """
    bound = max(LEAST, ceil(SLACK * (sum(loads.values()) + 1) / len(loads)))
    return next(server for server in preferred(session, loads) if loads[server] < bound)
