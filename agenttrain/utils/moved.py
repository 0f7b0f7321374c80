"""Names of the first layout, and today's: dotted paths of components, and keys of the settings.

Saved runs are read through `in_this_layout`. On the command line and in YAML files an old name is
an error that shows the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED = {
    "agenttrain.data.calculator.row": "agenttrain.data.bundled.calculator.row",
    "agenttrain.data.code.row": "agenttrain.data.bundled.code.row",
    "agenttrain.data.demonstrations.row": "agenttrain.data.bundled.demonstrations.row",
    "agenttrain.data.encyclopedia.row": "agenttrain.data.bundled.encyclopedia.row",
    "agenttrain.data.hub.HubRows": "agenttrain.data.files.HubRows",
    "agenttrain.data.shop.connect": "agenttrain.data.bundled.shop.connect",
    "agenttrain.data.shop.row": "agenttrain.data.bundled.shop.row",
    "agenttrain.rewards.contains.Contains": "agenttrain.rewards.builtin.answers.Contains",
    "agenttrain.rewards.environment.environment": "agenttrain.rewards.builtin.tools.environment",
    "agenttrain.rewards.exact_match.ExactMatch": "agenttrain.rewards.builtin.answers.ExactMatch",
    "agenttrain.rewards.format.Format": "agenttrain.rewards.builtin.format.Format",
    "agenttrain.rewards.jmespath.JMESPath": "agenttrain.rewards.builtin.format.JMESPath",
    "agenttrain.rewards.json_schema.JsonSchema": "agenttrain.rewards.builtin.format.JsonSchema",
    "agenttrain.rewards.judge.Judge": "agenttrain.rewards.builtin.judge.Judge",
    "agenttrain.rewards.length_penalty.LengthPenalty": (
        "agenttrain.rewards.builtin.tools.LengthPenalty"
    ),
    "agenttrain.rewards.math_verify.MathVerify": (
        "agenttrain.rewards.builtin.math_verify.MathVerify"
    ),
    "agenttrain.rewards.numeric_close.NumericClose": (
        "agenttrain.rewards.builtin.answers.NumericClose"
    ),
    "agenttrain.rewards.reward_model.RewardModel": (
        "agenttrain.rewards.builtin.reward_model.RewardModel"
    ),
    "agenttrain.rewards.stop_tool_called.stop_tool_called": (
        "agenttrain.rewards.builtin.tools.stop_tool_called"
    ),
    "agenttrain.rewards.tool_calls.ToolPenalty": "agenttrain.rewards.builtin.tools.ToolPenalty",
    "agenttrain.rewards.tool_calls.tool_success": "agenttrain.rewards.builtin.tools.tool_success",
    "agenttrain.tools.calculator.add": "agenttrain.tools.builtin.calculator.add",
    "agenttrain.tools.calculator.calculator": "agenttrain.tools.builtin.calculator.calculator",
    "agenttrain.tools.calculator.multiply": "agenttrain.tools.builtin.calculator.multiply",
    "agenttrain.tools.calculator.subtract": "agenttrain.tools.builtin.calculator.subtract",
    "agenttrain.tools.final_answer.final_answer": (
        "agenttrain.tools.builtin.final_answer.final_answer"
    ),
    "agenttrain.tools.interpreter.Bash": "agenttrain.tools.sandbox.tool.Bash",
    "agenttrain.tools.interpreter.Python": "agenttrain.tools.sandbox.tool.Python",
    "agenttrain.tools.interpreter.interpreter": "agenttrain.tools.sandbox.tool.interpreter",
    "agenttrain.tools.mcp.McpServer": "agenttrain.tools.mcp.server.McpServer",
    "agenttrain.tools.search.Search": "agenttrain.tools.builtin.search.Search",
    "agenttrain.tools.sql.Sql": "agenttrain.tools.builtin.sql.Sql",
}
"""Dotted path of the first layout -> that of today."""
ENGINE_KEYS = (
    *("memory_share", "kv_cache_mb", "tensor_parallel_size", "quantization", "merge_adapters"),
    *("enforce_eager", "sleep"),
)
"""Keys of `engine` that stood in its section `vllm`."""
CLIP = {"clip_low": "low", "clip_high": "high"}
RATIO = {"ratio": "ratio"}
OBJECTIVES = {
    "clip": {**CLIP, "clip_dual": "dual", **RATIO},
    "cispo": {"clip_high": "high", **RATIO},
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg", **RATIO},
    "vespo": {f"vespo_{key}": key for key in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "geometric_mean": CLIP,
    "reinforce": {},
}
"""Value of algorithm.surrogate -> keys of `algorithm` that it read -> those of its objective."""
OBJECTIVE_KEYS = {old: new for keys in OBJECTIVES.values() for old, new in keys.items()}


def moved_key(setting: str) -> str | None:
    """Return today's name of a key, or of ``key=value``; None for a key that has not moved.

    Examples: ``"algorithm.clip_high=0.3"`` -> ``"algorithm.objective.high"``,
    ``"engine.vllm.sleep=true"`` -> ``"engine.sleep"``.
    """
    key, _, value = setting.lstrip("+~").partition(" ")[0].partition("=")
    if key == "tracker.name":
        return f"tracker={value}" if value else "tracker"
    if key == "algorithm.surrogate":
        return f"algorithm/objective={value}" if value else "algorithm/objective"
    section, _, name = key.rpartition(".")
    if section == "algorithm" and name in OBJECTIVE_KEYS:
        return f"algorithm.objective.{OBJECTIVE_KEYS[name]}"
    return f"engine.{name}" if section == "engine.vllm" and name in ENGINE_KEYS else None


def in_this_layout(settings: Any) -> Any:
    """Return settings with every name of the first layout replaced by today's.

    Example: ``{"lookup": {"_target_": "agenttrain.tools.sql.Sql"}}`` ->
    ``{"lookup": {"_target_": "agenttrain.tools.builtin.sql.Sql"}}``, and ``{"surrogate": "cispo",
    "clip_high": 4.0}`` of `algorithm` -> ``{"objective": {"name": "cispo", "high": 4.0}}``. Exact
    paths only: another name inside a module that has moved stays, and `locate` rejects it.
    """
    if isinstance(settings, Mapping):
        settings = {key: in_this_layout(value) for key, value in settings.items()}
        algorithm, engine = settings.get("algorithm"), settings.get("engine")
        tracker = settings.get("tracker")
        if isinstance(tracker, Mapping) and "name" in tracker:
            # There was one tracker, or none.
            others = {key: value for key, value in tracker.items() if key != "name"}
            chosen = {"trackio": {"enabled": True}} if tracker["name"] == "trackio" else {}
            settings["tracker"] = {**others, **chosen}
        if isinstance(algorithm, Mapping) and str(algorithm.get("surrogate")) in OBJECTIVES:
            # The keys that the surrogate read become a section `objective`.
            name, flat = algorithm["surrogate"], {"surrogate", *OBJECTIVE_KEYS}
            keys = {
                new: algorithm[old] for old, new in OBJECTIVES[name].items() if old in algorithm
            }
            others = {key: value for key, value in algorithm.items() if key not in flat}
            settings["algorithm"] = {**others, "objective": {"name": name, **keys}}
        if isinstance(engine, Mapping) and isinstance(engine.get("vllm"), Mapping):
            # The section had the keys of all engines; each engine keeps its own.
            of_vllm = engine.get("name") == "vllm"
            unread = ("vllm", "rejoin_steps" if of_vllm else "dtype")
            others = {key: value for key, value in engine.items() if key not in unread}
            settings["engine"] = {**others, **engine["vllm"]} if of_vllm else others
        return settings
    if isinstance(settings, list):
        return [in_this_layout(value) for value in settings]
    return MOVED.get(settings, settings) if isinstance(settings, str) else settings


def override_in_this_layout(override: str) -> str:
    """Return an override such as ``tools.db._target_=<path>`` with today's path and key."""
    key, equals, value = override.partition("=")
    new = moved_key(override)
    if new is not None:
        key = new.partition("=")[0]
    return f"{key}{equals}{MOVED.get(value, value)}"
