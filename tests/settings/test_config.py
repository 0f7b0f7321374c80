"""Composition: every YAML of conf/, and what becomes of it."""

from __future__ import annotations

import re
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from agenttrain.algorithms.config import Advantage, Scale
from agenttrain.algorithms.objectives.config import Ratio
from agenttrain.commands.sweep.expand import expand
from agenttrain.rollout.config import RolloutConfig
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import (
    Composed,
    Source,
    compose_new,
    compose_raw,
    compose_run,
    convert,
    hydra_session,
)
from agenttrain.settings.compose import open_keys as opened
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.sizes import arithmetic, describe
from agenttrain.training.config import AdamWSettings
from agenttrain.utils.files import conf_folder, list_groups

GROUPS = list_groups(conf_folder())
ROWS = "agenttrain/data/models/shop/recipe.json"
"""Some JSON; it is not read."""
HUB_MODELS = [
    file.stem
    for file in (conf_folder() / "model").glob("*.yaml")
    if re.search("^path: [^:?]+/", file.read_text(), re.MULTILINE)
]
"""Presets of models of the hub, which tests do not reach."""
VERIFIERS = ["environment.verifiers.id=sums", f"environment.verifiers.python={sys.executable}"]
REASONING_GYM = [
    "environment.reasoning_gym.dataset=chain_sum",
    f"environment.reasoning_gym.python={sys.executable}",
]
NEEDS_A_PATH = {
    **{f"model={name}": ["model.path=bundled:shop"] for name in HUB_MODELS},
    "chat_template=file": ["chat_template.path=README.md"],
    "response_schema=file": ["response_schema.path=README.md"],
    "model=folder": ["model.path=agenttrain/data/models/shop"],
    "algorithm/objective=own": ["algorithm.objective._target_=my_pkg.band"],
    **{
        option: ["+environment.doors._target_=worlds.Doors"]
        for option in (
            "algorithm=gigpo",
            "algorithm/credit=gigpo",
            "algorithm/credit=gigpo_discounted",
        )
    },
    "tools=mcp": ["tools.mcp.url=http://127.0.0.1:9/mcp"],
    "tools=search": ["tools.search.path=bundled:encyclopedia"],
    "data=file": [f"data.{split}.path={ROWS}" for split in ("train", "test")],
    "data=word_problem_files": [f"data.{split}.path={ROWS}" for split in ("train", "test")],
    "data=spider": ["data.path=spider"],
    "experiment=recipes/sql": ["data.path=spider", "model.path=bundled:shop"],
    "data=rollouts": ["data.path=tests/fixtures/recorded_run/run/rollouts/*.jsonl"],
    "data=hub": ["data.path=someone/questions", "data.test_fraction=0.1"],
    "data=own": ["data.train._target_=builtins.list"],
    "reward=format": ["reward.format.pattern=Answer.*"],
    "reward=jmespath": ["reward.jmespath.expression=turns"],
    "reward=json_schema": ["reward.json_schema.column=shape"],
    "reward=ranking": ["reward.ranking.url=http://localhost:8000/v1", "reward.ranking.model=m"],
    "reward=judge": ["reward.judge.url=http://localhost:8000/v1", "reward.judge.model=m"],
    "environment=gymnasium": ["environment.gymnasium.id=FrozenLake-v1"],
    "environment=openenv": ["environment.openenv.url=http://127.0.0.1:8000"],
    "environment=verifiers": VERIFIERS,
    "experiment=recipes/service_desk": ["model.path=bundled:shop"],
    "experiment=recipes/terminal": [
        "data.path=examples/terminal_agent/tasks",
        "model.path=bundled:shop",
    ],
    "environment=reasoning_gym": REASONING_GYM,
    **{
        f"experiment=recipes/reasoning_gym_{name}": [*REASONING_GYM, "model.path=bundled:shop"]
        for name in ("chain_sum", "leg_counting", "spell_backward")
    },
    "data=verifiers": ["environment=verifiers", *VERIFIERS],
    "tools=files": ["runtime=podman"],
    "data=mix": ["+data@data.sources.shop=shop"],
    "data=harbor": ["runtime=podman", "data.path=examples/terminal_agent/tasks"],
    "user=llm": ["user.url=http://localhost:8000/v1", "user.model=m"],
    "reward=reward_model": ["reward.reward_model.path=agenttrain/data/models/shop"],
    # The model that it names comes with a package of 93 MB, or from the hub.
    **{
        option: ["model.path=bundled:shop"]
        for option in (
            *("model=smollm2", "experiment=smollm2", "experiment=smollm2_warmstart"),
            *("experiment=recipes/reverse_text", "experiment=recipes/reverse_text_warmstart"),
            *("experiment=recipes/alphabet_sort", "experiment=recipes/alphabet_sort_warmstart"),
            *("experiment=recipes/gsm8k", "experiment=recipes/gsm8k_python"),
            *("experiment=recipes/search", "experiment=recipes/wordle"),
        )
    },
}
DEFAULTS = {
    *("chat_template=auto", "response_schema=auto", "model=shop", "data=shop", "algorithm=grpo"),
    *("reward=exact_match", "engine=transformers", "optimizer=adamw", "tracker=trackio"),
    *("tools=sql", "tools=final_answer"),
}
"""What every other composition has already."""
OPTIONS = [
    f"{group}={option}"
    for group, options in GROUPS.items()
    for option in options
    if f"{group}={option}" not in DEFAULTS
]

APART = (
    *("chat_template", "response_schema", "reward", "optimizer", "tracker", "slurm", "user"),
    *("model", "algorithm", "sweep", "stop", "data", "tools", "hardware"),
)
"""Groups that write into sections of their own and need nothing of each other."""


def together() -> list[list[str]]:
    """Every option: the n-th of all groups of APART in one composition, any other alone."""
    names = [option.partition("=")[0] for option in OPTIONS]
    groups = [[o for o, name in zip(OPTIONS, names, strict=True) if name == g] for g in APART]
    rows = zip_longest(*groups)
    alone = [[o] for o, name in zip(OPTIONS, names, strict=True) if name not in APART]
    return [[option for option in row if option] for row in rows] + alone


def compose(*overrides: str, source: Source | None = None) -> Composed:
    source = source or Source()
    with hydra_session(source):
        return compose_run(opened(overrides), source)


@pytest.mark.parametrize("options", together(), ids=" ".join)
def test_every_option_composes_and_validates(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    needed = [override for option in options for override in NEEDS_A_PATH.get(option, [])]
    has_tools = any(option.startswith("tools=") for option in options)
    with_tools = ["stop_tools=[]"] if has_tools else []
    composed = compose(*options, *needed, *with_tools)
    validate(composed.config)


def test_the_groups_are_those_that_users_know() -> None:
    assert set(GROUPS) >= {
        *("model", "chat_template", "response_schema", "tools", "algorithm", "data", "reward"),
        *("engine", "optimizer", "tracker", "experiment", "debug"),
    }


@pytest.mark.parametrize(
    ("overrides", "experiment"),
    [
        (["model=shop_hybrid"], "shop_hybrid"),
        (["model=shop", "model=sight"], "sight"),
        (["model=calculator", "optimizer.lr=1e-3"], "calculator"),
        (["model=shop_hybrid", "experiment=shop"], "shop"),
        (["model=shop"], "shop"),
    ],
)
def test_a_bundled_model_brings_its_experiment(overrides: list[str], experiment: str) -> None:
    source = Source()
    with hydra_session(source):
        composed = compose_new(overrides, source, starts=True)
        expected = compose_run([*overrides, f"experiment={experiment}"], source)
    assert composed.plain == expected.plain


def test_no_arguments_are_the_shop_experiment() -> None:
    assert compose().plain == compose("experiment=shop").plain
    config = compose().config
    validate(config)
    assert (config.model.path, list(config.tools)) == ("bundled:shop", ["sql", "final_answer"])
    assert config.stop_tools == ["final_answer"]


def test_the_calculator_experiment_swaps_data_and_tools_only_once() -> None:
    config = compose("experiment=calculator").config
    assert list(config.tools) == ["add", "subtract", "multiply", "final_answer"]
    assert config.data.train["_target_"] == "agenttrain.data.bundled.calculator.row"
    assert config.stop_tools == ["final_answer"]


def test_an_agent_of_ones_own_has_none_of_the_bundled_agents_settings() -> None:
    config = compose(
        *(
            "experiment=none",
            "model=folder",
            "model.path=m",
            "data=file",
            "data.train.path=a.jsonl",
        ),
        *("data.test.path=b.jsonl", "tools=[]", "tools.lookup._target_=my_agent.lookup"),
        *("reward=[]", "reward.found._target_=my_agent.found"),
    ).config
    assert config.tools == {"lookup": {"_target_": "my_agent.lookup"}}
    assert config.reward == {"found": {"_target_": "my_agent.found"}}
    assert (config.stop_tools, config.eval.group_by) == ([], None)
    assert (config.optimizer, config.rollout) == (AdamWSettings(), RolloutConfig())
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [([], "shop"), (["experiment=calculator"], "calculator"), (["experiment=none"], "run")],
)
def test_runs_are_in_a_folder_of_their_experiment(overrides: list[str], folder: str) -> None:
    with hydra_session(Source()):
        raw = compose_raw(overrides, Source(), with_hydra=True)
        HydraConfig.instance().set_config(raw)
    assert raw.hydra.run.dir.startswith(f"outputs/{folder}/2")
    assert raw.hydra.sweep.dir.startswith(f"outputs/{folder}/sweep_2")


def test_settings_arrive_typed() -> None:
    config = compose("algorithm=rloo", "optimizer.betas=[0.8,0.9]").config
    assert isinstance(config, RunConfig)
    assert config.algorithm.advantage is Advantage.leave_one_out
    assert config.algorithm.scale is Scale.none
    assert config.algorithm.objective.settings.ratio is Ratio.sequence_sum
    assert config.optimizer.betas == (0.8, 0.9)


def test_the_plain_settings_are_yaml_and_compose_to_the_same() -> None:
    composed = compose("algorithm=rloo", "tools.sql.timeout_s=3")
    text = OmegaConf.to_yaml(OmegaConf.create(composed.plain))
    assert convert(OmegaConf.create(text)).config == composed.config


def test_the_command_line_beats_debug_which_beats_the_experiment() -> None:
    config = compose("debug=tiny", "experiment=calculator", "tasks_per_step=3").config
    tiny = OmegaConf.load(conf_folder() / "debug" / "tiny.yaml")
    assert (config.steps, config.algorithm.group_size) == (tiny.steps, tiny.algorithm.group_size)
    assert config.tasks_per_step == 3


def test_a_key_below_an_open_section_needs_no_plus() -> None:
    config = compose(
        "tools.sql.timeout_s=3", "tools.find._target_=math.hypot", "reward.exact_match.weight=2"
    ).config
    assert config.tools["sql"]["timeout_s"] == 3
    assert config.tools["find"] == {"_target_": "math.hypot"}
    assert config.reward["exact_match"]["weight"] == 2


def test_training_rows_follow_the_seed_and_test_rows_do_not() -> None:
    data = compose("seed=7").config.data
    assert (data.train["seed"], data.test["seed"]) == (7, 0)


def test_a_model_of_the_users_picks_its_companions(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "defaults:\n  - override /chat_template@_global_.chat_template: none\n\npath: /mine\n"
    )
    source = Source(extra=str(tmp_path))
    config = compose("model=mine", source=source).config
    assert (config.model.path, config.chat_template.name) == ("/mine", "none")
    # … and the command line still has the last word.
    config = compose("model=mine", "chat_template=auto", source=source).config
    assert config.chat_template.name == "auto"


@pytest.mark.slow
def test_stop_tools_from_groups(tmp_path: Path) -> None:
    for group, text in (
        ("tools", "# @package tools.submit\n_target_: parts.add\nstop: true\n"),
        ("stop", "# @package _global_\nstop_tools: [final_answer, sql]\n"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(text)
    source = Source(extra=str(tmp_path))
    chosen = ("experiment=none", "tools=[sql,final_answer,mine]")
    config = compose(*chosen, source=source).config
    assert (config.stop_tools, config.tools["submit"]["stop"]) == ([], True)
    assert "stop tools  submit\n" in describe(config)
    config = compose(*chosen, "stop=mine", source=source).config
    assert "stop tools  final_answer, sql, submit\n" in describe(config)
    # The plain list has the last word over a preset, and a preset over the experiment's list.
    config = compose(*chosen, "stop=mine", "stop_tools=[sql]", source=source).config
    assert "stop tools  sql, submit\n" in describe(config)
    config = compose("stop=mine", source=source).config
    assert config.stop_tools == ["final_answer", "sql"]


def test_a_model_that_ships_shows_how_to_pick_companions() -> None:
    text = (conf_folder() / "model" / "folder.yaml").read_text()
    assert "override /chat_template@_global_.chat_template: " in text
    config = compose("model=folder", "model.path=x", "chat_template=none").config
    assert config.chat_template.name == "none"


def test_an_experiment_of_the_users_is_found(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algorithm: rloo\n\nsteps: 17\n"
    )
    source = Source(extra=str(tmp_path))
    config = compose("experiment=mine", source=source).config
    assert (config.steps, config.algorithm.name) == (17, "rloo")
    assert source.groups()["experiment"] == sorted(["mine", *GROUPS["experiment"]])


def test_the_settings_need_nothing_of_hydra() -> None:
    # ${hydra:…} could not be resolved in a worker, nor by --cfg job --resolve.
    for file in conf_folder().rglob("*.yaml"):
        content = OmegaConf.to_container(OmegaConf.load(file)) or {}
        assert isinstance(content, dict)
        content.pop("hydra", None)
        content.pop("defaults", None)
        assert "${hydra" not in str(content), file


def test_the_arithmetic_of_a_run() -> None:
    config = compose(
        *("tasks_per_step=12", "algorithm.group_size=8", "steps=80", "algorithm.num_epochs=2"),
        *("algorithm.minibatches=3", "rollout.max_turns=6", "rollout.max_turn_tokens=48"),
        *("rollout.max_completion_tokens=500", "eval.every=40", "eval.questions=10"),
        *("eval.samples=4", "eval.greedy=true"),
    ).config
    sizes = arithmetic(config)
    assert sizes.rollouts_per_step == 96  # 12 tasks x 8
    assert sizes.rollouts_per_update == 32  # 96 / 3 minibatches
    assert sizes.updates_per_step == 6  # 2 epochs x 3 minibatches
    assert sizes.updates == 480  # 80 x 6
    assert sizes.sampled_tokens_per_rollout == 288  # 6 turns x 48, below 500
    assert sizes.tokens_per_step == 48_000  # 96 x 500
    assert sizes.evaluations == 3  # before, after step 40, after
    assert sizes.rollouts_per_evaluation == 50  # 10 x (4 sampled + 1 greedy)
    text = describe(config)
    assert "96 per step, 7,680 in all" in text
    assert "6 per step of 32 rollouts each, 480 in all" in text


def test_no_questions_are_no_evaluation() -> None:
    assert arithmetic(compose("eval.questions=0", "eval.every=1").config).evaluations == 0


@pytest.mark.parametrize(
    ("test_rows", "expected"),
    [
        # 3 lines x (2 sampled + 1 greedy)
        (["data.test._target_=agenttrain.data.files.FileRows", "data.test.path=t.jsonl"], "2 x 9 "),
        # 50 rows x 3; the bundled rows never end
        ([], "2 x 150 "),
        (["data.test._target_=my_rows.Rows"], "2 x at most 150 "),
    ],
)
def test_an_evaluation_has_no_more_questions_than_rows(
    test_rows: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n\n{"prompt": "c"}')
    config = compose("eval.questions=50", "eval.samples=2", *test_rows).config
    assert f"evaluation  {expected}rollouts" in describe(config)


def test_a_sweep_is_expanded_in_hydras_order() -> None:
    source = Source()
    with hydra_session(source):
        runs = expand(["algorithm=grpo,rloo", "steps=5", "seed=range(1,3)"], source).runs
    assert runs == [
        ["algorithm=grpo", "steps=5", "seed=1"],
        ["algorithm=grpo", "steps=5", "seed=2"],
        ["algorithm=rloo", "steps=5", "seed=1"],
        ["algorithm=rloo", "steps=5", "seed=2"],
    ]


def test_a_sweep_may_come_from_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n"
    )
    source = Source(extra=str(tmp_path))
    with hydra_session(source):
        runs = expand(["experiment=grid"], source).runs
    assert runs == [["seed=1", "experiment=grid"], ["seed=2", "experiment=grid"]]


def test_the_guides_experiment_composes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/datasets.md").read_text(encoding="utf-8")
    start = page.index("# @package _global_")
    (tmp_path / "experiment").mkdir()
    text = page[start : page.index("```", start)]
    (tmp_path / "experiment" / "gsm8k.yaml").write_text(text, encoding="utf-8")
    overrides = ("experiment=gsm8k", "tools=[]", "stop_tools=[]")
    config = compose(*overrides, source=Source(extra=str(tmp_path))).config
    validate(config)
    assert list(config.reward) == ["numeric_close"]
    assert (config.data.test["split"], config.data.map) == (
        "test",
        {"answer": "split(answer, '#### ')[-1]"},
    )


def test_the_summary_shows_rewards_with_their_weights() -> None:
    config = compose("reward=[exact_match,stop_tool_called]", "reward.exact_match.weight=2").config
    text = describe(config)
    assert (
        "reward      exact_match       weight 2  agenttrain.rewards.builtin.answers.Exact" in text
    )
    assert "\n            stop_tool_called  weight 1  agenttrain.rewards.builtin.tools" in text


def test_experiments_in_a_folder_are_options_of_the_group(tmp_path: Path) -> None:
    file = tmp_path / "experiment" / "mine" / "first.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nsteps: 7\n")
    source = Source(extra=str(tmp_path))
    assert "mine/first" in source.groups()["experiment"]
    assert "recipes/wordle" in GROUPS["experiment"]
    assert not any(group.startswith("experiment/") for group in source.groups())
    assert compose("experiment=mine/first", source=source).config.steps == 7
