"""`data=hub`: the commit of a data set is pinned, and what the hub answers is one message."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
import yaml
from huggingface_hub import HfFileSystem, constants
from stub_hub import StubHub

from agenttrain import cli
from agenttrain.utils.hub import data_commit

NAME = "org/sums"
ROWS = ("data=hub", f"data.path={NAME}", "data.test_fraction=0.5")
OWN = ("tools=[]", "stop_tools=[]", "reward=[exact_match]", "reward.exact_match.tool=null")
CHECK = ("check", "experiment=shop", "eval.group_by=null", *OWN, *ROWS)


def files(answer: int = 2) -> dict[str, bytes]:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + answer - 1)} for n in range(1, 5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return {"train.jsonl": text.encode(), "README.md": b"# sums\n"}


@pytest.fixture
def hub(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubHub:
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    HfFileSystem.clear_instance_cache()
    data_commit.cache_clear()
    return hub


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    data_commit.cache_clear()
    capsys.readouterr()
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_pinned_to_a_commit_of_its_data(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.publish(f"datasets/{NAME}", files())
    short = ("debug=tiny", "steps=1", "tracker=none", "eval.questions=0", "hydra.run.dir=out")
    assert cli.main(["train", *CHECK[1:], *short]) == 0
    data = yaml.safe_load(Path("out/config.yaml").read_text())["data"]
    assert [part["revision"] for part in (data, data["train"], data["test"])] == [commit] * 3
    hub.publish(f"datasets/{NAME}", files(answer=3))  # main has moved on
    data_commit.cache_clear()
    assert cli.main(["resume=out", "steps=2"]) == 0
    records = Path("out/rollouts/step-000002.jsonl").read_text().splitlines()
    columns = [json.loads(record)["columns"] for record in records]
    assert {column["answer"] for column in columns} <= {"2", "3", "4", "5"}
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # the rows are in the cache
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    data_commit.cache_clear()
    assert cli.main(["resume=out", "steps=3"]) == 0
    other = "0" * 40
    message = errors(capsys, *CHECK, f"data.revision={other}")
    assert f"data.train.revision={other}: the cache of datasets (HF_HOME) has another" in message
    assert commit in message
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.close()  # refused connections are no reason to take another commit either
    assert f"data.train.revision={other}: " in errors(capsys, *CHECK, f"data.revision={other}")


@pytest.mark.slow
def test_answers_of_the_hub(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"agenttrain: data.path={NAME}: "
    assert errors(capsys, *CHECK) == (
        f"{start}there is no such folder, and {hub.url} has no such data set; if it is private, "
        "set HF_TOKEN to a token that may read it\n"
    )
    hub.publish(f"datasets/{NAME}", files())
    assert errors(capsys, *CHECK, "data.revision=v9") == (
        f"{start}the hub has no revision v9 of it; set data.revision to one that it has\n"
    )
    hub.publish(f"datasets/{NAME}", files(), gated=True)
    assert errors(capsys, *CHECK) == (
        f"{start}the data set is gated; accept its terms at {hub.url}/datasets/{NAME}, and set "
        "HF_TOKEN to a token of the account that did\n"
    )
    hub.publish(f"datasets/{NAME}", files(), token="hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not know the token (401)" in errors(capsys, *CHECK)
    monkeypatch.delenv("HF_TOKEN")
    hub.publish(f"datasets/{NAME}", files())
    hub.fail("/api/datasets/", status=403)
    assert f"{start}the token may not read it (403)" in errors(capsys, *CHECK)
    hub.faults.clear()
    hub.fail("/api/datasets/", status=503)
    assert f"{start}{hub.url} answers with status 503, 3 times in a row" in errors(capsys, *CHECK)
    hub.faults.clear()
    hub.fail("/resolve/", status=403)
    message = errors(capsys, *CHECK, "data.revision=main")
    assert f"data.train.path={NAME}: the token may not read it (403)" in message, message
