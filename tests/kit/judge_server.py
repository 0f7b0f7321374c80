"""A chat API over HTTP whose replies a test gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]


def says(text: str) -> Reply:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


class Server:
    """Answers with `replies` in turn, the last one for ever; keeps what it was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply | Callable[[], Reply]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with lock:
                    server.asked.append({**json.loads(body), "path": self.path})
                    server.headers = dict(self.headers)
                    replies = server.replies
                    reply = replies.pop(0) if len(replies) > 1 else replies[0]
                status, content = reply() if callable(reply) else reply
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
