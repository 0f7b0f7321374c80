"""`TokenGuard`: middleware that requires the server's token on every route but `GET /health`.

vLLM's own --api-key protects fewer: anybody could pause the server and replace its weights.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN = "AGENTTRAIN_SERVER_TOKEN"
"""Environment variable with the token of a server."""
HOST = "AGENTTRAIN_SERVER_HOST"
"""Environment variable with the address that a server listens on."""
OPEN = ("/health",)
"""Paths that need no token."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TokenGuard:
    """ASGI middleware around all routes: 401 without ``Authorization: Bearer <token>``."""

    def __init__(self, app: App) -> None:
        """Take the token from the environment; raises KeyError without one."""
        self.app = app
        self.expected = f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request with the token on to the server, and refuse any other."""
        # A "lifespan" scope is no request: with it the server tells the app to start and to end.
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # "policy violation"
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = b'{"error": "this server belongs to a run; its token is missing"}'
            await send({"type": "http.response.body", "body": body})

    def _is_allowed(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN:
            return True
        tokens = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(tokens) == 1 and hmac.compare_digest(tokens[0], self.expected)
