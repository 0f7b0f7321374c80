"""agenttrain trains tool-calling language-model agents with reinforcement learning.

The names below are the public API. ``import agenttrain`` loads nothing but the standard library: a
name's module is imported when the name is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; `_MODULES` says the same to the interpreter
    from agenttrain.agents.task import AgentTask as AgentTask
    from agenttrain.algorithms.objectives.base import ObjectiveInputs as ObjectiveInputs
    from agenttrain.algorithms.objectives.base import ObjectiveOutput as ObjectiveOutput
    from agenttrain.algorithms.objectives.config import build_objective as build_objective
    from agenttrain.algorithms.objectives.config import objective as objective
    from agenttrain.chat.chat import Chat as Chat
    from agenttrain.chat.config import ChatTemplateConfig as ChatTemplateConfig
    from agenttrain.chat.config import ResponseSchemaConfig as ResponseSchemaConfig
    from agenttrain.chat.loading import load_chat as load_chat
    from agenttrain.commands.python_api import RunFailed as RunFailed
    from agenttrain.commands.python_api import RunResult as RunResult
    from agenttrain.commands.python_api import train as train
    from agenttrain.engines.base import Engine as Engine
    from agenttrain.engines.base import EngineDead as EngineDead
    from agenttrain.engines.base import EngineError as EngineError
    from agenttrain.engines.config import EngineSettings as EngineSettings
    from agenttrain.engines.config import Sampling as Sampling
    from agenttrain.engines.memory import EngineLoad as EngineLoad
    from agenttrain.engines.memory import EngineMemory as EngineMemory
    from agenttrain.engines.memory import MemoryItem as MemoryItem
    from agenttrain.engines.memory import ModelSizes as ModelSizes
    from agenttrain.engines.scripted import ScriptedEngine as ScriptedEngine
    from agenttrain.engines.spec import EngineInputs as EngineInputs
    from agenttrain.engines.spec import EngineSpec as EngineSpec
    from agenttrain.rewards.function import RewardError as RewardError
    from agenttrain.rewards.function import RewardUnavailable as RewardUnavailable
    from agenttrain.rewards.rubric import Rubric as Rubric
    from agenttrain.rollout.config import RolloutConfig as RolloutConfig
    from agenttrain.rollout.config import RolloutRequest as RolloutRequest
    from agenttrain.rollout.loop import run_rollout as run_rollout
    from agenttrain.rollout.request import PromptTooLong as PromptTooLong
    from agenttrain.rollout.request import RolloutContext as RolloutContext
    from agenttrain.tools.build import build_toolbox as build_toolbox
    from agenttrain.tools.tool import FunctionTool as FunctionTool
    from agenttrain.tools.tool import Tool as Tool
    from agenttrain.tools.toolbox import Toolbox as Toolbox
    from agenttrain.types import AgenttrainError as AgenttrainError
    from agenttrain.types import Completion as Completion
    from agenttrain.types import ConfigError as ConfigError
    from agenttrain.types import Delegated as Delegated
    from agenttrain.types import Done as Done
    from agenttrain.types import Finish as Finish
    from agenttrain.types import Image as Image
    from agenttrain.types import LedgerError as LedgerError
    from agenttrain.types import Message as Message
    from agenttrain.types import Origin as Origin
    from agenttrain.types import Rollout as Rollout
    from agenttrain.types import Routes as Routes
    from agenttrain.types import RowTool as RowTool
    from agenttrain.types import Span as Span
    from agenttrain.types import StopReason as StopReason
    from agenttrain.types import Task as Task
    from agenttrain.types import ToolCall as ToolCall
    from agenttrain.types import ToolContext as ToolContext
    from agenttrain.types import ToolError as ToolError
    from agenttrain.types import ToolFailure as ToolFailure
    from agenttrain.types import ToolResult as ToolResult
    from agenttrain.types import ToolUnavailable as ToolUnavailable
    from agenttrain.types import Trajectory as Trajectory
    from agenttrain.types import TurnReward as TurnReward
    from agenttrain.utils.image_files import read_image as read_image
    from agenttrain.utils.model_path import model_folder as model_folder

_MODULES = {
    "AgentTask": "agenttrain.agents.task",
    "AgenttrainError": "agenttrain.types",
    "Chat": "agenttrain.chat.chat",
    "ChatTemplateConfig": "agenttrain.chat.config",
    "Completion": "agenttrain.types",
    "ConfigError": "agenttrain.types",
    "Delegated": "agenttrain.types",
    "Done": "agenttrain.types",
    "Engine": "agenttrain.engines.base",
    "EngineDead": "agenttrain.engines.base",
    "EngineError": "agenttrain.engines.base",
    "EngineInputs": "agenttrain.engines.spec",
    "EngineLoad": "agenttrain.engines.memory",
    "EngineMemory": "agenttrain.engines.memory",
    "EngineSettings": "agenttrain.engines.config",
    "EngineSpec": "agenttrain.engines.spec",
    "Finish": "agenttrain.types",
    "FunctionTool": "agenttrain.tools.tool",
    "Image": "agenttrain.types",
    "LedgerError": "agenttrain.types",
    "MemoryItem": "agenttrain.engines.memory",
    "Message": "agenttrain.types",
    "ModelSizes": "agenttrain.engines.memory",
    "ObjectiveInputs": "agenttrain.algorithms.objectives.base",
    "ObjectiveOutput": "agenttrain.algorithms.objectives.base",
    "Origin": "agenttrain.types",
    "PromptTooLong": "agenttrain.rollout.request",
    "ResponseSchemaConfig": "agenttrain.chat.config",
    "RewardError": "agenttrain.rewards.function",
    "RewardUnavailable": "agenttrain.rewards.function",
    "Rollout": "agenttrain.types",
    "RolloutConfig": "agenttrain.rollout.config",
    "RolloutContext": "agenttrain.rollout.request",
    "RolloutRequest": "agenttrain.rollout.config",
    "Routes": "agenttrain.types",
    "RowTool": "agenttrain.types",
    "RunFailed": "agenttrain.commands.python_api",
    "RunResult": "agenttrain.commands.python_api",
    "Rubric": "agenttrain.rewards.rubric",
    "Sampling": "agenttrain.engines.config",
    "ScriptedEngine": "agenttrain.engines.scripted",
    "Span": "agenttrain.types",
    "StopReason": "agenttrain.types",
    "Task": "agenttrain.types",
    "Tool": "agenttrain.tools.tool",
    "ToolCall": "agenttrain.types",
    "ToolContext": "agenttrain.types",
    "ToolError": "agenttrain.types",
    "ToolFailure": "agenttrain.types",
    "ToolResult": "agenttrain.types",
    "ToolUnavailable": "agenttrain.types",
    "Toolbox": "agenttrain.tools.toolbox",
    "Trajectory": "agenttrain.types",
    "TurnReward": "agenttrain.types",
    "build_objective": "agenttrain.algorithms.objectives.config",
    "build_toolbox": "agenttrain.tools.build",
    "load_chat": "agenttrain.chat.loading",
    "model_folder": "agenttrain.utils.model_path",
    "objective": "agenttrain.algorithms.objectives.config",
    "read_image": "agenttrain.utils.image_files",
    "run_rollout": "agenttrain.rollout.loop",
    "train": "agenttrain.commands.python_api",
}

__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'agenttrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
