"""Settings and dotted paths under the names they had in saved runs, and their names today.

Saved runs and sweeps are read through `in_this_layout` and `overrides_in_this_layout`. On the
command line and in YAML files an old name is an error that shows the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

RENAMED = {
    "algorithm.beta": "algorithm.kl.beta",
    "algorithm.kl": "algorithm.kl.estimator",
    "algorithm.kl_in": "algorithm.kl.place",
    "algorithm.kl_bias_correction": "algorithm.kl.bias_correction",
    "algorithm.reference": "algorithm.kl.reference",
    "algorithm.ref_sync_steps": "algorithm.kl.reference.sync_steps",
    "algorithm.ref_mixup": "algorithm.kl.reference.mixup",
    "algorithm.entropy_bonus": "algorithm.entropy.bonus",
    "algorithm.entropy_target": "algorithm.entropy.adaptive.target",
    "algorithm.entropy_bonus_step": "algorithm.entropy.adaptive.step",
    "algorithm.entropy_bonus_max": "algorithm.entropy.adaptive.max",
    "algorithm.correction": "algorithm.correction.level",
    "algorithm.correction_mode": "algorithm.correction.mode",
    "algorithm.correction_max": "algorithm.correction.max",
    "algorithm.correction_min": "algorithm.correction.min",
    "algorithm.credit": "algorithm.credit.name",
    "algorithm.gamma": "algorithm.credit.gamma",
    "algorithm.step_weight": "algorithm.credit.step_weight",
    "training.gradient_checkpointing": "training.activation_checkpointing",
}
"""Key of a setting, or dotted path of a component -> that of today. `algorithm.kl` and some others
were values, and are sections now."""
SYNC_STEPS = 512
"""Steps between two mixings of a synced reference for which none were given."""
VALUES = {
    "algorithm.correction=none": "algorithm.correction=null",
    "algorithm.credit=gigpo": "algorithm/credit=gigpo",
    "algorithm.credit=rollout": "algorithm/credit=rollout",
    "algorithm.credit=turn_baseline": "algorithm/credit=turn_baseline",
    "algorithm.credit=turn_reward": "algorithm/credit=turn_reward",
    "algorithm.entropy_target=null": "algorithm.entropy.adaptive=null",
    "algorithm.reference=frozen": "algorithm.kl.reference=null",
    "algorithm.reference=synced": f"algorithm.kl.reference.sync_steps={SYNC_STEPS}",
    "algorithm.teacher.path=null": "algorithm.teacher=null",
    "training.gradient_checkpointing=false": "training.activation_checkpointing=none",
    "training.gradient_checkpointing=true": "training.activation_checkpointing=all",
}
"""Settings whose values have changed with their keys."""


def moved_key(setting: str) -> str | None:
    """Return today's name of a key, or of ``key=value``; None for a key that has not moved.

    Examples: ``"algorithm.beta=0.1"`` -> ``"algorithm.kl.beta"``, ``"algorithm.credit=gigpo"`` ->
    ``"algorithm/credit=gigpo"``.
    """
    key, _, value = setting.lstrip("+~").partition(" ")[0].partition("=")
    return VALUES.get(f"{key}={value}".lower(), RENAMED.get(key))


def in_this_layout(settings: Any) -> Any:
    """Return the settings of a saved run with every old name replaced by today's.

    Keys of `algorithm` and `training` move into their sections of today. A text that is exactly a
    name of RENAMED, such as ``"algorithm.beta"`` or a `_target_`, is replaced wherever it stands.

    Example: ``{"beta": 0.1, "kl": "k3", "entropy_bonus": 0.0}`` of `algorithm` -> ``{"kl":
    {"beta": 0.1, "estimator": "k3"}, "entropy": {"bonus": 0.0}}``.
    """
    if isinstance(settings, Mapping):
        settings = {key: in_this_layout(value) for key, value in settings.items()}
        if isinstance(settings.get("algorithm"), Mapping):
            settings["algorithm"] = _with_sections(settings["algorithm"])
        if isinstance(settings.get("training"), Mapping):
            settings["training"] = _with_level(settings["training"])
        return settings
    if isinstance(settings, list):
        return [in_this_layout(value) for value in settings]
    return RENAMED.get(settings, settings) if isinstance(settings, str) else settings


def _with_sections(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved run's `algorithm` with its flat keys in their sections.

    Example: ``{"beta": 0.1, "kl": "k3"}`` -> ``{"kl": {"beta": 0.1, "estimator": "k3"}}``.
    Settings that are in sections already stay as they are. Runs of the flat layout recorded all
    keys, also those of a penalty or a correction that was off. Such a section becomes null.
    """
    if isinstance(algorithm.get("teacher"), Mapping) and algorithm["teacher"].get("path") is None:
        algorithm = {**algorithm, "teacher": None}
    flat: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for name, value in algorithm.items():
        # `kl`, `correction` and `credit` were flat keys with a text, ``kl: k3``, and are the names
        # of sections today: a mapping, or null.
        is_section = name in ("kl", "correction", "credit") and not isinstance(value, str)
        is_flat = f"algorithm.{name}" in RENAMED and not is_section
        (flat if is_flat else sections)[name] = value
    if not flat:
        return sections
    # Taken out: today it is no key, but a section that is null or has `sync_steps`, set below.
    reference = flat.pop("reference", None)
    for name, value in flat.items():
        # "beta" -> "algorithm.kl.beta" -> sections["kl"]["beta"]
        section = sections
        *parents, key = RENAMED[f"algorithm.{name}"].split(".")[1:]
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    # A section is null today where the run did not have the feature.
    if not flat.get("beta"):
        sections["kl"] = None
    elif reference == "synced":  # with a beta, which the loop above has put into `kl`
        sections["kl"].setdefault("reference", {}).setdefault("sync_steps", SYNC_STEPS)
    else:
        sections["kl"]["reference"] = None
    if flat.get("correction", "none") == "none":
        sections["correction"] = None
    if flat.get("entropy_target") is None and "entropy" in sections:
        sections["entropy"]["adaptive"] = None
    # The flat layout recorded these keys for every kind of credit. Today an unused one is an error.
    kind_of_credit = flat.get("credit", "rollout")
    if kind_of_credit != "gigpo":
        sections.get("credit", {}).pop("step_weight", None)
    if kind_of_credit == "rollout":
        sections.get("credit", {}).pop("gamma", None)
    return sections


def _with_level(training: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the flag `gradient_checkpointing` by the level that does the same."""
    names = {"gradient_checkpointing": "activation_checkpointing"}
    return {
        names.get(name, name): ("all" if value else "none") if name in names else value
        for name, value in training.items()
    }


def overrides_in_this_layout(overrides: Iterable[str]) -> list[str]:
    """Return the recorded overrides of a sweep with today's keys and paths.

    Example: ``["algorithm.beta=0.1", "algorithm.correction=none"]`` -> ``["algorithm.kl.beta=0.1",
    "algorithm.correction=null"]``. With ``algorithm.ref_sync_steps=64`` beside it,
    ``algorithm.reference=synced`` is left out.
    """
    words = list(overrides)
    has_sync_steps = any("algorithm.ref_sync_steps=" in word for word in words)
    result = []
    for word in words:
        prefix = word[: len(word) - len(word.lstrip("+~"))]  # Hydra's signs to add or delete a key
        key, equals, value = word.removeprefix(prefix).partition("=")
        if has_sync_steps and word == "algorithm.reference=synced":
            continue  # today's key for the steps implies it
        moved = moved_key(f"{key}={value}")
        if moved is not None and "=" in moved:  # the value has changed with its key
            today = moved
        else:
            # The value may be the dotted path of a component.
            today = f"{moved or key}{equals}{RENAMED.get(value, value)}"
        result.append(f"{prefix}{today}")
    return result
