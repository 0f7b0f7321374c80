"""Fingerprints of a run's parts besides its settings: rows, template, tools, rewards, model.

fingerprints.json in the run folder has a digest of each of them, so that a resumed run can name the
parts that have changed since. Digests leave out text that cannot change a run: comments, other
functions of a module, and agenttrain's own code, which has a version.

    {"data": {"rows of data.train": "93a1…", …}, "tools": {"schema of find": "07be…",
     "code of tools.find": "5c0d…"}, …}
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from agenttrain.data.tasks import TaskSource
from agenttrain.runs.setup import Components
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig, RunPart
from agenttrain.settings.saved import done_steps
from agenttrain.tracking.run_folder import write_atomically
from agenttrain.types import ConfigError
from agenttrain.utils.files import digest_of_blocks
from agenttrain.utils.hub import is_hub_id
from agenttrain.utils.locate import locate
from agenttrain.utils.model_path import model_folder

FILE = "fingerprints.json"
ROWS = 20_000
"""Rows of a dataset that are hashed, evenly spaced."""
ENDLESS_ROWS = 16
"""Rows of a dataset without end that are hashed: the first ones."""
BLOCK_BYTES = 2**16
"""Blocks of each file of weights that are hashed, evenly spaced: training changes all of them."""
OURS = "agenttrain."
FILE_ARGUMENTS = ("path", "database")
"""Arguments of bundled tools that name files and folders which the tools read and never write."""
CODE_ARGUMENTS = ("_target_", "connect")

Fingerprints = dict[str, dict[str, str]]


def fingerprints(components: Components) -> Fingerprints:
    """Return the fingerprints of a run that is about to start or to go on."""
    config = components.config
    toolboxes = [components.toolbox, *components.environments.toolboxes.values()]
    schemas = [schema for toolbox in toolboxes for schema in toolbox.schemas()]
    parts = {
        RunPart.data: {
            "rows of data.train": _rows(components.train_tasks),
            "rows of data.test": _rows(components.test_tasks),
        },
        RunPart.template: {"chat template": _digest(str(components.tokenizer.chat_template))},
        RunPart.tools: {
            **{f"schema of {s['function']['name']}": _digest(_json(s)) for s in schemas},
            **_code("tools", config.tools),
            **_files(config.tools),
        },
        RunPart.environment: {
            **_code("environment", config.environment),
            **_code("", {"user": config.user}),
        },
        RunPart.reward: _code("reward", config.reward),
        RunPart.model: {
            "tokenizer": _digest(_json(components.tokenizer.get_vocab())),
            **_model(config, components.verb),
        },
    }
    return {str(part): digests for part, digests in parts.items()}


def check_unchanged(folder: Path, now: Fingerprints, allowed: Sequence[RunPart]) -> None:
    """Compare `now` with the fingerprints in `folder`; only `allowed` parts may have changed.

    Raises ConfigError with the names of the others that have.
    """
    before = read(folder)
    if before is None:
        return
    if unknown := [part for part in now if part not in before]:
        print(
            f"warning: {folder / FILE}: holds nothing of {', '.join(unknown)}; it is not known "
            "whether these changed",
            file=sys.stderr,
        )
    changed: dict[str, list[str]] = {}
    for part in now:
        if part in before:
            names = dict.fromkeys([*before[part], *now[part]])
            old, new = before[part], now[part]
            changed[part] = [name for name in names if old.get(name) != new.get(name)]
    problems = {part: names for part, names in changed.items() if names and part not in allowed}
    if problems:
        listed = ", ".join(name for names in problems.values() for name in names)
        keys = ",".join([*problems, *(part for part in allowed if part not in problems)])
        raise ConfigError(
            f"resume={quote(str(folder))}: {listed} changed since the run "
            "was started. Restore it; or continue with the changed version: add "
            f"resume_changed=[{keys}]; or start a new run"
        )
    for part in allowed:
        listed = ", ".join(changed.get(part, ())) or "nothing of it"
        print(f"resume_changed={part}: {listed} changed", flush=True)


def check_resumed(components: Components) -> None:
    """Call `check_unchanged` for a run that would go on, if it has done a step."""
    config = components.config
    if config.resume is not None and done_steps(Path(config.resume)):
        check_unchanged(Path(config.resume), fingerprints(components), config.resume_changed)


def write(folder: Path, now: Fingerprints) -> None:
    """Write a run's fingerprints."""
    write_atomically(folder / FILE, json.dumps(now, indent=1) + "\n")


def read(folder: Path) -> Fingerprints | None:
    """Return a run's fingerprints; None, with a warning, where they are missing or not readable."""
    path = folder / FILE
    try:
        parts: Fingerprints = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(digests, dict) for digests in parts.values()):
            raise ValueError("not a digest by name for each part")
    except (OSError, ValueError, AttributeError) as error:
        missing = isinstance(error, FileNotFoundError)
        print(
            f"warning: {path}: {'missing' if missing else 'not readable'}, it is not known whether "
            f"data, template, tools, rewards or model changed{'' if missing else f': {error}'}",
            file=sys.stderr,
        )
        return None
    return parts


def _rows(source: TaskSource) -> str:
    """Return the digest of the number of rows and their content, in their order."""
    total = len(source)
    endless = total == sys.maxsize
    count = ENDLESS_ROWS if endless else min(total, ROWS)
    picked = range(count) if endless else (i * total // count for i in range(count))
    return _hashed([str(total), *(_json(asdict(source.row(index))) for index in picked)])


def _code(key: str, sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the user's own functions and classes."""
    digests = {}
    for name, section in sections.items():
        for argument in CODE_ARGUMENTS:
            path = section.get(argument) if isinstance(section, Mapping) else None
            if not isinstance(path, str) or path.startswith(OURS):
                continue
            where = ".".join(filter(None, (key, name, argument.replace("_target_", ""))))
            code = code_of(locate(path, key=where))
            if code is not None:
                digests[f"code of {where}"] = _digest(code)
    return digests


def _files(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files that bundled tools read.

    That of a folder covers the names and contents of all files in it.
    """
    digests = {}
    for name, section in sections.items():
        if not isinstance(section, Mapping) or not str(section.get("_target_")).startswith(OURS):
            continue
        for argument in FILE_ARGUMENTS:
            given = section.get(argument)
            path = None if given is None else Path(given).expanduser()
            if path is None or not path.exists():  # a bundled corpus is no path
                continue
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            texts = []
            for file in inside if path.is_dir() else [path]:
                with file.open("rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                texts.append(f"{file.relative_to(path).as_posix()} {digest}")
            digests[f"tools.{name}.{argument}"] = _hashed(texts)
    return digests


def _model(config: RunConfig, verb: str) -> dict[str, str]:
    """Return the commits of models of the hub, or the digests of folders' first weights.

    The latter only if a resumed run still reads them: the policy's for the reference of the KL
    penalty, or as the model under adapters, those of roles, and the teacher's in training by
    reinforcement.
    """
    teacher = config.algorithm.loaded_teacher
    read = bool(config.algorithm.kl or config.model.lora.rank)
    digests = _weights("model.path", config.model.path, config.model.revision, read)
    if teacher is not None and verb == "train":
        digests |= _weights("algorithm.teacher.path", teacher.path, teacher.revision, True)
    for name, role in used_roles(config, verb).items():
        assert role.model is not None
        digests |= _weights(f"roles.{name}.model", role.model, role.revision, True)
    return digests


def _weights(key: str, path: str, revision: str | None, read: bool) -> dict[str, str]:
    if is_hub_id(path):
        return {f"revision of {key}": str(revision)}
    if not read:
        return {}
    files = sorted(model_folder(path, key=key).glob("*.safetensors"))
    digests = [digest_of_blocks(file, BLOCK_BYTES) for file in files]
    return {f"weights of {key}": _hashed(digests)} if digests else {}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks; never to an address in memory, which differs per process."""
    for name in ("isoformat", "tolist", "hex"):
        method: Callable[[], Any] | None = getattr(value, name, None)
        if callable(method):
            return method()
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _hashed(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def code_of(target: Any) -> str | None:
    """Return the source of `target` and of everything that it uses in its module, and so on.

    Comments, blank lines and the module's other functions are left out, so that changes in them do
    not count. Imports from other modules are not followed. None if there is no source.
    """
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", type(target).__qualname__).partition(".")[0]
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return None
    definitions: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for defined in _names(node):
            definitions.setdefault(defined, []).append(node)
    used: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in used or name not in definitions:
            continue
        used.add(name)
        for node in definitions[name]:
            waiting += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    texts = [ast.unparse(node) for node in tree.body if used & set(_names(node))]
    return "\n".join(texts) or None


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines; none for an import."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif not isinstance(node, ast.Import | ast.ImportFrom):
        yield from (
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )
