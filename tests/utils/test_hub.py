"""Models of the hub: what is fetched when, and one message for each failure."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants
from stub_hub import StubHub, bundled_files

from agenttrain.types import ConfigError
from agenttrain.utils.hub import has_weights, is_hub_id, snapshot
from agenttrain.utils.model_path import model_folder, template_file, weights_folder

NAME = "Qwen/Qwen3-0.6B"
WEIGHTS = "/resolve/.*safetensors"


def downloads(hub: StubHub, ending: str) -> int:
    return sum(r.startswith("GET") and r.endswith(ending) for r in hub.requests)


def error(path: str = NAME, *, revision: str | None = None) -> str:
    snapshot.cache_clear()
    with pytest.raises(ConfigError) as caught:
        weights_folder(path, revision=revision)
    text = str(caught.value)
    assert text.startswith(f"model.path={path}: ")
    assert "\n" not in text
    return text.partition(": ")[2]


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        *(("Qwen/Qwen3-0.6B", True), ("my/model", True), ("qwen", False), ("./my/model", False)),
        *(("/my/model", False), ("~/model", False), ("a/b/c", False), ("bundled:shop", False)),
        *(("outputs/", False), ("../model", False)),
    ],
)
def test_an_id_has_an_owner_and_a_name(path: str, is_id: bool) -> None:
    assert is_hub_id(path) == is_id


def test_a_folder_wins_over_an_id(hub: StubHub) -> None:
    hub.publish(NAME)
    shutil.copytree(model_folder("bundled:calculator"), NAME)
    assert weights_folder(NAME) == Path(NAME)
    assert hub.requests == []


def test_light_commands_fetch_no_weights(hub: StubHub) -> None:
    commit = hub.publish(NAME)
    folder = model_folder(NAME)
    assert folder.name == commit
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        name for name in bundled_files() if name != "model.safetensors"
    )
    assert not has_weights(folder)
    assert downloads(hub, ".safetensors") == 0


def test_files_of_other_libraries_are_left_out(hub: StubHub) -> None:
    others = {"original/consolidated.00.pth": b"x", "onnx/model.safetensors": b"x", "a.gguf": b"x"}
    hub.publish(NAME, {**bundled_files(), "pytorch_model.bin": b"x", **others})
    folder = weights_folder(NAME)
    assert {file.name for file in folder.iterdir()} == {*bundled_files()}


def test_a_commit_in_the_cache_needs_no_network(hub: StubHub) -> None:
    commit = hub.publish(NAME)
    weights_folder(NAME)
    before = len(hub.requests)
    snapshot.cache_clear()
    assert weights_folder(NAME, revision=commit).name == commit
    assert len(hub.requests) == before


def test_a_branch_is_taken_from_the_cache_where_the_hub_cannot_be_reached(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.publish(NAME)
    weights_folder(NAME)
    hub.fail(".*", status=503)
    snapshot.cache_clear()
    assert weights_folder(NAME).name == commit
    snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert weights_folder(NAME).name == commit


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: StubHub) -> None:
    old = hub.publish(NAME, {**bundled_files(), "note.txt": b"old"}, revision="v1")
    new = hub.publish(NAME)
    assert model_folder(NAME, revision="v1").name == old
    assert model_folder(NAME).name == new
    assert (model_folder(NAME, revision=old) / "note.txt").read_text() == "old"


def test_the_size_is_printed_before_the_download(
    hub: StubHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub.publish(NAME)
    assert has_weights(weights_folder(NAME))
    line = capsys.readouterr().out
    # 1,314,984 bytes of weights, rounded
    size = f"{len(bundled_files()['model.safetensors']) / 1e6:.1f} MB"
    assert f"model.path={NAME}: downloading {size} of weights to {tmp_path}/hf/hub" in line
    assert "are free" in line
    weights_folder(NAME)
    assert capsys.readouterr().out == ""
    assert downloads(hub, "model.safetensors") == 1


def shards() -> dict[str, bytes]:
    files = bundled_files()
    weights = files.pop("model.safetensors")
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return {**files, names[0]: weights[:1000], names[1]: weights[1000:]}


@pytest.mark.slow  # huggingface_hub waits longer before every try
def test_a_second_try_goes_on_with_the_files_that_are_missing(hub: StubHub) -> None:
    hub.publish(NAME, shards())
    hub.fail("00002-of.*", status=500)
    assert "answers with status 500, 3 times in a row" in error()
    assert not has_weights(model_folder(NAME))
    hub.faults.clear()
    hub.requests.clear()
    assert has_weights(weights_folder(NAME))
    assert downloads(hub, "00001-of-00002.safetensors") == 0
    assert downloads(hub, "00002-of-00002.safetensors") == 1


@pytest.mark.parametrize("path", ["/api/", "/tree/", "config.json", WEIGHTS])
def test_a_hub_that_is_out_of_order_for_a_moment_is_asked_again(hub: StubHub, path: str) -> None:
    hub.publish(NAME)
    hub.fail(path, status=503, times=2)
    assert has_weights(weights_folder(NAME))


def test_a_truncated_download_is_completed(hub: StubHub) -> None:
    hub.publish(NAME)
    hub.fail(WEIGHTS, truncate=5000, times=2)  # its HEAD, and the first GET
    folder = weights_folder(NAME)
    assert (folder / "model.safetensors").read_bytes() == bundled_files()["model.safetensors"]


def test_a_model_that_does_not_exist(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish(NAME)
    model_folder(NAME)
    remedy = f"{hub.url} has no such model (did you mean '{NAME}'?)"
    assert remedy in error("Qwen/Qwen3-0.6")
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    text = error("Qwen/Qwen3-0.6")
    assert remedy in text
    assert "set HF_TOKEN to a token that may read it" in text


def test_a_gated_model(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish("meta-llama/Llama-3.2-1B-Instruct", gated=True)
    for token in (None, "hf_known"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        text = error("meta-llama/Llama-3.2-1B-Instruct")
        assert f"accept its terms at {hub.url}/meta-llama/Llama-3.2-1B-Instruct" in text


def test_a_private_model_and_a_wrong_token(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish("me/private", token="hf_right")
    assert "if it is private, set HF_TOKEN" in error("me/private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    text = error("me/private")
    assert "does not know the token (401)" in text
    assert "hf_wrong" not in text
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert has_weights(weights_folder("me/private"))


def test_a_token_without_the_right(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_narrow")
    hub.fail("/api/", status=403)
    assert "the token may not read it (403)" in error()


def test_a_revision_that_does_not_exist(hub: StubHub) -> None:
    hub.publish(NAME)
    text = "the hub has no revision v9 of it; set {}.revision to one that it has"
    assert error(revision="v9") == text.format("model")
    with pytest.raises(ConfigError, match=text.format("chat_template")):
        model_folder(NAME, (), revision="v9", key="chat_template.path")


def test_a_hub_that_stays_out_of_order(hub: StubHub) -> None:
    hub.publish(NAME)
    hub.fail("/api/", status=502)
    text = error()
    assert f"{hub.url} answers with status 502, 3 times in a row" in text
    assert f"`hf download {NAME}`" in text
    hub.faults.clear()
    hub.fail("/api/", status=429)  # not asked again
    assert f"{hub.url} answers with status 429; try again later" in error()


def test_a_connection_that_is_refused(hub: StubHub) -> None:
    hub.close()
    text = error()
    assert f"{hub.url} cannot be reached" in text
    assert f"run `hf download {NAME}` where there is a network" in text


def test_offline_and_not_in_the_cache(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = error()
    assert "it is not in the cache of the hub, and HF_HUB_OFFLINE is set" in text
    assert f"`hf download {NAME}`" in text


def test_tokenizer_and_weights_of_different_revisions_are_refused(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.publish(NAME)
    weights_folder(NAME)
    new = hub.publish(NAME, {**bundled_files(), "note.txt": b"new"})
    snapshot.cache_clear()
    model_folder(NAME)  # as `agenttrain check` does: no weights
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = error()
    assert f"the cache has no weights of revision {new}" in text
    assert f"it has those of {old}: set model.revision to that" in text


def test_a_full_disk(hub: StubHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.publish(NAME)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    text = error()
    assert f"the disk of the cache ({tmp_path}/hf/hub) is full" in text
    assert "set HF_HOME to a folder on another disk" in text
    assert downloads(hub, ".safetensors") == 0


def test_a_repository_without_weights_for_transformers(hub: StubHub) -> None:
    files = {name: text for name, text in bundled_files().items() if "safetensors" not in name}
    hub.publish("me/model-GGUF", {**files, "model.gguf": b"x"})
    assert "has no weights that transformers reads" in error("me/model-GGUF")
    hub.publish("me/data", {"README.md": b"no model"})
    assert "there is no config.json in that model of the hub" in error("me/data")


def test_a_revision_of_a_folder_or_a_number_is_refused(hub: StubHub) -> None:
    with pytest.raises(ConfigError, match=r"model.path=bundled:shop is no model of the hub"):
        model_folder("bundled:shop", revision="main")
    with pytest.raises(ConfigError, match=r"model.revision=7: expected a text; quote it"):
        model_folder(NAME, revision=7)  # type: ignore[arg-type]


def test_the_template_of_a_model_of_the_hub(hub: StubHub) -> None:
    hub.publish(NAME)
    assert template_file(NAME).name == "chat_template.jinja"
    files = bundled_files()
    del files["chat_template.jinja"]
    hub.publish("me/older", files)
    assert template_file("me/older").name == "tokenizer_config.json"


FETCH = f"from agenttrain.utils.model_path import weights_folder; print(weights_folder('{NAME}'))"


def process(hub: StubHub, home: Path) -> subprocess.Popen[str]:
    # On a busy machine the server in this process answers late; a retry would count as a download.
    patient = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "60")
    environment = {**os.environ, **hub.environment(home, **patient)}
    command = [sys.executable, "-c", FETCH]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_killed_download_leaves_a_cache_that_works(hub: StubHub, tmp_path: Path) -> None:
    hub.publish(NAME)
    hub.fail(WEIGHTS, seconds_per_block=0.5, times=2)  # 1.3 MB take 40 s
    killed = process(hub, tmp_path / "hf")
    deadline = time.monotonic() + 60
    while not downloads(hub, ".safetensors") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not has_weights(model_folder(NAME))
    weights = weights_folder(NAME) / "model.safetensors"
    assert weights.read_bytes() == bundled_files()["model.safetensors"]


@pytest.mark.slow
def test_one_of_several_processes_downloads(hub: StubHub, tmp_path: Path) -> None:
    hub.publish(NAME)
    hub.fail(WEIGHTS, seconds_per_block=0.02)  # 1.3 MB take 1.6 s
    outputs = [one.communicate()[0] for one in [process(hub, tmp_path / "hf") for _ in range(2)]]
    assert sorted("downloading" in output for output in outputs) == [False, True]
    assert len({output.split()[-1] for output in outputs}) == 1
    assert downloads(hub, ".safetensors") == 1
