"""Settings of the outputs of a run: its trackers, the rollouts on disk, the console."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, fields
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.sections import (
    SETTINGS,
    Number,
    Whole,
    field_names,
    plain,
    shown,
    split_section,
)


@dataclass(config=SETTINGS)
class OwnTrackerSettings:
    """Settings of every tracker; in a section of the user's they stand beside its `_target_`."""

    system: Data[bool] = True
    """Send the load of the machine too: CPU, memory and GPUs, under `system/`."""
    finish_s: Number = Field(default=15.0, gt=0)
    """Longest wait at the end of the run, in seconds; trackers are waited for together."""


@dataclass(config=SETTINGS)
class TrackerSettings(OwnTrackerSettings):
    """Settings of every bundled tracker."""

    enabled: Data[bool] = False
    """True sends the run to this tracker; `tracker=[trackio,wandb]` sets it for both."""


@dataclass(config=SETTINGS)
class TrackioSettings(TrackerSettings):
    """The dashboard trackio, in a database of the experiment's or in $TRACKIO_DIR."""

    space: str | None = None
    """Space of the Hugging Face hub that the run is sent to, `org/name`; None: it stays here."""
    server_url: str | None = None
    """Address of a trackio server that the run is sent to; $TRACKIO_WRITE_TOKEN is its token."""


class WandBMode(StrEnum):
    """Ways to write a run to wandb."""

    auto = "auto"
    """$WANDB_MODE; without it `online` if there is an API key, else `offline`."""
    online = "online"
    offline = "offline"
    """Files in the run folder, which `wandb sync` sends."""


@dataclass(config=SETTINGS)
class WandBSettings(TrackerSettings):
    """Weights & Biases."""

    project: Data[str | None] = None
    """None: the name of the experiment."""
    entity: str | None = None
    """User or team; None: the default of the API key."""
    mode: Data[WandBMode] = WandBMode.auto
    """Where the run is written."""


@dataclass(config=SETTINGS)
class TensorBoardSettings(TrackerSettings):
    """TensorBoard's event files, in the run folder."""


@dataclass(config=SETTINGS)
class MLflowSettings(TrackerSettings):
    """MLflow."""

    uri: str | None = None
    """Address of a tracking server or store; None: $MLFLOW_TRACKING_URI, or files in the folder of
    the experiment."""


BACKENDS = "agenttrain.tracking.backends"
BUNDLED = {
    "trackio": f"{BACKENDS}.trackio.Trackio",
    "wandb": f"{BACKENDS}.wandb.WandB",
    "tensorboard": f"{BACKENDS}.tensorboard.TensorBoard",
    "mlflow": f"{BACKENDS}.mlflow.MLflow",
}
"""Section of `TrackerConfig`, which is also the name of the library -> the tracker's class."""


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSection:
    """One tracker of a run, ready to be built."""

    name: str
    """Name of its files in the run folder: ``wandb``, ``own-mine``."""
    key: str
    """Key of its section: ``tracker.wandb``, ``tracker.own.mine``."""
    target: str
    """Dotted path of its class."""
    settings: dict[str, Any]
    """Arguments of its constructor."""
    system: bool
    """Send the load of the machine too."""
    finish_s: float
    """Longest wait at the end of the run, in seconds."""


@dataclass(config=SETTINGS)
class TrackerConfig:
    """Settings of the outputs besides metrics.jsonl and evaluations.jsonl."""

    rollouts: Data[str] = "all"
    """Rollouts written per step: all, none, or a number."""
    arrays_above: Data[Whole | None] = Field(default=4096, ge=0)
    """Rollouts of more tokens than this have their token ids, log-probabilities and other lists per
    token in a binary file beside the step's JSON lines; None: all of it is JSON."""
    timeline: Data[bool] = True
    """Record who sampled, called tools, waited and trained when, for `agenttrain timeline`."""
    console: Data[bool] = True
    """Live progress in the terminal."""
    trackio: TrackioSettings = field(default_factory=TrackioSettings)
    wandb: WandBSettings = field(default_factory=WandBSettings)
    tensorboard: TensorBoardSettings = field(default_factory=TensorBoardSettings)
    mlflow: MLflowSettings = field(default_factory=MLflowSettings)
    own: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_` (a class like `ExperimentTracker`), `system`, `finish_s` and bound
    arguments."""

    @field_validator("rollouts")
    @classmethod
    def _names_a_number(cls, rollouts: str) -> str:
        if rollouts not in ("all", "none") and not rollouts.isdecimal():
            hint = did_you_mean(rollouts, ("all", "none"))
            raise ValueError(f"expected all, none, or a whole number{hint}")
        return rollouts

    def sections(self) -> list[TrackerSection]:
        """Return the trackers of the run; raises ConfigError for an invalid section of `own`."""
        sections = []
        for name, target in BUNDLED.items():
            settings: TrackerSettings = getattr(self, name)
            if settings.enabled:
                # Arguments of the constructor: the settings that only this tracker has.
                common = field_names(TrackerSettings)
                arguments = {n: v for n, v in plain(settings).items() if n not in common}
                sections.append(_section(name, f"tracker.{name}", target, arguments, settings))
        for name, section in self.own.items():
            key, target = f"tracker.own.{name}", section["_target_"]
            # The settings that all trackers share, and the other keys: the class's arguments.
            own_settings, arguments = split_section(OwnTrackerSettings, section, key)
            sections.append(_section(f"own-{name}", key, target, arguments, own_settings))
        return sections


def _section(
    name: str, key: str, target: str, arguments: dict[str, Any], settings: OwnTrackerSettings
) -> TrackerSection:
    """Return a tracker's section; `arguments` are those of the constructor of class `target`."""
    return TrackerSection(
        name=name,
        key=key,
        target=target,
        settings=arguments,
        system=settings.system,
        finish_s=settings.finish_s,
    )


@dataclass(config=SETTINGS)
class CostConfig:
    """The price of a run and the speed of its cards, for the metrics of cost and speed."""

    gpu_hour: Number | None = Field(default=None, gt=0)
    """Price of one GPU for an hour, in any currency; None: no cost is logged."""
    gpus: Whole | None = Field(default=None, ge=1)
    """GPUs that are paid for; None: those of the training processes and of the servers that the run
    starts. Without a GPU a process counts as one."""
    peak_tflops: Number | None = Field(default=None, gt=0)
    """Dense bf16 peak of a card in TFLOP/s, which `perf/mfu` is relative to; None: the card's, by
    its name. Set, it counts on a CPU too."""


def missing_libraries(config: TrackerConfig) -> Iterator[str]:
    """Yield the trackers of the run whose library is not installed."""
    for name in BUNDLED:
        settings: TrackerSettings = getattr(config, name)
        spec = find_spec(name)
        # A folder of this name, such as wandb's own in the working folder, is a module to Python.
        if settings.enabled and (spec is None or spec.origin is None):
            # trackio is a dependency of agenttrain itself, and no extra.
            package = name if name == "trackio" else f"agenttrain[{name}]"
            yield (
                f"tracker={name}: needs {name}, which is not installed; "
                f"pip install '{package}', or leave {name} out"
            )


def tracker_problems(config: TrackerConfig) -> Iterator[str]:
    """Yield settings of trackers that are not enabled, and addresses with secrets or conflicts."""
    for name in BUNDLED:
        settings: TrackerSettings = getattr(config, name)
        defaults = type(settings)()
        for part in fields(settings):
            value = getattr(settings, part.name)
            if not settings.enabled and value != getattr(defaults, part.name):
                yield (
                    f"tracker.{name}.{part.name}={shown(value)}: has no effect without the "
                    f"tracker; add tracker=[{name}], or leave it out"
                )
    if "write_token=" in (config.trackio.server_url or ""):
        yield (
            "tracker.trackio.server_url: holds a token, which config.yaml would keep; put it into "
            "the environment variable TRACKIO_WRITE_TOKEN, and leave it out of the address"
        )
    user = "the user in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    for key, address, remedy in (
        ("trackio.server_url", config.trackio.server_url, "a token in TRACKIO_WRITE_TOKEN"),
        ("mlflow.uri", config.mlflow.uri, f"{user}, or the whole address in MLFLOW_TRACKING_URI"),
    ):
        hidden = hide_secrets(address or "")
        if hidden != (address or ""):
            yield (
                f"tracker.{key}={hidden}: holds a password, which config.yaml would keep; leave it "
                f"out, and put into the environment {remedy}"
            )
    if config.trackio.space is not None and config.trackio.server_url is not None:
        yield (
            f"tracker.trackio.space={config.trackio.space}: the run goes to "
            "tracker.trackio.server_url; leave one of them out"
        )
