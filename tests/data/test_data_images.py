"""Images of rows: columns, parts of messages, limits, and files that are refused by line."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image as Pillow

from agenttrain.data.build import build_tasks
from agenttrain.data.config import DataConfig
from agenttrain.data.images import ImageLimits
from agenttrain.data.tasks import to_task
from agenttrain.types import Image
from agenttrain.utils.image_files import BadImage, picture_of, read_image

FILE = "agenttrain.data.files.FileRows"
PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def saved(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


PNG = saved(Pillow.fromarray(PIXELS))
ADDRESS = "data:image/png;base64," + base64.b64encode(PNG).decode()


def pixels(image: Image) -> Any:
    return np.asarray(picture_of(image))


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what?", "images": [PNG]},
        {"prompt": "what?", "images": PNG},
        {"prompt": "what?", "images": [{"bytes": PNG, "path": None}]},
        {"prompt": "what?", "images": [base64.b64encode(PNG).decode()]},
        {"messages": user({"type": "image", "image": PNG}, {"type": "text", "text": "what?"})},
        {"messages": user({"type": "image"}, {"type": "text", "text": "what?"}), "images": [PNG]},
        {
            "messages": user(
                {"type": "image_url", "image_url": {"url": ADDRESS}},
                {"type": "text", "text": "wh"},
                {"type": "text", "text": "at?"},
            )
        },
    ],
)
def test_a_row_shows_its_image_before_its_text(row: dict[str, Any]) -> None:
    task = to_task({"answer": "7", **row}, 0)
    image, text = task.messages[0]["content"]
    assert np.array_equal(pixels(image["image"]), PIXELS)
    assert text == {"type": "text", "text": "what?"}
    assert task.columns == {"answer": "7"} or "prompt" in task.columns
    assert "images" not in task.columns


def test_images_of_the_column_go_where_the_messages_name_them() -> None:
    other = saved(Pillow.new("RGB", (3, 3)))
    parts = ({"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"})
    content = to_task({"messages": user(*parts), "images": [PNG, other]}, 0).messages[0]["content"]
    assert [part.get("text", part.get("image")) for part in content] == [
        read_image(PNG),
        "or",
        read_image(other),
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": user({"type": "image"})}, "part 0 of the user message names an image"),
        (
            {"messages": user({"type": "image"}), "images": [PNG, PNG]},
            "holds 2 images, and the messages name 1 of them",
        ),
        ({"prompt": "q", "images": [PNG] * 9}, "9 images, more than data.max_images=8"),
        ({"prompt": "q", "images": [PNG[:60]]}, r"images\[0\]: it cannot be decoded"),
        (
            {"prompt": "q", "images": ["https://a.b/c.png"]},
            r"a.b/c.png is an address, and nothing is downloaded; set data\.image_urls=true",
        ),
        ({"prompt": "q", "images": ["no/such.png"]}, "no/such.png cannot be read"),
        ({"prompt": "q", "images": [7]}, "a value of the type int is no image; give a path"),
        ({"messages": user({"type": "video"})}, "is of the type 'video'; only texts and images"),
        (
            {"messages": [*user("q"), {"role": "assistant", "content": [{"type": "image"}]}]},
            "part 0 of the user message is of the type 'str'",
        ),
    ],
)
def test_rows_whose_images_cannot_be_shown_are_refused(row: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        to_task(row, 0)


def test_limits_are_settings() -> None:
    with pytest.raises(ValueError, match=r"6x4 pixels, more than data\.max_image_pixels=23"):
        to_task({"prompt": "q", "images": [PNG]}, 0, images=ImageLimits(pixels=23))


def bomb() -> bytes:
    """A file of 4 x 6 pixels whose header claims 3.6 billion."""
    made = bytearray(PNG)
    made[16:24] = (60000).to_bytes(4, "big") * 2
    made[29:33] = zlib.crc32(made[12:29]).to_bytes(4, "big")
    return bytes(made)


BROKEN = {
    "truncated": (PNG[:70], "it cannot be decoded: "),
    "empty": (b"", "it cannot be decoded: "),
    "bomb": (
        bomb(),
        r"it (is too large|has 60000x60000 pixels, more than data\.max_image_pixels=)",
    ),
    "text": (b"seven", "it cannot be decoded: its content is none of PNG, JPEG, .*or cut short"),
    "missing": (None, r"pictures/bad\.png cannot be read: No such file or directory"),
    "narrow": (saved(Pillow.new("RGB", (401, 2))), "401x2: one side is more than 200 times"),
}


def rows_file(folder: Path, *images: Any) -> dict[str, Any]:
    """A section of data for a file with a row for each list of images."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "good.png").write_bytes(PNG)
    file = folder / "rows.jsonl"
    rows = [{"prompt": "q", "images": one} for one in images]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"_target_": FILE, "path": str(file)}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_names_the_line_of_an_image_that_is_refused(tmp_path: Path, kind: str) -> None:
    good, bad = ["pictures/good.png"], ["pictures/good.png", "pictures/bad.png"]
    section = rows_file(tmp_path, good, good, bad)
    content, reason = BROKEN[kind]
    if content is not None:
        (tmp_path / "pictures" / "bad.png").write_bytes(content)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3: images\[1\]: .*{reason}"):
        build_tasks(DataConfig(train=section), seed=0)
    kept = build_tasks(DataConfig(train=section, on_bad_row="skip"), seed=0)
    assert len(kept.train) == 2
    assert kept.train.row(0).messages[0]["content"][0]["image"] == read_image(PNG)


def test_a_file_names_the_line_of_a_value_that_is_no_image(tmp_path: Path) -> None:
    section = rows_file(tmp_path, ["pictures/good.png"], [7])
    with pytest.raises(
        ValueError, match=r"line 2: images\[0\]: a value of the type int is no image"
    ):
        build_tasks(DataConfig(train=section), seed=0)


def test_the_images_of_a_dataset_are_limited(tmp_path: Path) -> None:
    good = "pictures/good.png"
    section = rows_file(tmp_path, [good], [good, good], [good])
    assert len(build_tasks(DataConfig(train=section, max_total_images=4), seed=0).train) == 3
    problem = (
        r"data\.max_total_images=2: the first 2 rows of data\.train have 3 images, .*raise it, or "
        r"take fewer rows: data\.train\.limit=1"
    )
    with pytest.raises(ValueError, match=problem):
        build_tasks(DataConfig(train=section, max_total_images=2), seed=0)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """The address of a server with the files of BROKEN and a good one, and the paths it was asked
    for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str] = []
    files = {"/good": PNG, "/truncated": BROKEN["truncated"][0]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            content = files.get(self.path)
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_addresses_are_downloaded_on_request_and_once(tmp_path: Path, site: Any) -> None:
    address, asked = site
    section = rows_file(tmp_path, [f"{address}/good"], [f"{address}/good"])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: .* set data\.image_urls=true"):
        build_tasks(DataConfig(train=section), seed=0)
    assert asked == []
    for _ in range(2):
        tasks = build_tasks(DataConfig(train=section, image_urls=True), seed=0)
        assert tasks.train.row(1).messages[0]["content"][0]["image"] == read_image(PNG)
    assert asked == ["/good"]


def test_addresses_without_an_image_are_refused(tmp_path: Path, site: Any) -> None:
    address, asked = site
    with socket.create_server(("127.0.0.1", 0)) as free:
        silent = f"http://127.0.0.1:{free.getsockname()[1]}"
    for url, reason in (
        (f"{address}/none", "/none is answered with status 404"),
        (f"{address}/truncated", "/truncated: it cannot be decoded"),
        (f"{silent}/x", "/x cannot be downloaded: "),
    ):
        section = rows_file(tmp_path, [url])
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: images\[0\]: .*{reason}"):
            build_tasks(DataConfig(train=section, image_urls=True), seed=0)
    assert asked == ["/none", "/truncated"]
    assert not (tmp_path / "cache").exists()


def test_a_column_of_images_of_datasets_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    table = datasets.Dataset.from_dict({"prompt": ["q"], "images": [[str(tmp_path / "a.png")]]})
    table = table.cast_column("images", datasets.List(datasets.Image()))
    table.save_to_disk(tmp_path / "saved")
    section = {"_target_": FILE, "path": str(tmp_path / "saved")}
    task = build_tasks(DataConfig(train=section), seed=0).train.row(0)
    assert np.array_equal(pixels(task.messages[0]["content"][0]["image"]), PIXELS)


def test_every_image_is_upright_and_rgb() -> None:
    whole = Pillow.fromarray(PIXELS)
    turned = Pillow.Exif()
    turned[0x0112] = 6  # the camera was held upright: turn by 90 degrees
    assert (read_image(saved(whole, exif=turned)).width, whole.width) == (4, 6)
    grey = pixels(read_image(saved(whole.convert("L"))))
    assert (grey[..., 0] == grey[..., 2]).all()
    assert pixels(read_image(saved(whole.convert("CMYK"), "JPEG"))).shape == (4, 6, 3)
    clear = Pillow.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert (pixels(read_image(saved(clear))) == 255).all()
    assert (pixels(read_image(clear.quantize())) == 255).all()
    frames = [Pillow.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    moving = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(read_image(moving))[0, 0].tolist() == [255, 0, 0]


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadImage, match=r"too large|more than data\.max_image_pixels"):
        read_image(bomb())


def test_the_same_pixels_are_the_same_image() -> None:
    """Whatever they come as, so that features are computed once."""
    array = read_image(PIXELS)
    assert array == read_image(Pillow.fromarray(PIXELS))
    assert len({array.sha256, read_image(PIXELS + 1).sha256}) == 2
