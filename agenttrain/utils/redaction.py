"""Secrets in addresses, hidden wherever a text is printed, recorded or sent elsewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
_USER = re.compile(r"(\w://)([^/\s?#]+)@")
"""``http://me:s3cret@``: the end of the scheme, and the credentials."""
_NAMED = re.compile(r"\$(\w+|\{\w+\})[:.,;!)\]}]*")
"""A value that is the name of a variable, ``$KEY`` or ``${KEY}``, and no secret."""
_PARAMETER = re.compile(
    r"""
    (?P<name>
        (?:[?&;#]|\\u0026|&amp;|%3F|%26|%23)       # also as JSON, HTML and inside another address
        (?:
            [\w.\-\[\]]{0,64}
            (?:token|secret|passw|pwd|auth|credential|signature|session|jwt|bearer)
            [\w.\-\[\]]{0,64}
            | [\w.\-]{0,64}key(?:id)? | sig | sas | pass | code
        )
        (?:=|%3D)
    )
    (?P<value>(?:(?!\\u0026)[^\s&\#'"<>])*)
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Matched in linear time, for models and tools write the texts: hence the bounds of names."""
TYPE_AGAIN = f"type the secrets again in place of {HIDDEN}"
_VARIABLE = re.compile(r"(?<!\$)\$(\w|\{)")
"""The beginning of a variable in a text: ``Bearer $TOKEN``. ``$$`` is a dollar."""
# Settings whose values are hidden, alone and with a mapping in Hydra's notation; an item of such a
# mapping.
_SECTION = re.compile(r"\b(env|headers)\b")
_SECTION_TEXT = re.compile(r"(\b(?:env|headers)[\"']?\s*:\s*)(\{[^{}]*\})")
_ITEM = re.compile(r"""([{,]\s*[^:,{}]+:\s*)("[^"]*"|'[^']*'|[^,}]*)""")
_PUNCTUATION = ":.,;!)]}"
"""Characters that may follow an address in a text."""


def is_web_address(url: object) -> bool:
    """Return True for the whole address of a server: ``http`` or ``https``, and a host."""
    try:
        parts = urlsplit(str(url))
    except ValueError:  # such as http://[::1
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def hide_secrets(text: str) -> str:
    """Hide passwords, tokens and keys in the addresses of a text, except ``$NAME`` of variables.

    Examples: ``http://me:s3cret@host/mcp`` -> ``http://***@host/mcp``; ``https://host/mcp?token=abc``
    -> ``https://host/mcp?token=***``; ``http://me:$SECRET@host`` and ``?api_key=${KEY}`` stay.
    A secret in the path, as in ``https://host/hooks/s3cret``, has no name and is not recognised.
    """
    if "://" in text:
        text = _USER.sub(_without_user, text)
    may_have_parameters = "=" in text or "%3" in text  # %3D is an encoded =
    return _PARAMETER.sub(_without_value, text) if may_have_parameters else text


def _without_user(match: re.Match[str]) -> str:
    return match[0] if names_variable(match[2]) else f"{match[1]}{HIDDEN}@"


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    secret = value.rstrip(_PUNCTUATION)
    if not secret or _NAMED.fullmatch(value):
        return match[0]
    return f"{name}{HIDDEN}{value[len(secret) :]}"


def shell_command(arguments: Sequence[str]) -> str:
    """Return the arguments of agenttrain as a shell command to print, without secrets.

    A command that lacks a secret ends with a comment that says so: it does not run as it is.

    Example: ``["eval", "model.path=a b"]`` -> ``agenttrain eval 'model.path=a b'``.
    """
    shown = hide_in_words(arguments)
    command = shlex.join(["agenttrain", *shown])
    return command if shown == list(arguments) else f"{command}  # {TYPE_AGAIN}"


def hide_in_words(arguments: Sequence[str]) -> list[str]:
    """Hide secrets in arguments: in addresses, and the values of `env` and `headers`.

    Examples: ``tools.mcp.headers.x-key=s3cret`` -> ``tools.mcp.headers.x-key=***``;
    ``tools.mcp.headers={x-key: $KEY}`` stays.
    """
    return [_hide_in_word(hide_secrets(word)) for word in arguments]


def _hide_in_word(word: str) -> str:
    """Hide the values of `env` and `headers` in an argument ``key=value``.

    Example: ``tools.mcp.env.TOKEN=abc`` -> ``tools.mcp.env.TOKEN=***``.
    """
    key, equals, value = word.partition("=")
    if not equals or not _SECTION.search(word):
        return word
    # Below a section and a name, such as tools.mcp: the name of an environment may be env.
    path = key.split(".")[2:]
    if "headers" in path[:-1] or "env" in path[:-1]:  # tools.mcp.env.TOKEN=abc
        # ``$TOKEN`` names a variable, and the secret is not in the argument.
        return word if _VARIABLE.search(value) else f"{key}={HIDDEN}"
    if path and path[-1] in ("headers", "env") and value.startswith("{"):
        return f"{key}={_hide_in_mapping(value)}"  # tools.mcp.env={TOKEN: abc}
    # A value with such a section in it, if any: tools.mcp={headers: {x-key: s3cret}}.
    return _SECTION_TEXT.sub(lambda match: match[1] + _hide_in_mapping(match[2]), word)


def _hide_in_mapping(text: str) -> str:
    """Hide the values of a mapping in Hydra's notation: ``{x-key: s3cret}``."""
    return _ITEM.sub(
        lambda match: match[0] if _VARIABLE.search(match[2]) else f"{match[1]}{HIDDEN}", text
    )


def names_variable(credentials: str) -> bool:
    """Return True if the secret of ``name:secret``, or ``secret``, is a variable: ``$NAME``."""
    name, _, secret = credentials.partition(":")
    return _NAMED.fullmatch(secret or name) is not None


def hide_in_settings(settings: Any) -> Any:
    """Hide secrets in the addresses of settings, and the values of `env` and `headers`.

    Texts that name variables stay, such as ``Bearer $TOKEN``; the names of hidden values stay too.

    Example: ``{"headers": {"x-key": "s3cret"}}`` -> ``{"headers": {"x-key": "***"}}``.
    """
    if isinstance(settings, Mapping):
        hidden = {str(key): hide_in_settings(value) for key, value in settings.items()}
        for section in (hidden.get(name) for name in ("env", "headers")):
            # A part of the run may be called env, an environment say: its `_target_` tells.
            if isinstance(section, dict) and "_target_" not in section:
                for name, value in section.items():
                    # ``$$`` is a literal dollar.
                    if not re.search(r"\$(\w|\{)", str(value).replace("$$", "")):
                        section[name] = HIDDEN
        return hidden
    if isinstance(settings, list | tuple):
        return [hide_in_settings(value) for value in settings]
    return hide_secrets(settings) if isinstance(settings, str) else settings
