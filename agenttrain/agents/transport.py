"""Requests of agents in the run's own process: they reach the endpoint without a socket."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import httpx
from starlette.types import ASGIApp


class EndpointTransport(httpx.AsyncBaseTransport):
    """Carries requests to a rollout's address to the endpoint, and all others over the network.

    A socket, its parser and a connection for each rollout cost more CPU than the endpoint itself. A
    request without a key gets the rollout's key, which is sent to no other address.
    """

    def __init__(self, app: ASGIApp, url: str, key: str) -> None:
        """`url` is the address of the rollout."""
        self._url, self._key = httpx.URL(url), key
        self._endpoint = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._network: httpx.AsyncHTTPTransport | None = None

    def reaches(self, url: httpx.URL) -> bool:
        """Return True for an address of the endpoint."""
        endpoint = self._url
        return (url.scheme, url.host, url.port) == (endpoint.scheme, endpoint.host, endpoint.port)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its response."""
        if self.reaches(request.url):
            headers = request.headers
            if "authorization" not in headers and "x-api-key" not in headers:
                headers["authorization"] = f"Bearer {self._key}"
            return await self._endpoint.handle_async_request(request)
        if self._network is None:  # it loads certificates, which takes longer than a rollout
            self._network = httpx.AsyncHTTPTransport()
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections to other addresses."""
        if self._network is not None:
            await self._network.aclose()


class EndpointClient(httpx.AsyncClient):
    """Sends requests to the endpoint directly, and all others as any client.

    The endpoint neither redirects nor sets cookies, and asks for no login. The work of httpx for
    these, and for its log, takes a fifth of the CPU time of a turn's request.
    """

    def __init__(self, transport: EndpointTransport, **options: Any) -> None:
        super().__init__(transport=transport, **options)
        self._endpoint = transport

    async def send(
        self, request: httpx.Request, *, stream: bool = False, **options: Any
    ) -> httpx.Response:
        """Send a request: straight to the endpoint, or by httpx with hooks, mounts or auth."""
        has_auth = options.get("auth") not in (None, httpx.USE_CLIENT_DEFAULT) or self.auth
        needs_httpx = has_auth or self._mounts or any(self.event_hooks.values())
        if needs_httpx or self.is_closed or not self._endpoint.reaches(request.url):
            return await super().send(request, stream=stream, **options)
        start = time.monotonic()
        response = await self._endpoint.handle_async_request(request)
        response.request = request
        response.elapsed = timedelta(seconds=time.monotonic() - start)
        if not stream:
            await response.aread()
        return response
