"""`role:<name>`: the text that stands for the address of a role's servers."""

from __future__ import annotations

ROLE = "role:"


def role_named(address: object) -> str | None:
    """Return the role of an address; None if it names none. Example: "role:judge" -> "judge"."""
    if not isinstance(address, str) or not address.startswith(ROLE):
        return None
    return address.removeprefix(ROLE)


def is_role(address: object) -> bool:
    """Return True for the address of a role's servers."""
    return role_named(address) is not None
