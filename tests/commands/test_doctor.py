"""`agenttrain doctor`: what works, what is missing, and what keeps `agenttrain` from running."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agenttrain import cli
from agenttrain.commands.doctor import hub

PARTS = {"Python", "packages", "torch", "processor", "outputs", "hub cache", "sandbox", "SLURM"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, before which nothing is installed, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path


def install(folder: Path, *requirements: str, name: str = "agenttrain") -> None:
    """Put the metadata of a package with these requirements before the installed one's."""
    metadata = folder / f"{name}-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 0.1.0"]
    lines += [f"Requires-Dist: {text}" for text in requirements]
    metadata.write_text("\n".join(lines) + "\n")


def examined(code: int) -> dict[str, dict[str, str]]:
    """The findings of a run with this exit code, by part."""
    assert cli.main(["doctor", "json=report.json"]) == code
    report = json.loads(Path("report.json").read_text())
    assert report["ok"] == (code == 0)
    return {finding["part"]: finding for finding in report["findings"]}


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[int]]]:
    """The address of a hub on this machine, and the list of statuses that it answers with."""
    statuses: list[int] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", statuses
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_machine_that_can_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(place, "torch>=2", "pytest>=1; extra == 'quick'", "nowhere>=1; extra == 'rare'")
    install(place, "torch==0.1", "absent>=3", "rich; extra == 'x'", name="hydra-core")
    findings = examined(0)
    assert set(findings) >= PARTS
    assert findings["packages"]["state"] == "ok"
    assert findings["torch"]["state"] == "ok" and "threads" in findings["torch"]["detail"]
    assert findings["[quick]"]["state"] == "ok"
    assert findings["[rare]"]["state"] == "missing"
    assert findings["[rare]"]["remedy"] == "pip install 'agenttrain[rare]'"
    assert findings["hub"]["detail"].endswith("is not asked: HF_HUB_OFFLINE is set")
    assert not (place / "outputs").exists() and not (place / "cache").exists()
    printed = capsys.readouterr().out
    assert printed.endswith("\n`agenttrain` can run.\n")
    assert all(f" {part} " in printed for part in PARTS)


def test_what_keeps_agenttrain_from_running(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(place, "torch<1", "nowhere>=1", "rich>=1", "trackio")
    install(place, "rich<1", name="trackio")
    (place / "outputs").write_text("a file\n")
    (place / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(place))
    findings = examined(1)
    assert "is outside <1; nowhere is not installed" in findings["packages"]["detail"]
    assert findings["torch"]["state"] == "broken"
    assert findings["torch"]["detail"] == (
        "fails to import: ImportError: libcudart.so.13: cannot open"
    )
    assert "GPU" not in findings
    assert findings["outputs"]["detail"].endswith("may not be written")
    assert "asks for another version: rich" in findings["trackio"]["detail"]
    out = capsys.readouterr().out
    assert out.endswith("\n`agenttrain` cannot run: packages, torch, outputs\n")


def test_the_hub(
    place: Path, endpoint: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, statuses = endpoint
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", address)
    for status, state in ((200, "ok"), (404, "ok"), (503, "warn")):
        statuses.append(status)
        assert hub().state == state
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    finding = hub()
    assert finding.state == "missing" and "http://127.0.0.1:9 is not reached" in finding.detail


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["json=no/x.json"], "--json no/x.json: name a file in an existing folder"),
    ],
)
def test_words_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
