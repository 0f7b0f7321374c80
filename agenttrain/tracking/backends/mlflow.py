"""MLflow: a store of files in the experiment's folder, or any server that MLflow knows.

mlflow-skinny is enough to write; the page comes with mlflow.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agenttrain.tracking.backends.base import (
    Description,
    ExperimentTracker,
    RunEnd,
    TrackedRun,
    rollout_table,
)
from agenttrain.utils.redaction import hide_secrets

TAG, STEP_TAG = "agenttrain.run", "agenttrain.step"
"""Tags of a run: its id, and the last step whose metrics are written."""
LONGEST_PARAMETER = 500
"""Characters of a parameter's value that every server takes; config.yaml has all of it."""
STATUS = {RunEnd.finished: "FINISHED", RunEnd.failed: "FAILED", RunEnd.stalled: "FAILED"}
"""MLflow's status of a run that ended so; of all others it is KILLED."""
STATUS_TAG = "agenttrain.status"
MOST_PARAMETERS, MOST_METRICS = 100, 1000
"""Parameters and metrics of one request."""


class MLflow(ExperimentTracker):
    """Writes a run to MLflow."""

    def __init__(self, uri: str | None = None) -> None:
        self.uri = uri

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> int | None:
        """Continue the MLflow run that has this run's id as a tag, or create it."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # MLflow no longer develops its file store, and asks for consent to use it.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.metric = Metric
        self.client = client = MlflowClient(tracking_uri=self._address(run))
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(run.project)
        )
        earlier = client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.id}'")
        if earlier:
            self.run_id = earlier[0].info.run_id
            client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {TAG: run.id, **({"sweep": run.group} if run.group else {})}
            created = client.create_run(experiment_id, run_name=run.name, tags=tags)
            self.run_id = created.info.run_id
            # Parameters cannot be changed: those of a resumed run are in the artifact.
            values = [Param(name, text[:LONGEST_PARAMETER]) for name, text in _flat(config)]
            for first in range(0, len(values), MOST_PARAMETERS):
                part = values[first : first + MOST_PARAMETERS]
                client.log_batch(self.run_id, params=part)
        client.log_dict(self.run_id, dict(config), "config.yaml")
        self.step = int(client.get_run(self.run_id).data.tags.get(STEP_TAG, 0))
        return self.step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the points; the calls return when the store has them."""
        now = int(time.time() * 1000)
        points = [self.metric(_name(n), v, now, step) for n, v in metrics.items()]
        for first in range(0, len(points), MOST_METRICS):
            part = points[first : first + MOST_METRICS]
            self.client.log_batch(self.run_id, metrics=part)
        if step > self.step:  # an evaluation may come later, with the step that it belongs to
            self.step = step
            self.client.set_tag(self.run_id, STEP_TAG, str(step))

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the rollouts as a table, an artifact that MLflow's page shows as one."""
        columns, rows = rollout_table(records)
        table = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
        self.client.log_table(self.run_id, table, f"rollouts/step-{step:06d}.json")

    def ended(self, how: RunEnd) -> None:
        """Set the run's status in MLflow's words, and in ours as a tag."""
        self.client.set_tag(self.run_id, STATUS_TAG, str(how))
        self.client.set_terminated(self.run_id, STATUS.get(how, "KILLED"))

    def finish(self) -> None:
        """Do nothing: every call has arrived."""

    def describe(self, run: TrackedRun) -> Description:
        """Return the command that shows the page, or the server's address."""
        address = hide_secrets(self._address(run))
        if address.startswith(("http://", "https://")):
            return Description(view=address)
        command = shlex.join(["mlflow", "ui", "--backend-store-uri", address])
        variable = "MLFLOW_ALLOW_FILE_STORE=true " if address.startswith("file:") else ""
        return Description(view=f"{variable}{command}")

    def _address(self, run: TrackedRun) -> str:
        files = (run.shared / "mlflow").absolute().as_uri()
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or files


def _name(metric: str) -> str:
    """Return a name that MLflow takes: ``pass@1`` -> ``pass_1``."""
    return re.sub(r"[^\w\-. :/]", "_", metric)


def _flat(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings as ``("optimizer.lr", "0.001")``."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield _name(key), str(config)
