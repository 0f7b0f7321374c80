"""The sight task: walls, their pictures, and demonstrations."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from agenttrain.data.bundled import demonstrations, sight
from agenttrain.data.bundled.demonstrations import Habits
from agenttrain.data.tasks import to_task
from agenttrain.tools.builtin.crop import Crop
from agenttrain.tools.tool import FunctionTool
from agenttrain.types import Task, ToolContext

ROWS = [sight.row("train", index, 0) for index in range(300)]
FAULTLESS = Habits(give_up=0, follow_chain=1, confuse=0, misname=0, miscopy=0)


def colours_in(picture: Any) -> Counter[str]:
    """The number of pixels of each colour of the game."""
    pixels = np.asarray(picture).reshape(-1, 3)
    return Counter(
        {
            name: count
            for name, rgb in sight.COLOURS.items()
            if (count := int((pixels == rgb).all(axis=1).sum()))
        }
    )


def test_a_code_is_the_colours_of_the_plates_in_reading_order() -> None:
    row = next(row for row in ROWS if row["plates"] == 2)
    first, second = sight.plates_of(row["wall"])
    assert sight.QUARTERS.index(first.quarter) < sight.QUARTERS.index(second.quarter)
    assert row["answer"] == " ".join((*first.colours, *second.colours))
    # 16 x 16 pixels of each cell of the picture.
    expected = Counter({c: 256 * n for c, n in Counter(row["answer"].split()).items()})
    assert colours_in(sight.draw(row["wall"])) == expected


def test_a_closer_look_shows_the_plate_of_its_quarter_alone() -> None:
    for row in ROWS[:40]:
        plates = {plate.quarter: plate for plate in sight.plates_of(row["wall"])}
        for quarter in sight.QUARTERS:
            shown = sight.look(row, quarter)
            assert shown.size == (32, 32)
            plate = plates.get(quarter)
            # Seven pixels of a cell at least are of its colour alone after scaling by a half.
            own = {c for c, n in colours_in(shown).items() if n >= 49}
            assert own == (set(plate.colours) if plate else set())


def test_the_overview_has_no_colours_and_is_brighter_at_plates() -> None:
    for row in ROWS[:40]:
        (image,) = row["images"]
        pixels = np.asarray(image).astype(int)
        assert (pixels == pixels[..., :1]).all()
        brightest = {
            name: pixels[16 * (i // 2) :, 16 * (i % 2) :][:16, :16].max()
            for i, name in enumerate(sight.QUARTERS)
        }
        plates = {plate.quarter for plate in sight.plates_of(row["wall"])}
        empty = max(v for name, v in brightest.items() if name not in plates)
        assert all(brightest[name] > empty for name in plates)


def test_rows_depend_on_their_split_seed_and_number_alone() -> None:
    assert ROWS[3] == sight.row("train", 3, 0)
    assert 0.4 < sum(row["plates"] == 1 for row in ROWS) / 300 < 0.6
    walls = list(sight.WALLS.values())
    assert all(one.stop <= other.start for one, other in pairwise(walls))
    codes = Counter(row["answer"] for row in ROWS if row["plates"] == 1)
    assert len(codes) > 30  # of 36
    with pytest.raises(ValueError, match="split='no': must be one of train, tune, test"):
        sight.row("no", 0, 0)
    with pytest.raises(ValueError, match="blank='some': must be one of looks, all, or null"):
        sight.row("test", 0, 0, blank="some")


def test_blank_pictures_show_nothing() -> None:
    plain, looks, blank = (sight.row("test", 5, 0, kind) for kind in (None, "looks", "all"))
    assert plain["answer"] == looks["answer"] == blank["answer"]
    assert plain["images"] == looks["images"]
    assert np.ptp(np.asarray(blank["images"][0])) == 0
    for row in (looks, blank):
        assert all(
            np.ptp(np.asarray(sight.look(row, q)), axis=(0, 1)).max() == 0 for q in sight.QUARTERS
        )


def test_the_tool_takes_the_names_of_quarters() -> None:
    tool = FunctionTool(Crop(look="agenttrain.data.bundled.sight.look"), name="crop")
    assert tool.schema["function"]["parameters"]["properties"]["part"]["enum"] == [*sight.QUARTERS]
    task = Task(task_id="t", messages=(), columns=ROWS[0])
    context = ToolContext(task=task, rollout_id="r", turn=0, call_id="c")
    image = Crop(look=sight.look)("top left", context)
    assert image == sight.look(ROWS[0], "top left")


def test_demonstrations_without_faults_read_the_code() -> None:
    for row in ROWS[:40]:
        messages = demonstrations.sight_demonstration(row, random.Random(0), FAULTLESS)
        (final,) = messages[-1]["tool_calls"]
        assert final["function"]["arguments"] == {"answer": row["answer"]}
        assert len(messages) == 2 * row["plates"] + 1


def test_demonstrators_often_miss_the_second_plate() -> None:
    right = Counter[int]()
    for row in ROWS:
        messages = demonstrations.sight_demonstration(row, random.Random(row["wall"]))
        (final,) = messages[-1]["tool_calls"]
        right[row["plates"]] += final["function"]["arguments"]["answer"] == row["answer"]
    assert 0.4 < right[1] / sum(row["plates"] == 1 for row in ROWS) < 0.7
    assert 0.2 < right[2] / sum(row["plates"] == 2 for row in ROWS) < 0.35


def test_a_demonstration_is_a_task_with_its_images() -> None:
    row = demonstrations.row("sight", "train", 2, 0, habits={"give_up": 0, "confuse": 0})
    task = to_task(row, 2)
    assert [message["role"] for message in task.messages][:3] == ["user", "assistant", "tool"]
    assert [part["type"] for part in task.messages[0]["content"]] == ["image", "text"]
    assert [part["type"] for part in task.messages[2]["content"]] == ["image"]
