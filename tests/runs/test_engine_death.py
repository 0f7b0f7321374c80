"""An engine that dies while it samples: the run ends, and what it has learnt is saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agenttrain.cli import main

ENGINE = """
from agenttrain import EngineInputs, EngineSpec
from agenttrain.engines.base import EngineDead
from agenttrain.engines.transformers.config import TransformersSettings


def build(settings, inputs):
    from agenttrain.engines.transformers.engine import TransformersEngine

    class Dying(TransformersEngine):
        version = 0

        async def update(self, weights, version):
            self.version = version
            await super().update(weights, version)

        async def generate(self, token_ids, sampling, **names):
            if self.version == 2:
                raise EngineDead("no server is left")
            return await super().generate(token_ids, sampling, **names)

    return Dying(inputs.policy, settings)


SPEC = EngineSpec(settings=TransformersSettings, build=build)
"""


@pytest.mark.timeout(600)
def test_the_last_finished_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dying_engine.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    run = ("debug=tiny", "steps=4", "checkpoint.every=null", "eval.questions=0", "tracker=none")
    assert main([*run, "engine._target_=dying_engine.SPEC", "hydra.run.dir=run"]) == 1
    printed = capsys.readouterr().err
    assert "EngineDead: no server is left" in printed
    assert "checkpoints/step-000002 stands" in printed
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-000002"]
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    # It goes on from there.
    assert main(["resume=run", "engine=transformers", "steps=3"]) == 0
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 3
