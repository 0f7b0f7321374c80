"""The user's signature of what a run writes, by a key that only the user has."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

KEY_FILE = "AGENTTRAIN_KEY"
"""Environment variable with the file of the user's key, if it is not in the home folder."""


def sign(value: Any, *, make_key: bool = True) -> str | None:
    """Return the user's signature of JSON data; None without a key, which `make_key` may make."""
    key = _key(make=make_key)
    if key is None:
        return None
    text = json.dumps(value, sort_keys=True, default=str)
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def verifies(value: Any, signature: object) -> bool:
    """Return True if `signature` is the user's signature of JSON data."""
    if not isinstance(signature, str):
        return False
    own_signature = sign(value, make_key=False)
    return own_signature is not None and hmac.compare_digest(own_signature, signature)


def _key(*, make: bool) -> bytes | None:
    """Return the user's key; with `make`, a missing one is made first.

    None if its file is missing, not the user's own, or writable for others, who could replace the
    key by one that they know.
    """
    key_file = os.environ.get(KEY_FILE)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(key_file) if key_file else Path(home) / "agenttrain" / "key"
    with suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written under another name: a file with the name of the key is complete.
            part = path.with_name(f".{path.name}.{os.getpid()}")
            with suppress(FileExistsError):  # another thread writes the part
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(32))
                # Not a rename: if two runs start together, the key of the first one stays.
                with suppress(FileExistsError):
                    os.link(part, path)
                part.unlink()
        # The user's own, and not writable for the group or for others. Reading is left to the user.
        status = path.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            key = path.read_bytes()
            return key if len(key) >= 32 else None
    return None
