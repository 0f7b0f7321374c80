"""A router in front of servers: each request goes to the next one that can be reached."""

from __future__ import annotations

import itertools
import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def app(urls: list[str]) -> Starlette:
    """The application."""
    http = httpx.AsyncClient(timeout=60, trust_env=False)
    turns = itertools.count()

    async def forward(request: Request) -> Response:
        body, token = await request.body(), request.headers["authorization"]
        assert request.headers["x-session-id"]
        headers = {"Authorization": token, "Content-Type": "application/json"}
        first = next(turns)
        for number in range(len(urls)):
            url = urls[(first + number) % len(urls)]
            try:
                answer = await http.request(
                    request.method, url + request.url.path, content=body, headers=headers
                )
            except httpx.ConnectError:
                continue
            except httpx.HTTPError:
                return Response(status_code=502)
            return Response(answer.content, answer.status_code)
        return Response(status_code=503)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


if __name__ == "__main__":
    uvicorn.run(app(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
