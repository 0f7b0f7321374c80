"""What is looked at before a run starts: template, response schema, and the first prompts."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from agenttrain.cli import main
from agenttrain.data.bundled import shop
from agenttrain.data.tasks import GeneratedRows, TaskSource
from agenttrain.engines.routers import UnknownRouters
from agenttrain.runs.loading import check_model
from agenttrain.runs.sampling import engine_inputs
from agenttrain.settings.checks import check_for_verb
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.machine import machine_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import model_folder

REFUSES = "{%- for m in messages if m.role == 'system' %}{{ raise_exception('no') }}{%- endfor %}"
LEAVES_OUT = tiny.TEMPLATE.replace("messages[0].role == 'system'", "false").replace(
    "or (m.role == 'system' and not loop.first)", ""
)
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def check(folder: Path, template: str, rows: list[dict[str, Any]], *more: str) -> int:
    """`agenttrain check` of a run without tools on these rows."""
    model = folder / "model"
    tokenizer = copy.copy(tiny.tokenizer())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    shutil.copy(model_folder("bundled:shop") / "config.json", model)
    (model / "model.safetensors").write_bytes(b"")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.{split}.path={path}" for split in ("train", "test")]
    run = ["experiment=none", "model=folder", f"model.path={model}", "data=file", "tools=[]"]
    return main(["check", *run, *data, "stop_tools=[]", "reward.exact_match.tool=null", *more])


def test_rows_whose_message_is_left_out_can_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = [
        {"prompt": "1 + 1?", "answer": "2"},
        {"messages": SYSTEM, "answer": "4"},
        {"prompt": "2 + 2?", "answer": "4"},
    ]
    assert check(tmp_path, LEAVES_OUT, rows, "data.on_bad_row=skip") == 0
    shown = capsys.readouterr().out
    where = f"{tmp_path / 'rows.jsonl'}, line 2: "
    assert "1 of 3 rows are left out" in shown and where in shown
    assert "the first 2 of data.train" in shown
    assert check(tmp_path, LEAVES_OUT, rows[1:2], "data.on_bad_row=skip") == 2
    assert "not one row is left" in capsys.readouterr().err


def test_a_row_that_holds_its_answer_is_no_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    answered = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    rows = [
        {"prompt": "2 + 2?", "answer": "4"},
        {"messages": answered, "answer": "2"},
        {"messages": [*answered, {"role": "user", "content": "3 + 3?"}], "answer": "6"},
    ]
    assert check(tmp_path, tiny.TEMPLATE, rows) == 2
    shown = capsys.readouterr().err
    assert f"data.train: {tmp_path / 'rows.jsonl'}, line 2: " in shown
    assert "agenttrain sft" in shown and "data.on_bad_row=skip" in shown
    assert check(tmp_path, tiny.TEMPLATE, rows, "data.on_bad_row=skip") == 0
    assert "1 of 3 rows are left out" in capsys.readouterr().out


def test_a_source_without_some_rows_keeps_their_ids_and_places() -> None:
    source = TaskSource([{"prompt": text} for text in "abcd"], shuffle=True)
    source.leave_out({1}, "one")
    assert [source.row(n).task_id for n in range(len(source))] == ["0", "2", "3"]
    assert source.where(1) == "data row 2" == source.place_of(source.row(1))
    assert sorted(source.index(n) for n in range(3)) == [0, 1, 2]
    endless = TaskSource(GeneratedRows(lambda index: {"prompt": f"{index}?"}))
    assert endless.place_of(endless.row(900)) == "data row 900"
    assert endless.place_of(source.row(0)) is None


def test_prompts_that_render_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"messages": SYSTEM, "answer": "4", "user_turns": ["3 + 3?"]}, {"prompt": "1 + 1?"}]
    assert check(tmp_path, tiny.TEMPLATE, rows) == 0
    # <s> user \n 1 ␣+ ␣ 1 ? </s> \n <s> assistant \n is the shorter prompt
    assert "the first 2 of data.train have 13 to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (REFUSES + tiny.TEMPLATE, {"messages": SYSTEM}, "refuses system messages (no), and this"),
        (
            LEAVES_OUT,
            {"messages": SYSTEM},
            "leaves out the text of this message of the role system",
        ),
        (
            "{%- if messages[0].role != 'user' %}{{ raise_exception('user first') }}{%- endif %}"
            + tiny.TEMPLATE,
            {"messages": [{"role": "assistant", "content": "Hi."}, SYSTEM[1]]},
            "refuses messages of the roles ['assistant', 'user']: user first",
        ),
    ],
)
def test_a_row_that_the_template_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture, template: str, row: dict, message: str
) -> None:
    rows = [{"prompt": "1 + 1?"}, {"task_id": "second", **row}]
    assert check(tmp_path, template, rows) == 2
    found = capsys.readouterr()
    assert "certificate passed" in found.out
    where = (f"{tmp_path / 'rows.jsonl'}, line 2: ", "task second: ")
    assert found.err.startswith(tuple(f"agenttrain: data.train: {row}" for row in where))
    assert message in found.err


def test_a_later_user_turn_that_the_template_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    template = tiny.TEMPLATE.replace(
        "{%- for m in messages %}",
        "{%- if messages | length > 6 %}{{ raise_exception('too many') }}{%- endif %}"
        "{%- for m in messages %}",
    )
    rows = [{"task_id": "talk", "prompt": "1 + 1?", "user_turns": ["and?"] * 3}]
    assert check(tmp_path, template, rows) == 2
    assert "rows.jsonl, line 1: the chat template refuses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        ("chat_template", "{% if a %}\n{{ b }", "has a syntax error in line 2: unexpected '}'"),
        ("response_schema", "call_open: <call>\ncall_clos: </call>", "did you mean call_close"),
        ("response_schema", "{", "cannot be read"),
    ],
)
def test_a_broken_file_is_told_before_tokenizer_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture, group: str, text: str, message: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    assert main(["check", f"{group}=file", f"{group}.path={path}"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert f"agenttrain: {group}.path={path}" in found.err
    assert message in found.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distributed=ddp"], "distributed=ddp: there is no GPU here"),
        (["training.mixed_precision=fp16"], "training.mixed_precision=fp16: needs a GPU"),
        (["model.lora.rank=4", "model.lora.targets=[q]"], "Qwen3ForCausalLM has no module q"),
        (
            ["eval.group_by=hop"],
            "eval.group_by=hop: the rows of data.test have no such column",
        ),
        (["engine.max_context=4096"], "must lie between 2 and the model's 1024 positions"),
        (
            ["engine.max_context=30", "rollout.max_turn_tokens=8"],
            "data.train: the prompts of all 16 tasks that are drawn first leave no room: they have "
            "35 tokens or more, and the context is engine.max_context=30; raise it, or give short",
        ),
    ],
)
def test_check_and_run_refuse_the_same(
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agenttrain.launch.processes.count_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    assert main(["check", *overrides]) == 2
    assert message in capsys.readouterr().err
    assert main([f"hydra.run.dir={tmp_path}/run", *overrides, "tracker=none"]) != 0
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("run/rollouts/*"))


def test_everything_that_stands_against_a_run_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agenttrain.launch.processes.count_gpus", lambda: 0)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("steps: 1\n")
    wrong = ["distributed=fsdp2", f"hydra.run.dir={folder}", "eval.group_by=hop"]
    assert main(["check", *wrong]) == 2
    found = capsys.readouterr()
    assert "certificate passed" in found.out
    first, second, third = found.err.splitlines()
    assert "eval.group_by=hop" in first
    assert "distributed=fsdp2: there is no GPU here" in second
    assert "holds a run already" in third


def test_single_prompts_without_room_are_counted(capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "engine.max_context=36", "rollout.max_turn_tokens=8"]) == 0
    told = "note: 7 of the first 8 of data.train fill the context of 36 tokens and would be left"
    assert told in capsys.readouterr().out


def test_weights_that_were_copied_in_part(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder("bundled:shop"), model)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["check", f"model.path={model}"]) == 2
    assert "index.json names model-2.safetensors, which the folder lacks" in capsys.readouterr().err
    (model / "config.json").write_text("{}")
    assert main(["check", f"model.path={model}"]) == 2
    assert f"model.path={model}: cannot be loaded: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_test_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [shop.row("train", 0, index) for index in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=file", "data.train.path=rows.jsonl"]
    short = ["debug=tiny", "steps=1", "tracker=none", "hydra.run.dir=run"]
    assert main([*data, *short]) == 0
    told = "data.test: names no rows, so evaluations are left out; data.test_fraction=0.1 holds"
    assert capsys.readouterr().out.count(told) == 1
    assert read_summary(Path("run"))["eval"]["after"] == {"scores": []}
    # The setting stays as it was: with rows the run can be evaluated.
    assert yaml.safe_load(Path("run/config.yaml").read_text())["eval"]["questions"] == 4
    assert main(["eval", "run=run"]) == 2
    assert "data.test: names no rows to evaluate on; add data.test.path" in capsys.readouterr().err
    assert main(["check", "resume=run", "steps=2"]) == 0
    assert told in capsys.readouterr().out
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert main(["check", "resume=run", "steps=2"]) == 2
    assert "rows of data.train changed" in capsys.readouterr().err


def machine(gpus: int) -> Callable[[], int]:
    return lambda: gpus


def run_with(*overrides: str) -> RunConfig:
    with hydra_session(Source()):
        return compose_run(open_keys(overrides), Source()).config


def test_a_machine_is_looked_at_only_where_settings_depend_on_it() -> None:
    def never() -> int:
        raise AssertionError("torch would be imported")

    assert machine_problems("check", [run_with()], never) == []
    ddp = run_with("distributed=ddp", "training.mixed_precision=fp16")
    for verb in ("check", "train", "sft", "eval"):
        assert len(machine_problems(verb, [ddp, ddp], machine(0))) == 2
        assert machine_problems(verb, [ddp], machine(2)) == []
    assert machine_problems("plan", [ddp], never) == []


def test_servers_of_a_role_leave_the_gpu_of_a_policy_that_samples_apart() -> None:
    judged = ("reward=[judge]", "reward.judge.url=role:judge", "roles.judge.model=/models/judge")
    ahead = ("async_training.max_staleness=1", "weight_sync.mode=abort_resume")

    def refused(*overrides: str) -> list[str]:
        lines = machine_problems("train", [run_with(*judged, *overrides)], machine(2))
        return [line for line in lines if line.startswith("roles.judge.count")]

    assert refused() == []
    (line,) = refused(*ahead)
    assert "the servers need 1 GPUs beside the 2 of the trainer, and this machine has 2" in line


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        ((), 1, None),
        (("async_training.max_staleness=1", "weight_sync.mode=in_flight"), 1, None),
        (("servers.gpus=[0]",), 1, None),
        (("servers.gpus=[1]",), 1, "servers.gpus=[1]: this machine's GPUs are 0 to 0"),
        (("servers.gpus=[0]",), 2, "servers.gpus=[0]: GPU 0 is the trainer's; leave it out"),
        (("servers.count=2",), 1, "the servers need 2 GPUs beside the trainer's"),
        (("servers.tensor_parallel_size=2",), 1, "the servers need 2 GPUs beside the trainer's"),
        (("distributed=ddp",), 1, "the servers need 1 GPUs beside the trainer's"),
        (
            ("reward=[judge]", "reward.judge.url=role:judge", "roles.judge.model=/models/judge"),
            1,
            "servers.count=1 roles.judge.count=1: with servers.tensor_parallel_size=1",
        ),
        (
            ("weight_sync.transport=nccl",),
            1,
            "weight_sync.transport=nccl: NCCL connects no two processes on one GPU",
        ),
        (("weight_sync.transport=nccl",), 2, None),
    ],
)
def test_one_server_may_have_the_gpu_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], gpus: int, message: str | None
) -> None:
    monkeypatch.setattr("agenttrain.engines.vllm_server.spec.find_spec", lambda name: object())
    config = run_with("engine=vllm_server", *overrides)
    for verb in ("check", "train", "eval"):
        problems = machine_problems(verb, [config], machine(gpus))
        assert len(problems) == (message is not None)
        assert message is None or message in problems[0]


def test_vllm_has_as_many_gpus_as_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = run_with("engine=vllm", "engine.tensor_parallel_size=4")
    monkeypatch.setattr("agenttrain.engines.vllm.spec.find_spec", lambda name: None)
    (line,) = machine_problems("check", [shared], machine(2))
    assert line.startswith("engine=vllm: vLLM is not installed here")
    assert machine_problems("sft", [shared], machine(2)) == []
    monkeypatch.setattr("agenttrain.engines.vllm.spec.find_spec", lambda name: object())
    (line,) = machine_problems("check", [shared], machine(2))
    assert line == "engine.tensor_parallel_size=4: this machine has 2 GPUs; lower it"
    assert machine_problems("check", [shared], machine(4)) == []


def test_vllm_returns_experts_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agenttrain.engines.vllm.spec.find_spec", lambda name: object())
    replayed = run_with("engine=vllm", "algorithm.router_replay=rollout")
    (line,) = machine_problems("check", [replayed], machine(0))
    assert line.startswith("algorithm.router_replay=rollout: engine=vllm returns")
    assert "set engine=transformers" in line
    assert machine_problems("check", [replayed], machine(1)) == []
    assert machine_problems("eval", [replayed], machine(0)) == []  # it records none


def test_only_training_replays_experts() -> None:
    compiled = run_with("training.compile=true", "algorithm.router_replay=rollout")
    for verb in ("eval", "play", "serve", "sft"):
        check_for_verb(verb, compiled)
    for verb in ("train", "plan"):
        with pytest.raises(ConfigError) as refused:
            check_for_verb(verb, compiled)
        assert str(refused.value).startswith("algorithm.router_replay=rollout: compiled layers ")


@pytest.mark.parametrize(("verb", "recorded"), [("train", True), ("eval", False)])
def test_only_engines_of_training_record_experts(verb: str, recorded: bool, tmp_path: Path) -> None:
    config = run_with("engine=vllm", "algorithm.router_replay=rollout")
    inputs = engine_inputs(config, None, tmp_path, on_gpu=True, rank=0, verb=verb)
    assert inputs.record_routes is recorded


def test_experts_are_not_looked_for_in_an_evaluation() -> None:
    """The bundled agent has none."""
    config = run_with("algorithm.router_replay=rollout")
    check_model(config, "eval")
    with pytest.raises(UnknownRouters):
        check_model(config, "train")


def test_adapters_need_a_base_model_with_experts(tmp_path: Path) -> None:
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]}
    described["base_model_name_or_path"] = str(model_folder("bundled:shop"))
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    (tmp_path / "adapter_model.safetensors").touch()
    shutil.copy(model_folder("bundled:shop") / "tokenizer.json", tmp_path)
    words = (f"model.path={tmp_path}", "model.lora.rank=4")
    check_model(run_with(*words), "train")
    with pytest.raises(UnknownRouters, match="has no layer that chooses experts"):
        check_model(run_with(*words, "algorithm.router_replay=rollout"), "train")


def test_a_broadcast_of_weights_goes_from_gpu_to_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "weight_sync.transport=nccl"
    monkeypatch.setattr("agenttrain.engines.vllm_server.spec.find_spec", lambda name: object())
    outside = run_with("engine=vllm_server", key, "servers.admin_urls=[http://a:1]")
    (line,) = machine_problems("train", [outside], machine(0))
    assert line == (
        f"{key}: goes from the trainer's GPU to those of the servers, and there is no GPU here; "
        "set weight_sync.transport=files, or leave it out"
    )
    assert machine_problems("train", [outside], machine(1)) == []
    monkeypatch.setattr("agenttrain.engines.vllm_server.spec.find_spec", lambda name: None)
    (line,) = machine_problems("train", [outside], machine(1))
    assert line.startswith(f"{key}: vLLM is not installed here")


def test_a_folder_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "chat_template=file", f"chat_template.path={tmp_path}"]) == 2
    assert "is a folder; name the file in it" in capsys.readouterr().err
