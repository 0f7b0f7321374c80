"""A model hub on 127.0.0.1, with faults on demand, for `HF_ENDPOINT`.

    with StubHub() as hub:
        commit = hub.publish("Qwen/Qwen3-0.6B")                  # a snapshot of the bundled model
        hub.fail("/resolve/.*safetensors", status=503, times=2)  # then it answers
        environment = {**os.environ, **hub.environment(tmp_path / "hf")}

It serves what `huggingface_hub` asks for when it reads: a model's information, its tree and its
files, with the headers of the real hub, ranges included.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

from agenttrain.utils import hub as hub_module
from agenttrain.utils.hub import snapshot
from agenttrain.utils.model_path import model_folder

LARGE = (".safetensors", ".bin", ".gguf")
"""Files that the hub keeps in its large-file store; their ETag is a SHA-256."""
BLOCK = 1 << 14


def bundled_files(name: str = "shop") -> dict[str, bytes]:
    """Return the files of a bundled model, which stand for any model's."""
    folder = model_folder(f"bundled:{name}")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@dataclass
class Repository:
    """A model on the hub: its revisions, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Token that reading needs; None: everybody may."""
    gated: bool = False
    """Its information is public; its files need an accepted licence, which nobody has."""


@dataclass
class Fault:
    """An answer of the hub that is not what was asked for."""

    path: str
    times: int
    status: int | None = None
    truncate: int | None = None
    seconds_per_block: float = 0.0


class Server(ThreadingHTTPServer):
    """Closes also the connections that clients keep open, which its threads would answer."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def server_close(self) -> None:
        super().server_close()
        for connection in self.connections:
            with suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)


class StubHub:
    """The server; `requests` and `sent` (bytes of bodies) count what was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.sent = 0
        self.faults: list[Fault] = []
        self._server = Server(_handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StubHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop: from now on connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def publish(
        self,
        name: str,
        files: Mapping[str, bytes] | None = None,
        *,
        revision: str = "main",
        token: str | None = None,
        gated: bool = False,
    ) -> str:
        """Add a commit to a model, or to `datasets/org/name`, and move `revision` to it.

        Return the commit's hash.
        """
        files = bundled_files() if files is None else dict(files)
        digest = hashlib.sha1(name.encode())
        for file, content in sorted(files.items()):
            digest.update(file.encode() + content)
        commit = digest.hexdigest()
        repository = self.repositories.setdefault(name, Repository())
        repository.commits[commit] = files
        repository.refs[revision] = commit
        repository.token, repository.gated = token, gated
        return commit

    def fail(
        self,
        path: str,
        *,
        status: int | None = None,
        truncate: int | None = None,
        seconds_per_block: float = 0.0,
        times: int = 1_000_000,
    ) -> None:
        """Answer the next `times` requests whose path matches with an error status, close the
        connection after `truncate` bytes, or send slowly."""
        self.faults.append(Fault(path, times, status, truncate, seconds_per_block))

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the variables of a process that uses this hub, with its cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "5",
            **more,
        }

    def fault(self, path: str) -> Fault | None:
        """Return the fault that the next answer to `path` has, and count it."""
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None


def _handler(hub: StubHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            hub.requests.append(f"{self.command} {path}")
            fault = hub.fault(path)
            if fault is not None and fault.status is not None:
                self._error(fault.status, None, "the hub is out of order")
                return
            plain = path.replace("/api/models/", "/api/")
            name_of = r"((?:datasets/)?[^/]+/[^/]+)"
            api = re.fullmatch(
                rf"/api/{name_of}(?:/(revision|tree|auth-check)(?:/([^/]+)(/.+)?)?)?/?", plain
            )
            file = re.fullmatch(rf"/{name_of}/resolve/([^/]+)/(.+)", path)
            match = api or file
            if match is None:
                self._error(404, None, "no such page")
                return
            name = match.group(1)
            repository = hub.repositories.get(name)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if repository is None or (repository.token and token != repository.token):
                if token and repository is not None:
                    self._error(401, None, "Invalid credentials in Authorization header")
                else:  # the hub does not say whether a private model exists
                    self._error(401 if not token else 404, "RepoNotFound", "Repository not found")
                return
            if api and api.group(4):
                self._error(404, "EntryNotFound", "there are no folders in it")
            elif api and (api.group(2) != "auth-check" or not repository.gated):
                self._api(name, repository, match.group(2), match.group(3), parts.query)
            elif repository.gated:
                self._error(403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
            else:
                self._file(repository, match.group(2), match.group(3), fault)

        def _commit(self, repository: Repository, revision: str | None) -> str | None:
            revision = revision or "main"
            commit = repository.refs.get(revision, revision)
            if commit not in repository.commits:
                self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                return None
            return commit

        def _api(
            self,
            name: str,
            repository: Repository,
            kind: str | None,
            revision: str | None,
            query: str,
        ) -> None:
            commit = self._commit(repository, revision)
            if commit is None:
                return
            files = repository.commits[commit]
            if kind == "tree":
                self._json([_entry(path, content, "path") for path, content in files.items()])
                return
            blobs = "blobs" in parse_qs(query)
            siblings = [
                _entry(path, content, "rfilename") if blobs else {"rfilename": path}
                for path, content in files.items()
            ]
            self._json(
                {
                    "_id": commit[:24],
                    "id": name,
                    "modelId": name,
                    "sha": commit,
                    "private": repository.token is not None,
                    "gated": "manual" if repository.gated else False,
                    "tags": [],
                    "downloads": 0,
                    "siblings": siblings,
                }
            )

        def _file(
            self, repository: Repository, revision: str, path: str, fault: Fault | None
        ) -> None:
            commit = self._commit(repository, revision)
            if commit is None:
                return
            content = repository.commits[commit].get(path)
            if content is None:
                self._error(404, "EntryNotFound", "Entry not found", commit=commit)
                return
            start, length = 0, len(content)
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if wanted:
                start = int(wanted.group(1))
                length = (int(wanted.group(2)) + 1 if wanted.group(2) else len(content)) - start
            self.send_response(206 if wanted else 200)
            if wanted:
                end = start + length - 1
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
            etag = _etag(path, content)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", commit)
            if path.endswith(LARGE):
                self.send_header("X-Linked-Etag", f'"{etag}"')
                self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "GET":
                self._send(content[start : start + length], fault)

        def _send(self, body: bytes, fault: Fault | None) -> None:
            cut = len(body) if fault is None or fault.truncate is None else fault.truncate
            pause = 0.0 if fault is None else fault.seconds_per_block
            try:
                for at in range(0, min(cut, len(body)), BLOCK):
                    part = body[at : min(at + BLOCK, cut)]
                    self.wfile.write(part)
                    hub.sent += len(part)
                    time.sleep(pause)
            except OSError:  # the client is gone
                self.close_connection = True
            if cut < len(body):
                self.close_connection = True

        def _json(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self._send(body, None)

        def _error(
            self, status: int, code: str | None, message: str, *, commit: str | None = None
        ) -> None:
            body = json.dumps({"error": message}).encode()
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            if commit is not None:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def _etag(path: str, content: bytes) -> str:
    kind = hashlib.sha256 if path.endswith(LARGE) else hashlib.sha1
    return kind(content).hexdigest()


def _entry(path: str, content: bytes, key: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", key: path, "size": len(content)}
    oid = hashlib.sha1(content).hexdigest()
    entry["oid" if key == "path" else "blobId"] = oid
    if path.endswith(LARGE):
        digest = _etag(path, content)
        entry["lfs"] = {"size": len(content), "pointerSize": 134}
        entry["lfs"] |= {"oid": digest} if key == "path" else {"sha256": digest}
    return entry


def use(hub: StubHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use the hub and an empty cache, as `environment` does for another one.

    huggingface_hub has read the environment when it was imported.
    """
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    snapshot.cache_clear()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """A hub of the test's own and an empty cache; the working directory is empty too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_module, "PAUSES_S", (0.0, 0.0))
    with StubHub() as server:
        use(server, tmp_path / "hf", monkeypatch)
        yield server
