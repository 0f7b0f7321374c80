"""An MCP server over stdio without any SDK, of an older protocol: it starts in no time."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from threading import Thread

NAMES = ("pid", "echo", "sleep", "die", "cancelled")
cancelled: list[int] = []


def result(method: str, params: dict) -> dict | None:
    """What a request gets; None: no such method."""
    if method == "initialize":
        return {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "plain", "version": "1"},
        }
    if method == "tools/list":  # a page for each tool
        at = int(params.get("cursor", 0))
        tool = {"name": NAMES[at], "inputSchema": {"type": "object"}}
        return {"tools": [tool], **({"nextCursor": str(at + 1)} if NAMES[at + 1 :] else {})}
    return called(params) if method == "tools/call" else None


def called(params: dict) -> dict:
    name = params["name"]
    if name == "die":
        os._exit(3)
    if name == "sleep":
        time.sleep(0.5)
    texts = {"pid": str(os.getpid()), "cancelled": str(len(cancelled))}
    return {"content": [{"type": "text", "text": texts.get(name, name)}]}


def answer(request: dict) -> None:
    found = result(request["method"], request.get("params", {}))
    error = {"code": -32601, "message": "no such method"}
    body = {"error": error} if found is None else {"result": found}
    # One write for the line: several threads answer.
    os.write(1, (json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}) + "\n").encode())


def main() -> None:
    if sys.argv[1:]:  # a file that says that it was started before
        marker = Path(sys.argv[1])
        if marker.exists():
            sys.exit("I do not start twice")
        marker.touch()
    os.write(1, b"this line is no message\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request["method"] == "notifications/cancelled":
            cancelled.append(request["params"]["requestId"])
        if "id" in request:
            Thread(target=answer, args=(request,), daemon=True).start()


if __name__ == "__main__":
    main()
