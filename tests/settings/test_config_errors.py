"""What a wrong setting is answered with where files stand beside it, or several are wrong.

Settings that are wrong by themselves are in `tests/commands/command_lines.txt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from agenttrain.rewards.rubric import build_rubric
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, convert, hydra_session, open_keys
from agenttrain.settings.engine_checks import admit_engine
from agenttrain.settings.messages import elsewhere, setting_keys, suggest_key
from agenttrain.types import ConfigError


def refusal(*overrides: str, source: Source | None = None) -> str:
    """The text of the error that the overrides end in."""
    source = source or Source()
    with pytest.raises(ConfigError) as caught, hydra_session(source):
        validate(compose_run(open_keys(overrides), source).config)
    return str(caught.value)


def test_an_override_before_other_lines_of_a_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    lines = ["# @package _global_", "defaults:", "  - override /tools: []", "  - shop"]
    (tmp_path / "experiment" / "mine.yaml").write_text("\n".join(lines))
    text = refusal("experiment=mine", source=Source(extra=str(tmp_path)))
    assert text.startswith("defaults: ")


def test_a_word_that_is_no_setting() -> None:
    assert "rloo: settings are written key=value" in refusal("rloo")


# Settings that only a file can have: on a command line another answer comes first.
UNUSABLE = {
    "agent.command='a \"b'": "No closing quotation; quote the parts as in a shell, or write a list",
    "algorithm.objective.name=vespo": "algorithm.objective.low=0.2: no key of vespo; clip and geom",
    "reward={}": "choose one: reward=[exact_match]",
}


@pytest.fixture(scope="module")
def sound() -> DictConfig:
    """Settings that can run; composing them once for the whole table saves seconds."""
    with hydra_session(Source()):
        composed = compose_run(["tasks_per_step=12", "algorithm.kl.beta=0"], Source())
    validate(composed.config)
    return OmegaConf.create(composed.plain)


@pytest.mark.parametrize(("override", "expected"), UNUSABLE.items())
def test_what_cannot_run(sound: DictConfig, override: str, expected: str) -> None:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    changed = sound.copy()
    OmegaConf.update(changed, parsed.key_or_group, parsed.value(), merge=False, force_add=True)
    with pytest.raises(ConfigError) as caught:
        composed = convert(changed)
        validate(composed.config)
        admit_engine(composed, "train")
    (line,) = [line for line in str(caught.value).splitlines() if expected in line]
    assert ".".join(parsed.key_or_group.split(".")[:2]) in line


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train.path=no.jsonl"], "data.train.path=no.jsonl: there is no such file"),
        (
            ["data.train.path=rows.txt"],
            "data.train.path=rows.txt: its ending must be one of .jsonl",
        ),
        (["data.train.path=empty.jsonl"], "data.train.path=empty.jsonl: the file has no rows"),
        (["data.test.limit=0"], "data.test.limit=0: must be a whole number of at least 1"),
        (["data.test.limt=1"], "has no such argument (did you mean 'limit'?)"),
    ],
)
def test_a_file_of_rows_that_cannot_be_used(
    overrides: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("rows.jsonl", "{}"), ("rows.txt", "{}"), ("empty.jsonl", "")):
        Path(name).write_text(text)
    rows = [f"data.{split}.path=rows.jsonl" for split in ("train", "test")]
    keys = [override.partition("=")[0] for override in overrides]
    rows = [override for override in rows if override.partition("=")[0] not in keys]
    text = refusal("data=file", *rows, *overrides)
    assert expected in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "config.json"),
        (["config.json", "tokenizer.json"], "file of weights (*.safetensors, *.bin)"),
        (["config.json", "model.safetensors"], "tokenizer (tokenizer.json)"),
    ],
)
def test_a_model_folder_that_lacks_a_part(files: list[str], missing: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert refusal(f"model.path={tmp_path}") == (
        f"model.path={tmp_path}: there is no {missing} in that folder; give a folder that "
        "transformers' from_pretrained can load, bundled:shop, or an id of the hub"
    )


@pytest.mark.parametrize(
    ("saved", "overrides", "told"),
    [
        ('{"r": 4, "lora_alpha": 32}', ["model.lora.rank=4"], None),
        ('{"r": 4, "lora_alpha": 32}', [], "set model.lora.rank=4 model.lora.alpha=32 to go on"),
        (
            '{"r": 4, "lora_alpha": 8}',
            ["model.lora.rank=4"],
            "model.lora.rank=4 model.lora.alpha=8",
        ),
        ('{"peft_type": "IA3"}', ["model.lora.rank=4"], "is not peft's of LoRA ('r')"),
        ("{", [], "is not peft's of LoRA"),
    ],
)
def test_a_folder_of_adapters_has_its_own_rank(
    saved: str, overrides: list[str], told: str | None, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(saved)
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    command = [f"model.path={tmp_path}", *overrides]
    if told is None:
        with hydra_session(Source()):
            validate(compose_run(command, Source()).config)
    else:
        assert told in refusal(*command)


def test_the_divisors_of_a_large_batch_are_the_nearest() -> None:
    # 10**9 = 2**9 * 5**9; its divisors near 7 are 1, 2, 4, 5, 8, 10
    text = refusal("tasks_per_step=1000000000", "algorithm.minibatches=7")
    assert text.endswith("take one of 1, 2, 4, 5, 8, 10")


def test_the_wrong_value_is_repeated() -> None:
    assert refusal("algorithm.group_size=many").startswith("algorithm.group_size=many: ")
    assert refusal("algorithm.minibatches=7").startswith("algorithm.minibatches=7: ")


def test_all_problems_are_told_at_once() -> None:
    text = refusal("steps=0", "algorithm.group_size=1", "eval.top_p=2")
    assert [line.partition("=")[0] for line in text.splitlines()] == [
        "algorithm.group_size",
        "eval.top_p",
        "steps",
    ]


MAZE = "+environment.maze._target_=worlds.Maze"


@pytest.mark.parametrize(
    "overrides",
    [
        [MAZE, "reward=[]"],
        [MAZE, "+reward.environment.weight=0.5"],
        [MAZE, "stop_tools=[move]"],
        ["+tools.files._target_=file_tools.Files", "stop_tools=[write]"],
    ],
)
def test_environments_and_tools_that_work(overrides: list[str]) -> None:
    with hydra_session(Source()):
        validate(compose_run(open_keys(overrides), Source()).config)


def test_a_wrong_key_in_a_file_of_the_users_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("name: mine\ngroup_sise: 4\n")
    text = refusal("algorithm=mine", source=Source(extra=str(tmp_path)))
    assert text.startswith("algorithm.group_sise (in algorithm/mine.yaml): unknown key")
    assert "did you mean 'algorithm.group_size'?" in text


def test_a_broken_file_of_the_users_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    file = tmp_path / "algorithm" / "mine.yaml"
    file.write_text("name: mine\nbeta: [0.1\nkl: k1: k2\n")
    text = refusal("algorithm=mine", source=Source(extra=str(tmp_path)))
    assert text.startswith(f"{file}, line 3: is no YAML: ")


def written(folder: Path, files: dict[str, str]) -> Source:
    """A --config-dir with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Source(extra=str(folder))


TOOL = "{_target_: agenttrain.tools.builtin.calculator.add}"
BODY = f"""# @package _global_
tools: {{plus: {TOOL}, add: {TOOL}}}
reward: {{mine: {{_target_: agenttrain.rewards.builtin.answers.ExactMatch}}}}
"""


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        # A first line that was forgotten.
        (
            {"experiment/mine.yaml": "steps: 5\n"},
            ["experiment=mine"],
            "experiment=mine: its file lacks the first line `# @package _global_`, so that its "
            "keys would stand in a section 'experiment'; put that line at its top",
        ),
        (
            {"stop/mine.yaml": "stop_tools: [sql]\n"},
            ["stop=mine"],
            "stop=mine: its file lacks the first line `# @package _global_`",
        ),
        (
            {"tools/mine.yaml": "_target_: agenttrain.tools.builtin.calculator.add\n"},
            ["tools=[mine]", "stop_tools=[]"],
            "has no name; a file in tools/ begins with the line `# @package tools.<name>`",
        ),
        (
            {"reward/mine.yaml": "_target_: agenttrain.rewards.builtin.answers.ExactMatch\n"},
            ["reward=[mine]"],
            "has no name; a file in reward/ begins with the line `# @package reward.<name>`",
        ),
        # Emptied groups beside a body that stays.
        (
            {"experiment/mine.yaml": BODY},
            ["experiment=mine", "tools=[]", "reward=[]"],
            "tools=[]: the body of experiment=mine has tools.plus tools.add, which stays; to leave "
            "it out too add ~tools.plus ~tools.add\nreward=[]: the body of experiment=mine has "
            "reward.mine, which stays; to leave it out too add ~reward.mine",
        ),
        (
            {"experiment/mine.yaml": BODY},
            ["experiment=mine", "tools=[]", "~tools.plus", "tools.found._target_=math.hypot"],
            "has tools.add, which stays; to leave it out too add ~tools.add",
        ),
    ],
)
def test_a_file_of_the_users_that_says_something_else(
    files: dict[str, str], overrides: list[str], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(*overrides, source=written(tmp_path, files))


def test_an_emptied_group_with_its_body_left_out(tmp_path: Path) -> None:
    source = written(tmp_path, {"experiment/mine.yaml": BODY})
    emptied = ["tools=[]", "~tools.plus", "~tools.add", "reward=[]", "~reward.mine"]
    mine = ["tools.hypot._target_=math.hypot", "+reward.own._target_=parts.add"]
    with hydra_session(source):
        composed = compose_run(open_keys(["experiment=mine", *emptied, *mine]), source)
    assert (list(composed.config.tools), list(composed.config.reward)) == (["hypot"], ["own"])


def test_a_name_that_only_another_config_dir_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"experiment/mine.yaml": BODY, "other.yaml": "defaults: [train]\n"}
    written(tmp_path / "my_conf", files)
    written(tmp_path / "third", {"experiment/third.yaml": BODY})
    text = refusal("experiment=mine", source=Source(extra="third"))
    assert text.startswith(
        "experiment=mine: no such option; my_conf/experiment/mine.yaml is found with --config-dir "
        "my_conf; the options are: calculator, "
    )
    assert refusal(source=Source(name="other")) == (
        "--config-name other: there is no other.yaml where it is looked for; my_conf/other.yaml is "
        "found with --config-dir my_conf"
    )
    assert "name one of conf/, or the folder that has it" in refusal(source=Source(name="none"))
    monkeypatch.chdir(tmp_path / "my_conf")
    assert "experiment/mine.yaml is found with --config-dir ." in refusal("experiment=mine")


REWARDS = """
def nothing(): return 1.0
def keyword(*, answer): return 1.0
def several(*args): return 1.0
def trl(*, completions, **kwargs): return [1.0]
class Nothing:
    def __call__(self): return 1.0
class Something:
    def __call__(self, rollout): return 1.0
"""


@pytest.mark.parametrize(
    ("name", "bound", "expected"),
    [
        ("nothing", {}, "takes no argument; a reward gets the rollout, and the columns that it "),
        ("Nothing", {}, "takes no argument; a reward gets the rollout, and the columns that it "),
        ("keyword", {}, "its first parameter cannot be the rollout (too many positional arg"),
        ("keyword", {"answer": 3}, "its first parameter cannot be the rollout"),
        *((name, {}, None) for name in ("several", "trl", "Something")),
    ],
)
def test_a_reward_that_the_rollout_cannot_be_passed_to(
    name: str,
    bound: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    section = {"_target_": f"odd_rewards.{name}", **bound}
    if expected is not None and name in ("nothing", "Nothing"):  # seen in the source
        text = refusal("reward=[]", f"reward.mine._target_=odd_rewards.{name}")
        assert text.startswith(f"reward.mine._target_=odd_rewards.{name}: {expected}")
    elif expected is None:
        assert build_rubric({"mine": section}).names == ("mine",)
    if expected is not None:  # when it is built, whatever could be seen
        with pytest.raises(
            ValueError, match=r"its first parameter cannot be the rollout"
        ) as caught:
            build_rubric({"mine": section})
        assert str(caught.value).startswith(f"reward.mine._target_='odd_rewards.{name}'")


def test_a_misspelled_setting_is_no_argument_of_a_reward_that_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "any_rewards.py").write_text("def any(rollout, height=1, **columns): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["reward=[]", "reward.mine._target_=any_rewards.any"]
    assert refusal(*mine, "reward.mine.wieght=2") == (
        "reward.mine.wieght=2: is neither a setting of a reward (did you mean 'weight'?) nor a "
        "parameter that any_rewards.any names; the settings are: weight, timeout_s, concurrency, "
        "on_unavailable"
    )
    with hydra_session(Source()):
        words = open_keys([*mine, "reward.mine.height=2", "reward.mine.unit=cm"])
        validate(compose_run(words, Source()).config)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["eval.every=5"],
            "eval.every=5: data.test names no rows; data.test_fraction=0.1 holds some of data.t",
        ),
        (["eval.every=5", "checkpoint.keep_best=true"], "nothing says which one is the best"),
        (["data.test.limit=3"], "data.test.path=null: has no value; set data.path=…"),
        (["data.test_seed=3"], "has no effect without data.test_fraction"),
    ],
)
def test_without_test_rows(
    overrides: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}')
    assert expected in refusal("data=file", "data.train.path=rows.jsonl", *overrides)


def test_a_config_dir_that_does_not_exist() -> None:
    assert "--config-dir /no/such/dir: there is no such folder" in refusal(
        source=Source(extra="/no/such/dir")
    )


def test_all_unknown_keys_are_named_at_once() -> None:
    lines = refusal("lr=1", "zzz=1", "steps=many", "seed=x").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["lr=1", "zzz=1", "steps=many"]


def test_both_missing_numbers_are_one_problem() -> None:
    expected = "optimizer.betas=[]: must be two numbers, e.g. [0.9,0.99]"
    assert refusal("optimizer.betas=[]") == expected


def test_ours_exist_and_theirs_are_none_of_ours() -> None:
    known = {*setting_keys(), "hydra.run.dir", "hydra.job.name"}
    assert [n for n, ours in elsewhere().items() if ours.partition(" ")[0] not in known] == []
    assert known & set(elsewhere()) == set()


def test_a_problem_that_only_the_last_check_finds_names_its_file(tmp_path: Path) -> None:
    body = "# @package _global_\noptimizer: {lrr: 1, warmup_steps: -3}\nsteps: 0\n"
    source = written(tmp_path, {"experiment/mine.yaml": body})
    assert refusal("experiment=mine", "steps=-1", source=source).splitlines() == [
        "optimizer.lrr=1 (in experiment/mine.yaml): unknown key of optimizer=adamw (did you mean "
        "'lr'?)",
        "optimizer.warmup_steps=-3 (in experiment/mine.yaml): must be 0 or more",
        "steps=-1: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.revision=123"], "expected a text; quote it: data.revision='\"123\"'"),
        (["data.revision=12e4"], "expected a text; quote it: data.revision='\"…\"'"),
        (
            ["data.test.split=test", "data.train.revision=123"],
            "data.train.revision=123: expected a text; quote it: '\"123\"'",
        ),
    ],
)
def test_a_revision_that_arrives_as_a_number_is_to_be_quoted(
    overrides: list[str], expected: str
) -> None:
    assert expected in refusal("data=hub", "data.path=a/b", *overrides)


LATE = """
import pathlib
pathlib.Path("imported").touch()
def find(query): ...
"""


def test_code_is_imported_last_and_only_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_tools.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    find = "tools.find._target_=late_tools.find"
    assert refusal(find, "steps=0") == "steps=0: must be at least 1"
    with hydra_session(Source()):
        validate(compose_run(open_keys([find]), Source()).config, code=())
    assert not Path("imported").exists()
    text = refusal(find, "tools.find.qury=1")
    assert text.startswith("tools.find.qury=1: late_tools.find has no such argument (did you mean")
    assert Path("imported").exists()


@pytest.mark.slow
def test_every_setting_suggests_itself() -> None:
    for key in setting_keys():
        assert suggest_key(key + "_") != "", key
