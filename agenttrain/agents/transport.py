"""Requests of agents in the run's own process: they reach the endpoint without a socket."""

from __future__ import annotations

import httpx
from starlette.types import ASGIApp


class EndpointTransport(httpx.AsyncBaseTransport):
    """Carries requests to a rollout's address to the endpoint, and all others over the network.

    A socket, its parser and a connection for each rollout cost more CPU than the endpoint itself. A
    request without a key gets the rollout's, which no other address is sent.
    """

    def __init__(self, app: ASGIApp, url: str, key: str) -> None:
        """`url` is the address of the rollout."""
        self._url, self._key = httpx.URL(url), key
        self._endpoint = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._network: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its response."""
        url = request.url
        if (url.scheme, url.host, url.port) == (self._url.scheme, self._url.host, self._url.port):
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
