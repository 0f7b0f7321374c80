"""`agenttrain init <name>`: a folder with an agent that runs, to be changed into one's own."""

from __future__ import annotations

import keyword
import sys
from argparse import Namespace
from importlib.machinery import PathFinder
from pathlib import Path

from agenttrain.types import ConfigError
from agenttrain.utils.files import conf_folder, list_groups, skills_folder

NAME = "my_agent"
"""Placeholder for the agent's name in the texts of the skeleton and the skill."""
FILES = {
    "README.md": "README.md",
    "AGENTS.md": "AGENTS.md",
    "agent.py": "{}.py",
    "test_agent.py": "test_{}.py",
    "train.jsonl": "train.jsonl",
    "test.jsonl": "test.jsonl",
    "experiment.yaml": "conf/experiment/{}.yaml",
}
"""File of the skeleton, which ends in .txt besides -> its path in the new folder."""
SKILL = "agenttrain/SKILL.md"
"""Skill for coding agents: its path in the folder of skills, of the package and of an agent."""
COMMANDS = {
    "check --config-dir conf experiment={}": "what a run would be",
    "rehearse --config-dir conf experiment={}": "tool and reward, without a model",
    "--config-dir conf experiment={} debug=tiny": "train: two steps, in seconds",
}
"""Words behind `agenttrain` -> what they are for; README.md has them too."""


def init(args: Namespace) -> int:
    """Make the folder of a new agent; exit code 0. Raises ConfigError."""
    folder, name = args.name, args.name.name
    problem = name_problem(name)
    if problem is not None:
        raise ConfigError(f"init {folder}: {problem}; choose another name, e.g. my_agent")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"init {folder}: holds something already; name a new folder")
    skeleton = Path(__file__).with_name("skeleton")
    templates = {
        folder / place.format(name): skeleton / f"{source}.txt" for source, place in FILES.items()
    }
    templates[folder / ".claude" / "skills" / SKILL] = skills_folder() / SKILL
    try:
        for file, template in templates.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            content = template.read_text(encoding="utf-8").replace(NAME, name)
            file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"init {folder}: {error.filename}: {error.strerror}; name a folder that can be written"
        ) from error
    # Commands to try, each with its explanation.
    commands = {f"agenttrain {words.format(name)}": about for words, about in COMMANDS.items()}
    commands["pytest"] = "the test, if pytest is installed"
    width = max(map(len, commands))
    print(f"{folder}: a tool, a reward, ten rows, settings and a test. Try them:\n  cd {folder}")
    for command, about in commands.items():
        print(f"  {command:<{width}}  {about}")
    print("README.md says which file holds what, .claude/skills/ has a skill for coding agents.")
    return 0


def name_problem(name: str) -> str | None:
    """Return why an agent cannot have this name; None if it can."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        return "is not a name of a Python module: letters, digits and _, not a digit first"
    # The current folder comes last on the path, so that an installed module would hide the agent's.
    # A folder without code has no origin (a namespace package), and hides nothing.
    spec = PathFinder.find_spec(name, sys.path[:-1])
    if name in sys.stdlib_module_names or (spec is not None and spec.origin is not None):
        return "is the name of an installed module, which would be imported instead"
    if name in list_groups(conf_folder())["experiment"]:
        return f"is an experiment of agenttrain's, experiment={name}"
    return None
