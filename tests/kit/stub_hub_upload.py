"""The part of a model hub that takes uploads, on 127.0.0.1, for `HF_ENDPOINT`.

    with UploadHub(token="secret") as hub:
        …                                       # create_repo and upload_folder of huggingface_hub
        hub.repositories["org/agent"].files["README.md"]

Large files go through the LFS endpoints, the others through the commit itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

LARGE = (".safetensors", "tokenizer.json")


@dataclass
class Uploaded:
    """A repository of the hub."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class UploadHub:
    """The server; `token` is the only one that may write, `refuse` a status for every request."""

    def __init__(self, token: str, refuse: int | None = None) -> None:
        self.token, self.refuse = token, refuse
        self.repositories: dict[str, Uploaded] = {}
        self.objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> UploadHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON of a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            address = {"url": f"{self.url}/{name}"}
            if name in self.repositories:
                return 409, {**address, "error": "You already created this model repo"}
            private = asked.get("private", asked.get("visibility") == "private")
            self.repositories[name] = Uploaded(private=bool(private))
            return 200, address
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **entry,
                    "actions": {"upload": {"href": f"{self.url}/objects/{entry['oid']}"}},
                }
                for entry in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        name = path.removeprefix("/api/models/").rpartition("/commit/")[0]
        repository = self.repositories[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repository.commits.append(value["summary"])
            elif entry["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repository.files[value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}


def _handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if hub.refuse is not None:
                self._send(hub.refuse, {"error": "refused"})
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(401, {"error": "Invalid credentials"})
            else:
                self._send(*hub.answer(self.path.partition("?")[0], body))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            hub.objects[oid] = body
            self._send(200, {})

        def do_GET(self) -> None:
            self._send(404, {"error": "not found"})

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler
