"""Images of rows: columns, parts of messages, limits, and files that are refused by line."""

from __future__ import annotations

import base64
import io
import json
import zlib
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
from agenttrain.images import BadImage, Image, picture_of, read_image

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
        ({"prompt": "q", "images": ["https://a.b/c.png"]}, "nothing is downloaded"),
        ({"prompt": "q", "images": ["no/such.png"]}, "no/such.png cannot be read"),
        ({"prompt": "q", "images": [7]}, "a int is no image"),
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


def test_a_file_names_the_line_of_a_broken_image(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "pictures" / "b.png").write_bytes(PNG[:70])
    rows = [{"prompt": "q", "images": [f"pictures/{name}.png"]} for name in "aab"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"_target_": FILE, "path": str(file)}
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3: images\[0\]: it cannot be decoded"):
        build_tasks(DataConfig(train=section), seed=0)
    kept = build_tasks(DataConfig(train=section, on_bad_row="skip"), seed=0)
    assert len(kept.train) == 2
    assert kept.train.row(0).messages[0]["content"][0]["image"] == read_image(PNG)


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
    bomb = bytearray(PNG)
    bomb[16:24] = (60000).to_bytes(4, "big") * 2  # the size that the header claims
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(BadImage, match=r"too large|more than data\.max_image_pixels"):
        read_image(bytes(bomb))
    with pytest.raises(BadImage, match="one side is more than 200 times the other"):
        read_image(saved(Pillow.new("RGB", (401, 2))))


def test_the_same_pixels_are_the_same_image() -> None:
    """Whatever they come as, so that features are computed once."""
    array = read_image(PIXELS)
    assert array == read_image(Pillow.fromarray(PIXELS))
    assert len({array.sha256, read_image(PIXELS + 1).sha256}) == 2
