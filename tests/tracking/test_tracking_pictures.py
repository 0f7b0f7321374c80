"""Images of recorded rollouts, in trackio's traces and as texts."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vision_kit

from agenttrain.tracking.backends.trackio import trace
from agenttrain.tracking.pictures import decoded, decoded_span, with_data
from agenttrain.types import PlacedImage

IMAGE = vision_kit.picture(16, 8)
PART = {
    "type": "image",
    "sha256": IMAGE.sha256,
    "width": 16,
    "height": 8,
    "file": f"images/{IMAGE.sha256}.png",
}
RECORD: dict[str, Any] = {
    "rollout_id": "g0-0",
    "task_id": "t",
    "reward": 1.0,
    "rewards": {},
    "stop_reason": "completed",
    "trajectories": [
        {
            "messages": [
                {"role": "user", "content": [PART, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": "It."},
            ],
            "spans": [],
        }
    ],
}


CAPTION = f"[image of 16x8 pixels ({IMAGE.sha256[:8]})]"
SCRIPT = """
import json, sys
from pathlib import Path
from agenttrain.tracking.backends.base import TrackedRun
from agenttrain.tracking.backends.trackio import Trackio

folder = Path(sys.argv[1])
tracker = Trackio()
tracker.start(TrackedRun(id="r", project="p", name="n", folder=folder, shared=folder), {})
tracker.rollouts(1, [json.loads(sys.stdin.read())])
tracker.log(1, {"reward": 1.0})
tracker.flush()
tracker.finish()
"""


@pytest.mark.slow
def test_a_trace_of_trackio_shows_images(tmp_path: Path) -> None:
    """In a process of its own, as in a run: trackio has one state for each."""
    (tmp_path / "rollouts" / "images").mkdir(parents=True)
    (tmp_path / "rollouts" / PART["file"]).write_bytes(IMAGE.data)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRACKIO_")}
    subprocess.run(command, input=json.dumps(RECORD), text=True, check=True, env=environment)
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        ((text,),) = database.execute("select messages from traces").fetchall()
    image, question = json.loads(text)[0]["content"]
    assert question == {"type": "text", "text": "What is it?"}
    assert (image["_type"], image["caption"]) == ("trackio.image", CAPTION)
    (copied,) = tmp_path.rglob(Path(image["file_path"]).name)
    assert copied.read_bytes() == IMAGE.data


@pytest.mark.parametrize("name", ["{}", "../{}", "images/../../{}"])
def test_a_page_holds_no_file_from_outside_the_images(tmp_path: Path, name: str) -> None:
    """A page of a stranger's run may be sent on, with whatever it holds."""
    secret, folder = tmp_path / "secret.png", tmp_path / "rollouts"
    secret.write_bytes(b"mine")
    (folder / "images").mkdir(parents=True)
    (folder / PART["file"]).write_bytes(IMAGE.data)
    named = name.format(secret if name == "{}" else secret.name)
    other, own = with_data([{"content": [{**PART, "file": named}, PART]}], folder)[0]["content"]
    assert "data" not in other and own["data"].startswith("data:image/png;base64,")


def test_an_image_whose_file_is_gone_has_its_size_in_a_trace() -> None:
    user, assistant = trace(RECORD)["messages"]
    assert user["content"] == [
        {"type": "text", "text": CAPTION},
        {"type": "text", "text": "What is it?"},
    ]
    assert assistant["content"] == "It."


def test_an_images_placeholders_are_one_text() -> None:
    ids = [1, 2, 9, 9, 3]
    placed = [PlacedImage(IMAGE, 2, (1, 2))]

    def decode(ids):
        return "".join(map(str, ids))

    assert decoded(decode, ids, placed) == f"12[{IMAGE}, 2 tokens]3"
    recorded = [{"start": 2, "grid": [1, 2], "sha256": IMAGE.sha256}]
    assert decoded_span(decode, ids, recorded) == f"12[image {IMAGE.sha256[:8]}, 2 tokens]3"
    assert decoded_span(decode, ids, ()) == "12993"
