"""`resume=` and `eval run=`: which settings of a saved run may change, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from agenttrain.runs.provenance import write_config
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Composed, Source, compose_run, hydra_session, open_keys
from agenttrain.settings.saved import (
    done_steps,
    finished_steps,
    run_of,
    saved_settings,
    settings_for_auto_resume,
    settings_for_eval,
    settings_for_resume,
)
from agenttrain.types import ConfigError
from agenttrain.utils.signing import sign

SOURCE = Source()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with non-default settings, and a checkpoint of step 3."""
    with hydra_session(SOURCE):
        plain = compose_run(["algorithm=rloo", "steps=9", "tracker.rollouts=5"], SOURCE).plain
    folder = tmp_path / "shop" / "first"
    (folder / "checkpoints" / "step-000003").mkdir(parents=True)
    (folder / "checkpoints" / "latest").symlink_to("step-000003")
    (folder / "checkpoints" / "step-000003" / "config.json").write_text("{}")
    text = OmegaConf.to_yaml(OmegaConf.create({**plain, "provenance": {"git_revision": "abc"}}))
    (folder / "config.yaml").write_text(text)
    return folder


def resume(folder: Path, *overrides: str, trust: bool = False) -> Composed:
    with hydra_session(SOURCE):
        return settings_for_resume(folder, overrides, SOURCE, trust=trust)


def evaluate(folder: Path, *overrides: str) -> Composed:
    with hydra_session(SOURCE):
        return settings_for_eval(folder, overrides, SOURCE)


def test_a_resumed_run_has_its_own_settings(run: Path) -> None:
    composed = resume(run)
    assert (composed.config.algorithm.name, composed.config.steps) == ("rloo", 9)
    assert composed.config.resume == str(run)
    # config.yaml says what the run is, not how it was started last.
    assert composed.plain["resume"] is None


def test_a_resumed_run_may_change_some_settings(run: Path) -> None:
    composed = resume(run, "steps=20", "eval.questions=3", "checkpoint.every=null", "tracker=none")
    config = composed.config
    assert (config.steps, config.eval.questions, config.checkpoint.every) == (20, 3, None)
    # Choosing a group anew takes its option as it is: rollouts=5 was the other option's.
    assert (config.tracker.sections(), config.tracker.rollouts) == ([], "all")
    assert composed.plain["steps"] == 20


def test_a_resumed_run_may_recompute_more_activations(run: Path) -> None:
    """The error of a run whose memory is exhausted names this setting."""
    composed = resume(run, "training.activation_checkpointing=all")
    assert composed.config.training.activation_checkpointing == "all"
    assert composed.plain["training"]["activation_checkpointing"] == "all"


def test_resume_auto_keeps_the_chosen_level_unless_another_is_typed(run: Path) -> None:
    key, words = "training.activation_checkpointing", ["algorithm=rloo", "tracker.rollouts=5"]
    rewrite(run, training={"activation_checkpointing": "blocks"})  # in place of `auto`
    for typed, level in ([], "blocks"), ([f"{key}=all"], "all"), ([f"{key}=none"], "none"):
        with hydra_session(SOURCE):
            composed = settings_for_auto_resume(run, [*words, *typed], SOURCE)
        assert composed.config.training.activation_checkpointing == level
        assert composed.plain["training"]["activation_checkpointing"] == level


@pytest.mark.slow
def test_another_engine_has_no_use_for_the_servers_of_the_one_before(run: Path) -> None:
    servers = ("engine=vllm_server", "servers.count=2", "servers.dead_s=60.0")
    with hydra_session(SOURCE):
        folder = ["weight_sync.folder=/shared", "weight_sync.transport=files"]
        plain = compose_run([*servers, *folder], SOURCE).plain
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    # The folder of the weights is written to, and the run has no signature.
    kept, other = resume(run, "engine=vllm_server", trust=True), resume(run, "engine=transformers")
    assert (kept.config.servers.count, kept.config.servers.dead_s) == (2, 60)
    assert (other.config.servers.count, other.config.servers.dead_s) == (1, 30)
    assert (kept.config.weight_sync.folder, other.config.weight_sync.folder) == ("/shared", None)
    validate(other.config)
    # What is typed stands, and is refused where it has no effect.
    with pytest.raises(ConfigError, match=r"servers\.count=3: engine=transformers has no servers"):
        validate(resume(run, "engine=transformers", "servers.count=3").config)


def test_a_value_stands_on_top_of_a_group_chosen_anew(run: Path) -> None:
    config = resume(run, "tracker.rollouts=7", "tracker=none").config
    assert (config.tracker.sections(), config.tracker.rollouts) == ([], "7")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.group_size=4", "algorithm.group_size=4: cannot be combined with resume="),
        ("algorithm=grpo", "what may change is: steps, eval, checkpoint, tracker, engine"),
        ("seed=1", "seed=1: cannot be combined with resume="),
        ("debug=tiny", "debug=tiny: cannot be combined with resume="),
        ("hydra.run.dir=x", "hydra.run.dir=x: cannot be combined with resume="),
        ("~tracker", "~tracker: cannot be combined with resume="),
        ("stps=4", "(did you mean 'steps'?)"),
        ("training.token_budget=64", "training.token_budget=64: cannot be combined with resume="),
        ("training.gradient_checkpointing=true", "mean 'training.activation_checkpointing'?)"),
        ("steps=many", "steps=many: expected a whole number"),
        ("engine={}", "engine={}: leaves its keys as they are; it is a section; set its keys with"),
        ("engine=[vllm]", "engine=[vllm]: takes one option"),
        ("engine=3", "engine=3: no such option"),
        ("eval=null", "eval=null: is a section; set its keys with eval.<key>=…"),
        ("++tools.sql.timeout_s=3", "tools.sql.timeout_s=3: cannot be combined with resume="),
        ("steps=1,2", "steps=1,2: a saved run takes one value"),
        ("eval.qestions=3", "(did you mean 'eval.questions'?)"),
        ("tracker=trakio", "(did you mean 'trackio'?)"),
        ("steps", "settings are written key=value"),
    ],
)
def test_other_settings_are_refused(run: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resume(run, override)
    assert expected in str(caught.value)


def rewrite(run: Path, **sections: object) -> None:
    """Replace keys in sections of config.yaml; a key with None is left out."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for name, changes in sections.items():
        changed = {**settings[name], **changes} if isinstance(changes, dict) else changes
        if isinstance(changed, dict):
            changed = {key: value for key, value in changed.items() if value is not None}
        settings[name] = changed
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def test_a_wrong_value_of_the_file_names_the_file(run: Path) -> None:
    file = run / "config.yaml"
    rewrite(run, steps=-3, engine={"name": ["vllm"]})
    with pytest.raises(ConfigError) as caught:
        resume(run, "eval.every=-1")
    starts = [line.partition(": ")[0] for line in str(caught.value).splitlines()]
    assert starts == [
        f"engine.name=[vllm] (in {file})",
        "eval.every=-1",
        f"steps=-3 (in {file})",
    ]


@pytest.mark.parametrize("trust", [True, False])
def test_a_path_of_ours_that_this_version_lacks(run: Path, trust: bool) -> None:
    path = "agenttrain.tools.sql.Sqq"
    rewrite(run, tools={"sql": {"_target_": path}})
    with pytest.raises(ConfigError) as caught, hydra_session(SOURCE):
        settings_for_resume(run, [], SOURCE, trust=trust)
    assert str(caught.value) == (
        f"resume={run}: tools.sql._target_={path}: is no name of this version of agenttrain (did "
        "you mean 'agenttrain.tools.builtin.sql.Sql'?); write today's name into config.yaml, or "
        "use the version that wrote it"
    )


def test_an_evaluation_does_not_go_on(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"verb": "eval"}))
    with pytest.raises(ConfigError, match=f"resume={run}: holds an evaluation"):
        resume(run)
    with hydra_session(SOURCE):
        assert saved_settings("view run", run, SOURCE).config.steps == 9


def test_a_run_does_not_go_back(run: Path) -> None:
    assert done_steps(run) == 3  # its newest checkpoint
    assert resume(run, "steps=3").config.steps == 3
    with pytest.raises(ConfigError, match=r"steps=2: the run in .* has done 3 steps already"):
        resume(run, "steps=2")
    (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": 8}))
    with pytest.raises(ConfigError, match=r"leave steps out, or raise it above 8"):
        resume(run, "steps=7")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder: there is no config\.yaml in it"):
        resume(tmp_path)


@pytest.mark.parametrize("content", ["algorithm: {group_sise: 3}", "steps: many", "a: [", ""])
def test_a_config_that_does_not_fit(run: Path, content: str) -> None:
    (run / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=f"resume={run}"):
        resume(run)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"- seed: 1\n", "it holds a list, and a run's settings are a mapping of names"),
        (b"tools: &a\n  b: *a\n", "a value in it contains itself"),
        (b"seed: ${steps}\nsteps: ${seed}\n", "Recursive interpolation detected"),
        (b"optimizer: {name: [sgd]}", "optimizer.name: expected a text; put back"),
        (b"steps: many", "steps: expected a whole number; put back"),
        (b"algorithm: {group_sise: 3}", "algorithm.group_sise: unknown key (did you mean"),
        (b"seed: 1  # \xe4\n", "it is not UTF-8 text: invalid continuation byte at byte 11"),
    ],
)
def test_a_config_that_is_no_mapping_of_settings_is_told_in_a_sentence(run, content, told) -> None:
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resume(run)
    message = str(caught.value)
    assert message.startswith(f"resume={run}: its config.yaml does not fit: {told}")
    assert message.endswith("; put back the file that the run wrote") and "\n" not in message


def test_an_evaluation_takes_the_newest_checkpoint(run: Path) -> None:
    composed = evaluate(run, "data.test.split=test_phrasing", "eval.samples=4")
    expected = str((run / "checkpoints" / "step-000003").resolve())
    assert composed.config.model.path == composed.plain["model"]["path"] == expected
    assert composed.config.data.test["split"] == "test_phrasing"
    assert composed.config.resume is None


def test_an_evaluation_takes_the_checkpoint_it_is_given(run: Path) -> None:
    (run / "checkpoints" / "step-000002").mkdir()
    folder = run / "checkpoints" / "step-000002"
    assert evaluate(folder).config.model.path == str(folder.resolve())
    assert (run_of(folder), run_of(run)) == (run, run)


def test_an_evaluation_may_choose_other_data_but_no_other_agent(run: Path) -> None:
    config = evaluate(run, "data=file", "data.train.path=a.csv", "data.test.path=b.csv").config
    assert config.data.test == {"_target_": "agenttrain.data.files.FileRows", "path": "b.csv"}
    with pytest.raises(ConfigError, match="chat_template=none: cannot be combined with run="):
        evaluate(run, "chat_template=none")


def test_an_evaluation_with_another_engine_is_not_asynchronous(run: Path) -> None:
    """engine=vllm samples in the training process, which an asynchronous run refuses."""
    file = run / "config.yaml"
    plain = yaml.safe_load(file.read_text())
    plain["async_training"]["max_staleness"] = 1
    file.write_text(yaml.safe_dump(plain))
    assert evaluate(run).config.async_training.max_staleness == 1
    config = evaluate(run, "engine=vllm").config
    assert (config.engine.name, config.async_training.max_staleness) == ("vllm", 0)
    with pytest.raises(ConfigError, match=r"async_training\.max_staleness=0: cannot be combined"):
        resume(run, "async_training.max_staleness=0")


def test_an_evaluation_of_a_run_without_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "latest").unlink()
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        evaluate(run)


def test_finished_steps(run: Path) -> None:
    assert finished_steps(run) is None
    (run / "summary.json").write_text(json.dumps({"status": "running", "steps": 4}))
    assert finished_steps(run) is None
    (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": 9}))
    assert finished_steps(run) == 9
    (run / "summary.json").write_text('{"status": "fini')
    assert finished_steps(run) is None


def test_a_tracker_that_sends_elsewhere_needs_trust(run: Path) -> None:
    """The folder may be somebody else's."""
    file = run / "config.yaml"
    plain = OmegaConf.to_container(OmegaConf.load(file))
    plain["tracker"]["mlflow"] = {"enabled": True, "uri": "http://other.example"}
    plain["tracker"]["own"] = {"mine": {"_target_": "mine.Tracker"}}
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    with pytest.raises(ConfigError) as error:
        resume(run)
    assert "tracker.mlflow.uri=http://other.example" in str(error.value)
    assert "tracker.own.mine._target_=mine.Tracker" in str(error.value)


def save(folder: Path, *overrides: str, **sections: dict[str, object]) -> None:
    """Write the config.yaml of a run of this user, and change sections of it afterwards."""
    with hydra_session(SOURCE):
        plain = compose_run(open_keys(overrides), SOURCE).plain
    write_config(folder, plain, certificate=None)
    if sections:
        rewrite(folder, **sections)


OWN = ("engine=vllm_server", "servers.args.worker-cls=mine.Worker", "algorithm=rloo")


@pytest.mark.slow
def test_a_run_of_the_users_own_asks_nothing(run: Path) -> None:
    save(run, *OWN)
    assert resume(run).config.servers.args == {"worker-cls": "mine.Worker"}
    assert yaml.safe_load((run / "config.yaml").read_text())["provenance"]["signed"] == ["servers"]
    # Data may be changed by hand.
    rewrite(run, steps=20)
    assert resume(run).config.steps == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "changes", "key"),
    [
        ("servers", {"args": {"worker-cls": "evil.Worker"}}, "servers.args.worker-cls=evil.Worker"),
        ("servers", {"admin_urls": ["http://evil:1"], "args": None}, "servers.admin_urls"),
        ("roles", {"judge": {"model": "m", "args": {"worker-cls": "evil"}}}, "roles.judge.args"),
        ("agent", {"name": "endpoint", "command": "touch ran"}, "agent.command=[touch, ran]"),
        ("tracker", {"wandb": {"entity": "evil"}}, "tracker.wandb.entity=evil"),
        (
            "environment",
            {
                "g": {
                    "_target_": "agenttrain.environments.adapters.gymnasium.Gymnasium",
                    "id": "evil:Env-v0",
                }
            },
            "environment.g.id=evil:Env-v0",
        ),
    ],
)
def test_what_others_put_into_a_signed_folder_is_named(run, section, changes, key) -> None:
    save(run, *OWN, **{section: changes})
    with pytest.raises(ConfigError) as caught:
        resume(run)
    assert key in str(caught.value) and "add trust=true" in str(caught.value)
    resume(run, trust=True)


def test_a_resolver_of_others_is_named_before_it_is_resolved(run: Path, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cret")
    rewrite(run, steps="${oc.decode:'7'}", chat_template={"name": "${oc.env:MY_SECRET}"})
    with pytest.raises(ConfigError) as caught:
        viewed_run(run)
    message = str(caught.value)
    assert "chat_template.name=${oc.env:MY_SECRET}" in message and "steps=${oc.decode" in message
    assert "s3cret" not in message
    rewrite(run, chat_template={"name": "auto"})
    assert resume(run, trust=True).config.steps == 7


def viewed_run(folder: Path) -> Composed:
    with hydra_session(SOURCE):
        return saved_settings("view run", folder, SOURCE)


@pytest.mark.slow
def test_a_typed_value_is_the_users_and_what_it_is_merged_into_is_not(run: Path) -> None:
    theirs = {"mine": {"_target_": "evil.reward", "path": "a"}}
    rewrite(run, reward=theirs)
    with pytest.raises(ConfigError) as caught:
        evaluate(run, "++reward.mine={weight: 2.0}")
    assert "reward.mine._target_=evil.reward" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        evaluate(run, "++reward.mine._target_=my.reward")
    assert "_target_" not in str(caught.value) and "reward.mine.path=a" in str(caught.value)
    assert evaluate(run, "reward=[exact_match]").config.reward.keys() == {"exact_match"}


@pytest.mark.slow
def test_signatures_without_a_list_cover_what_they_did(run: Path) -> None:
    """Those of runs that were written before config.yaml listed the sections."""
    rewrite(run, tools={"lookup": {"_target_": "mine.lookup"}}, rollout={"compaction": "mine.C"})
    rewrite(run, rollout={"compact_at": 100})
    plain = yaml.safe_load((run / "config.yaml").read_text())
    covered = {name: plain[name] for name in ("tools", "environment", "reward", "data")}
    covered["rollout.compaction"] = "mine.C"
    rewrite(run, provenance={"signature": sign(covered)})
    resume(run)
    rewrite(run, servers={"args": {"worker-cls": "evil"}})
    with pytest.raises(ConfigError) as caught:
        resume(run)
    assert "servers.args.worker-cls=evil" in str(caught.value)
    assert "tools.lookup" not in str(caught.value)
    rewrite(run, servers={"args": {}}, tools={"lookup": {"_target_": "evil.lookup"}})
    with pytest.raises(ConfigError, match=r"tools\.lookup\._target_=evil\.lookup"):
        resume(run)


MIXTURE = [
    *("data=mix", "+data@data.sources.x=shop", "+data@data.sources.y=calculator"),
    "data.sources.x.tools.mine._target_=mine.tool",
]


def refusal(load: Callable[..., Composed], folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides)
    return str(caught.value)


@pytest.mark.slow
def test_the_one_source_of_a_users_own_mixture_asks_nothing(run: Path) -> None:
    save(run, *MIXTURE)
    composed = evaluate(run, "data.only=x")
    assert list(composed.config.tools) == ["mine"] and not composed.config.data.sources


@pytest.mark.slow
def test_a_source_of_a_stranger_is_named_where_the_file_has_it(run: Path) -> None:
    """`data.only` moves its sections to where typed and signed ones stand."""
    save(run, *MIXTURE)
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]
    data["sources"]["x"]["reward"] = {"evil": {"_target_": "evil_module.run"}}
    rewrite(run, data=data)
    key = "data.sources.x.reward.evil._target_=evil_module.run"
    assert key in refusal(evaluate, run, "data.only=x", "reward=[exact_match]")
    assert key in refusal(resume, run)
    typed = "++data.sources.x.reward.evil._target_=mine.run"
    assert "evil" not in refusal(evaluate, run, "data.only=x", typed)  # the tool is not signed now
    assert evaluate(run, "data.only=y").config.data.train  # nothing of x is run
    rewrite(run, data={"only": "x"})
    assert "data.only=x" in refusal(evaluate, run, "reward=[exact_match]")
    assert "data.only=x" in refusal(resume, run)
    # Trust is for code: the file still is none that a run wrote.
    with pytest.raises(ConfigError, match=r"data\.only=x"):
        resume(run, trust=True)
