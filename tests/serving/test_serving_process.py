"""`agenttrain serve` with an engine that has a server of its own: a stub in the place of vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ENGINE = """
import json, sys
from dataclasses import asdict
from pydantic.dataclasses import dataclass
from agenttrain.engines.config import EngineSettings
from agenttrain.engines.spec import EngineSpec
from agenttrain.utils.sections import SETTINGS

@dataclass(config=SETTINGS, kw_only=True)
class Settings(EngineSettings):
    fails: bool = False

def server(settings, served):
    described = json.dumps({**asdict(served), "fails": settings.fails})
    return [sys.executable, __file__.replace("my_engine", "stub"), described]

SPEC = EngineSpec(settings=Settings, build=lambda *_: None, server=server, own_weights=True)
"""
STUB = """
import json, pathlib, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

served = json.loads(sys.argv[1])
if served["fails"]:
    sys.exit("no memory for the cache")
served["template"] = pathlib.Path(served["template"]).read_text()
served["generation"] = pathlib.Path(served["generation"], "generation_config.json").read_text()
worker = subprocess.Popen(["sleep", "600"])  # as vLLM's engine, which outlives its server
served["worker"] = worker.pid

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(served).encode())

    def log_message(self, *_): pass

HTTPServer((served["host"], served["port"]), Handler).serve_forever()
"""


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "my_engine.py").write_text(ENGINE)
    (folder / "stub.py").write_text(STUB)
    command = [sys.executable, "-u", "-m", "agenttrain.cli", "serve", "experiment=shop", "port=0"]
    process = subprocess.Popen(
        [*command, "engine._target_=my_engine.SPEC", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_its_server_gets_the_runs_chat_and_ends_with_the_command(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("serving agent"))
        served = json.load(urllib.request.urlopen(url))
        assert served["folder"].endswith("/data/models/shop")
        assert (served["name"], served["call_parser"]) == ("agent", "hermes")
        assert "<tool_response>" in served["template"]
        assert json.loads(served["generation"]) == {"eos_token_id": [2]}
        assert served["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    worker = Path(f"/proc/{served['worker']}/stat")
    assert not worker.exists() or worker.read_text().split()[2] == "Z"  # not yet collected


@pytest.mark.long
def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with serving(tmp_path, "engine.fails=true") as process:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2
    assert errors == (
        "agenttrain: engine=my_engine.SPEC: its server ended with exit code 1; it printed: no "
        "memory for the cache\n"
    )


@pytest.mark.slow
def test_calls_that_vllm_cannot_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("call_open: '[CALL]'\ncall_close: '[/CALL]'\n")
    own = ("response_schema=file", f"response_schema.path={tmp_path}/mine.yaml")
    with serving(tmp_path, *own) as process:
        _, errors = process.communicate(timeout=120)
    assert errors.startswith(
        "agenttrain: response_schema=file: calls in this format have no bundled parser in vLLM; "
        "name one of vLLM's with response_schema.server_parser=…, or leave the engine out: "
        "agenttrain serve then reads the calls itself"
    )
