"""What asynchronous training chooses by itself, and what it warns of."""

from __future__ import annotations

import pytest

from agenttrain.runs.sampling import adapters_are_sent
from agenttrain.settings.async_checks import async_note
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.engine_checks import has_rollout_process, run_spec
from agenttrain.settings.run_config import RunConfig


def composed(*overrides: str) -> RunConfig:
    source = Source()
    with hydra_session(source):
        config = compose_run(open_keys(overrides), source).config
    validate(config)
    return config


def test_rollouts_ahead_of_the_update_have_a_process_and_weights_of_their_own() -> None:
    config = composed("async_training.max_staleness=1")
    assert has_rollout_process(config) and run_spec(config).own_weights
    config = composed("async_training.max_staleness=0")
    assert not has_rollout_process(config) and not run_spec(config).own_weights


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (("async_training.max_staleness=2",), True),
        (("async_training.max_staleness=2", "weight_sync.mode=abort_resume"), False),
        (("rollout.process=own",), False),
        (("async_training.max_staleness=2", "engine=vllm_server", "model.lora.rank=4"), False),
        # All weights are sent, with such adapters merged into them.
        (
            (
                *("async_training.max_staleness=2", "engine=vllm_server", "model.lora.rank=4"),
                "model.lora.target_parameters=[experts.down_proj]",
            ),
            True,
        ),
        (
            (
                *("async_training.max_staleness=2", "engine=vllm_server", "model.lora.rank=4"),
                "weight_sync.transport=files",
            ),
            True,
        ),
    ],
)
def test_a_sync_that_waits_for_turns_is_warned_of(overrides: tuple[str, ...], warned: bool) -> None:
    note = async_note(composed(*overrides), adapters_are_sent)
    assert (note is not None) == warned
    if note is not None:
        assert "weight_sync.mode=drain with async_training.max_staleness=2" in note


def test_a_correction_makes_any_objective_fit() -> None:
    corrected = ("algorithm.correction.level=token", "algorithm.behaviour=recomputed")
    for algorithm in ("rloo", "grpo", "reinforce_pp"):
        composed(f"algorithm={algorithm}", *corrected, "async_training.max_staleness=1")
    composed("algorithm/objective=reinforce", *corrected, "async_training.max_staleness=1")
