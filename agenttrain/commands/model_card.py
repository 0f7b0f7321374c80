"""The README.md of an exported model: base model, data, rewards, results, and how to repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from agenttrain.data.config import HUB_ROWS
from agenttrain.evaluation import from_json
from agenttrain.utils.hub import ID
from agenttrain.utils.model_path import BUNDLED
from agenttrain.utils.redaction import hide_in_settings, hide_secrets

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
SETTINGS = "agenttrain.yaml"
"""The run's settings, beside the card."""
LICENSE = re.compile(r"^license: *(\S+)", re.MULTILINE)


def model_card(
    name: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    *,
    step: int,
    adapter: bool,
    weights: str = "complete",
    sees: bool = False,
) -> str:
    """Return the card of a run's model after `step` steps.

    `config` is the run's config.yaml, `summary` its summary.json; any key may be missing. With
    `adapter` the folder holds adapters alone; otherwise `weights` describes the weights, e.g.
    "complete". `sees`: the model reads images.
    """
    model = dict(config.get("model", {}))
    provenance = dict(config.get("provenance", {}))
    sft = summary.get("verb") == "sft"
    algorithm = "sft" if sft else str(config.get("algorithm", {}).get("name", "grpo"))
    base, revision = str(model.get("path")), model.get("revision")
    data = config.get("data", {})
    sources = dict(data.get("sources", {}))
    trained_rows = [dict(part.get("train", {})) for part in sources.values() or [data]]
    front: dict[str, Any] = {  # YAML front matter, which the hub reads
        # An id of the hub, which turns it into a link; a folder means nothing to others.
        **({"base_model": base} if ID.fullmatch(base) else {}),
        "license": _license(base),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if sees else "text-generation",
        "tags": ["agenttrain", "tool-use", *([] if sft else ["reinforcement-learning"]), algorithm],
    }
    datasets = [str(rows["path"]) for rows in trained_rows if rows.get("_target_") == HUB_ROWS]
    if datasets:
        front["datasets"] = datasets
    # The table of facts, below the front matter.
    if sources:
        tasks = {
            f"source {name}": "; ".join(
                f"{key}: {text}" for key, text in _task_facts(config, part, sft=sft).items()
            )
            for name, part in sources.items()
        }
    else:
        tasks = _task_facts(config, data, sft=sft)
    adapter_text = "adapters (LoRA) alone: load them on the base model"
    if quantization := config.get("model", {}).get("quantization"):
        adapter_text += f" in 4 bits ({quantization}), on which they were trained"
    facts = {
        "base model": f"`{base}`" + (f" at revision `{revision}`" if revision else ""),
        "weights": adapter_text if adapter else weights,
        "training": f"{algorithm}, {step} steps, seed {config.get('seed')}",
        **tasks,
        **({"images": "read; none of the training's is in this folder"} if sees else {}),
        "chat template": f"`{config.get('chat_template', {}).get('name')}`, certificate "
        f"`{str(provenance.get('template_certificate'))[:12]}`",
        "versions": ", ".join(
            f"{package} {version}"
            for package, version in dict(provenance.get("versions", {})).items()
            if version
        ),
        "code": f"revision `{provenance.get('git_revision')}`",
    }
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    card = template.render(
        front=yaml.safe_dump(front, sort_keys=False).rstrip(),
        name=name,
        facts=facts,
        evaluations=_evaluations(summary, step),
        settings=SETTINGS,
        sft=sft,
    )
    return hide_secrets(card)


def _task_facts(config: Mapping[str, Any], data: Mapping[str, Any], *, sft: bool) -> dict[str, str]:
    """Return the card's facts about the data, rewards and tools of a run or of one of its sources.

    `data` is the run's section `data`, or a source's (`data.sources.<name>`), which may have
    rewards and tools of its own in place of the run's. A supervised run (`sft`) has no rewards.
    """
    own_sections = {key: data[key] for key in ("reward", "tools") if data.get(key) is not None}
    sections = {**config, **own_sections}
    arguments = dict(data.get("train", {}))
    row_class = arguments.pop("_target_", "unknown")  # the others are its arguments
    argument_text = ", ".join(
        f"{key}={value}" for key, value in arguments.items() if value is not None
    )
    rewards = [
        f"`{name}` (weight {section.get('weight', 1)})"
        for name, section in dict(sections.get("reward", {})).items()
        if isinstance(section, Mapping)  # only a section has a weight: not null
    ]
    return {
        "data": f"`{row_class}`" + (f" ({argument_text})" if argument_text else ""),
        **({} if sft else {"rewards": ", ".join(rewards) or "none"}),
        "tools": ", ".join(f"`{tool}`" for tool in sections.get("tools", {})) or "none",
    }


def published_settings(config: Mapping[str, Any]) -> str:
    """Return a run's config.yaml as a file for `--config-name`, without secrets.

    Hydra's keys are added, which config.yaml lacks: the name of the new run's folder, and no second
    copy of the settings in it. `provenance` is left out: it describes the run, and holds its
    signature.
    """
    plain = {key: value for key, value in config.items() if key != "provenance"}
    text = yaml.safe_dump(
        {
            "defaults": ["run_config", "_self_"],
            **hide_in_settings(plain),
            "hydra": {"job": {"name": "reproduced"}, "output_subdir": None},
        },
        sort_keys=False,
        allow_unicode=True,
    )
    return hide_secrets(text)


def _evaluations(summary: Mapping[str, Any], step: int) -> list[tuple[str, int, str, str]]:
    """Return (decoding, questions, reward before, reward after) of each evaluation.

    Example: ``("sampled", 200, "0.31", "0.74")``. Questions are the rows that were evaluated. A
    reward that was not measured is a dash.
    """
    evaluations = dict(summary.get("eval", {}))
    # The run was evaluated after its last step: that says nothing of an earlier checkpoint.
    recorded_after = evaluations.get("after") if summary.get("steps") == step else None
    # Decoding (sampled or greedy) -> scores.
    before_scores, after_scores = (
        {scores.label: scores for scores in from_json(side or {})}
        for side in (evaluations.get("before"), recorded_after)
    )
    rows = []
    for label, after_or_before in {**before_scores, **after_scores}.items():
        pair = (before_scores.get(label), after_scores.get(label))
        before, after = ("–" if scores is None else str(scores.reward) for scores in pair)
        # The number before the training, or after it for a decoding that was not evaluated before.
        questions = (before_scores.get(label) or after_or_before).questions
        rows.append((label, questions, before, after))
    return rows


def _license(base: str) -> str:
    """Return the licence that the base model's card names, else `unknown`."""
    card = Path(base).expanduser() / "README.md"
    if base.startswith(BUNDLED):
        return "apache-2.0"  # this package's
    head: Sequence[str] = ()
    if card.is_file():
        # Front matter stands between the first two lines `---`.
        head = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
    match = LICENSE.search(head[1]) if len(head) == 3 else None
    return match[1] if match else "unknown"
