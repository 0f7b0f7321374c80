"""The page that shows rollouts token by token."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from array import array
from pathlib import Path

import pytest
import tiny
from tracking_rollouts import VOCABULARY, call, decode, new, say

from agenttrain.tracking.rollouts import rollout_record
from agenttrain.tracking.viewer import render, token_texts
from agenttrain.types import Origin, StopReason, ToolError

SCRIPT = VOCABULARY[11]


def record() -> dict:
    rollout = new(0, 0.5)
    say(rollout, (5, 11, 2))
    call(rollout, 11, error=ToolError.exception)
    say(rollout, (10, 2), version=8)
    rollout.stop_reason = StopReason.completed
    rollout.rewards["style"] = None
    return rollout_record(rollout)


def test_text_of_models_and_tools_cannot_become_part_of_the_page():
    page = render([record()], decode, title="<b>mine</b> __DATA__")
    assert SCRIPT not in page and "<script>alert" not in page
    assert "&lt;b&gt;mine&lt;/b&gt; __DATA__" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    (shown,) = json.loads(data[1])
    (trajectory,) = shown["trajectories"]
    assert trajectory.pop("texts")[4:7] == ["add(3, 4)", SCRIPT, "</turn>"]
    assert shown == json.loads(json.dumps(record()))


def test_the_page_needs_no_other_file():
    page = render([record()], decode)
    assert re.findall(r"(?:src|href)\s*=|https?://|@import|url\(", page) == []


def test_a_character_of_several_tokens_stands_at_the_first():
    tokenizer = tiny.tokenizer()
    token_ids = tokenizer("é☃x")["input_ids"]
    assert len(token_ids) == 6  # byte-level: 2 + 3 + 1
    assert token_texts(token_ids, tokenizer.decode, {}) == ["é", "·", "☃", "·", "·", "x"]
    cut = token_ids[:3]
    assert token_texts(cut, tokenizer.decode, {}) == ["é", "·", "\ufffd"]


def dump(page: Path, fragment: str, profile: Path) -> str:
    """The page's elements after its script ran, or a skip where there is no browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: the page's script was not run")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--no-first-run", f"--user-data-dir={profile}", "--virtual-time-budget=3000",
        "--dump-dom", f"{page.as_uri()}#{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def scored() -> dict:
    """`record()` of a rollout that was trained on."""
    rollout = new(0, 0.5)
    say(rollout, (5, 11, 2))
    call(rollout, 11)
    say(rollout, (10, 2), version=8)
    rollout.stop_reason = StopReason.completed
    #                                add   script  </turn>  It is 7.  </turn>
    rollout.trajectories[0].trainer_logprobs = array("f", [-0.5, -0.75, -0.499, -0.5, -0.5])
    rollout.trajectories[0].entropies = array("f", [0.0, 1.5, 0.25, 0.5, 0.25])
    return rollout_record(rollout)


@pytest.mark.slow
def test_the_page_shows_the_gap_and_the_entropy_of_each_token(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(render([scored(), record()], decode), encoding="utf-8")
    shown = {}
    for colour in ("gap", "entropy"):
        dom = dump(page, f"0,{colour}", tmp_path / "profile")
        # .25 and .001 of five tokens; 2.5 nats in all
        assert "mean gap 0.0502 nats, the widest -0.25 at position 5 · mean entropy 0.5 nats" in dom
        tokens = re.findall(r'<i class="sampled"[^>]*>', dom)
        assert len(tokens) == 5
        assert "trainer -0.75   gap -0.25   entropy 1.5" in tokens[1]
        shown[colour] = [re.search(r"background: (.*?);", token)[1] for token in tokens]
    assert len(set(shown["gap"])) == 3 and shown["gap"][0] == shown["gap"][3]
    assert len(set(shown["entropy"])) == 4 and shown["entropy"][2] == shown["entropy"][4]
    unscored = dump(page, "1,gap", tmp_path / "profile")
    assert '<p class="dim stat">no gap and no entropy' in unscored
    assert not re.search(r'data-tip="[^"]*trainer', unscored)


def test_trajectories_stand_as_a_tree(tmp_path):
    rollout = new(0, 0.5)
    say(rollout, (5, 2))
    for parent, position, role in ((0, 5, "summary"), (0, 4, "main"), (1, 6, "notes")):
        branch = rollout.branch(parent, position, role=role)
        branch.append_context([7], Origin.tool)
    rollout.stop_reason = StopReason.completed
    page = tmp_path / "page.html"
    page.write_text(render([rollout_record(rollout)], decode), encoding="utf-8")
    dom = dump(page, "0", tmp_path / "profile")
    sections = re.findall(r'margin-left: (\d+)px;"><h3>(.*?)</h3>', dom)
    assert sections == [
        ("0", f"0 main: {rollout.trajectories[0].length} tokens"),
        ("20", "1 summary: 1 tokens after the first 5 of trajectory 0"),
        ("40", "3 notes: 1 tokens after the first 6 of trajectory 1"),
        ("20", "2 main: 1 tokens after the first 4 of trajectory 0"),
        ("0", "0 main: messages"),
        ("20", "1 summary: messages"),
        ("40", "3 notes: messages"),
        ("20", "2 main: messages"),
    ]


def test_the_page_in_a_browser(tmp_path):
    page = tmp_path / "page.html"
    records = [record(), {**record(), "task_id": "sum-2", "reward": None}]
    page.write_text(render(records, decode), encoding="utf-8")
    dom = dump(page, "1", tmp_path / "profile")
    assert "<h2>sum-2</h2>" in dom and "reward none (answer 0.5, style none)" in dom
    tips = re.findall(r'<i class="(\w+)"[^>]*data-tip="([^"]*)"[^>]*>([^<]*)</i>', dom)
    assert len(tips) == len(record()["trajectories"][0]["token_ids"])
    assert tips[5] == (
        "sampled",
        "id 11   position 5   sampled   turn 0\nlogprob -0.5   policy_version 7   advantage 0.5",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
    )
    assert tips[8][0] == "tool"
    assert '<td class="error">exception</td>' in dom
    assert dom.count('aria-current="true"') == 1
