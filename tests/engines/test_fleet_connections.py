"""HTTP/1.1 to one server: kept connections, ends of answers, and what is no answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from agenttrain.engines.vllm_server.connections import BadAnswer, Connections, HttpAnswer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Gives each request the next of its answers, and keeps what it was sent."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Event()
        """Set once a client has closed a connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.asked.append(head + await reader.readexactly(length))
                if not self.answers:
                    continue
                answer = self.answers.pop(0)
                writer.write(answer)
                if b"close" in answer or answer.endswith(b"cut"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            writer.close()


def run(
    check: Callable[[Connections, Server], Awaitable[None]],
    *answers: bytes,
    timeout_s: float = 60.0,
) -> None:
    async def main() -> None:
        server = Server(*answers)
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/under"
        client = Connections(url, {"Authorization": "Bearer x"}, timeout_s=timeout_s)
        try:
            await check(client, server)
        finally:
            await client.aclose()
            listening.close()

    asyncio.run(main())


def test_a_request_as_it_is_sent_and_a_connection_that_is_used_again() -> None:
    async def check(client: Connections, server: Server) -> None:
        assert await client.request("POST", "/a?b=c", b"12", {"X-Of": "this"}) == HttpAnswer(
            200, b"ok"
        )
        assert await client.request("GET", "/d") == HttpAnswer(200, b"ok")
        first, second = (asked.decode().split("\r\n") for asked in server.asked)
        assert first[0] == "POST /under/a?b=c HTTP/1.1" and first[1].startswith("Host: 127.0.0.1:")
        assert first[2:] == [
            *("Authorization: Bearer x", "Content-Length: 2", "X-Of: this", "", "12")
        ]
        assert second[0] == "GET /under/d HTTP/1.1" and second[3] == "Content-Length: 0"
        assert server.connections == 1

    run(check, OK, OK)


def test_requests_at_once_have_a_connection_each() -> None:
    async def check(client: Connections, server: Server) -> None:
        answers = await asyncio.gather(*(client.request("GET", "/") for _ in range(20)))
        assert {answer.content for answer in answers} == {b"ok"}
        assert server.connections == 20
        await client.request("GET", "/")
        assert server.connections == 20

    run(check, *[OK] * 21)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n"
            b"0\r\nX: y\r\n\r\n",
            b"abcde",
        ),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:3\r\n\r\nabc", b"abc"),
    ],
    ids=["chunked", "to the end", "no content", "other letters"],
)
def test_ends_of_answers(answer: bytes, content: bytes) -> None:
    async def check(client: Connections, server: Server) -> None:
        assert (await client.request("GET", "/")).content == content
        assert (await client.request("GET", "/")).content == b"ok"

    run(check, answer, OK)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", "before it had answered"),
        (b"SSH-2.0\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "is no HTTP"),
    ],
)
def test_what_is_no_answer(answer: bytes, message: str) -> None:
    async def check(client: Connections, server: Server) -> None:
        with pytest.raises(BadAnswer, match=message):
            await client.request("GET", "/")
        assert (await client.request("GET", "/")).content == b"ok"
        assert server.connections == 2

    run(check, answer, OK)


def test_connections_that_are_not_used_again() -> None:
    """After a failure of the server, and one that the server closed meanwhile."""
    failed = b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno"

    async def check(client: Connections, server: Server) -> None:
        assert await client.request("GET", "/") == HttpAnswer(500, b"no")
        closing = OK.replace(b"\r\n\r\n", b"\r\nX: close\r\n\r\n")
        server.answers[0] = closing  # which the client cannot know
        await client.request("GET", "/")
        await asyncio.sleep(0.05)
        await client.request("GET", "/")
        assert server.connections == 3

    run(check, failed, b"", OK)


def test_a_connection_that_was_closed_while_the_event_loop_was_blocked() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    connections = 0

    def serve() -> None:
        nonlocal connections
        for _ in range(2):
            peer, _ = listening.accept()
            connections += 1
            peer.recv(4096)
            peer.sendall(OK)
            peer.close()

    async def main() -> None:
        client = Connections(f"http://127.0.0.1:{listening.getsockname()[1]}", {}, timeout_s=60)
        assert (await client.request("GET", "/")).content == b"ok"
        time.sleep(0.2)  # the end of the connection comes meanwhile
        assert (await client.request("GET", "/")).content == b"ok"
        await client.aclose()

    threading.Thread(target=serve, daemon=True).start()
    asyncio.run(main())
    listening.close()
    assert connections == 2


def test_requests_that_end_early() -> None:
    async def check(client: Connections, server: Server) -> None:
        with pytest.raises(TimeoutError):
            await client.request("GET", "/")
        await server.ended.wait()
        server.ended.clear()
        work = asyncio.create_task(client.request("GET", "/"))
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        work.cancel()
        await server.ended.wait()  # a cancelled request is given up by the server
        work = asyncio.create_task(client.request("GET", "/"))
        while len(server.asked) < 3:
            await asyncio.sleep(0.01)
        await client.aclose()
        with pytest.raises(OSError):
            await work
        with pytest.raises(BadAnswer, match="was closed"):
            await client.request("GET", "/")

    run(check, timeout_s=0.5)
