"""`-m`: the runs that a sweep consists of."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from agenttrain.config.compose import Source, compose_raw
from agenttrain.config.errors import explained


def expand(overrides: Sequence[str], source: Source) -> list[list[str]]:
    """The overrides of every run of the sweep, in the order in which Hydra runs them.

    Example: ``["seed=1,2", "steps=5"]`` -> ``[["seed=1", "steps=5"], ["seed=2", "steps=5"]]``. A
    sweeper that chooses as it goes gives one: what does not vary. Raises ConfigError. Needs a
    `hydra_session`.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "expand() outside of a hydra_session"
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    with explained(overrides, source.groups):
        parsed = parser.parse_overrides(list(overrides))
        fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
        sweeper = compose_raw(fixed, source, with_hydra=True).hydra.sweeper
        if not str(sweeper["_target_"]).endswith(".BasicSweeper"):
            return [fixed]
        params = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
        batches = BasicSweeper.split_arguments(
            [*parser.parse_overrides(params), *parsed], max_batch_size=None
        )
    return [list(run) for batch in batches for run in batch]
