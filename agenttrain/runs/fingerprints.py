"""Fingerprints of a run's parts besides its settings: rows, template, tools, rewards, model.

fingerprints.json in the run folder has a digest of each part, so that a resumed run can name the
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
from agenttrain.settings.mixture import located
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig, RunPart
from agenttrain.settings.saved import done_steps
from agenttrain.types import ConfigError, Task
from agenttrain.utils.files import digest_of_blocks, write_atomically
from agenttrain.utils.hub import is_hub_id
from agenttrain.utils.locate import locate
from agenttrain.utils.model_path import model_folder

FILE = "fingerprints.json"
ROWS = 20_000
"""Rows of a dataset that are hashed, evenly spaced."""
ENDLESS_ROWS = 16
"""Rows of a dataset without end that are hashed: the first ones."""
BLOCK_BYTES = 2**16
"""Bytes hashed of each file of weights, in evenly spaced blocks: training changes all of them."""
OURS = "agenttrain."
"""Beginning of the paths of bundled components, whose code has a version and is not hashed."""
FILE_ARGUMENTS = ("path", "database")
"""Arguments of bundled tools that name files and folders which the tools read and never write."""
CODE_ARGUMENTS = ("_target_", "connect")
"""Arguments of components that name functions and classes."""

Fingerprints = dict[str, dict[str, str]]


def fingerprints(components: Components) -> Fingerprints:
    """Return the digest of each part of a run, by which a resumed run notices what has changed.

    Example: ``{"data": {"rows of data.train": "93a1…"}, "tools": {"code of tools.find": "5c0d…"},
    "template": {"chat template": "07be…"}, …}``, with a key for each RunPart.
    """
    config = components.config
    parts: Fingerprints = {str(part): {} for part in RunPart}  # a RunPart is a str
    # A run without a mixture has one source, "".
    for source, source_components in (components.sources or {"": components}).items():
        for part, digests in _source_fingerprints(source_components).items():
            # "code of tools.find" of the source shop -> "code of data.sources.shop.tools.find"
            located_digests = {located(config, source, key): d for key, d in digests.items()}
            parts[part] |= located_digests
    # Template and model are those of the whole run: no source has any.
    parts[RunPart.template] = {"chat template": _digest(str(components.tokenizer.chat_template))}
    parts[RunPart.model] = {
        "tokenizer": _digest(_json(components.tokenizer.get_vocab())),
        **_model_digests(config, components.verb),
    }
    return parts


def _source_fingerprints(components: Components) -> Fingerprints:
    """Return the fingerprints of rows, tools, environments and rewards, of a source or the run."""
    config = components.config
    toolboxes = [components.toolbox, *components.environments.toolboxes.values()]
    schemas = [schema for toolbox in toolboxes for schema in toolbox.schemas()]
    train, test = components.tasks.train, components.tasks.test
    assert isinstance(train, TaskSource) and isinstance(test, TaskSource)
    suffix = f" ({train.source})" if train.source else ""  # "schema of find (shop)" in a mixture
    return {
        RunPart.data: {
            "rows of data.train": _rows_digest(train),
            "rows of data.test": _rows_digest(test),
        },
        RunPart.tools: {
            **{f"schema of {s['function']['name']}{suffix}": _digest(_json(s)) for s in schemas},
            **_code_digests("tools", config.tools),
            **_file_digests(config.tools),
        },
        RunPart.environment: {
            **_code_digests("environment", config.environment),
            # The section `user` is one component, not a mapping of them: no key stands before it.
            **_code_digests("", {"user": config.user}),
        },
        RunPart.reward: _code_digests("reward", config.reward),
    }


def check_unchanged(folder: Path, current: Fingerprints, allowed: Sequence[RunPart]) -> None:
    """Compare `current` with the fingerprints in `folder`; only `allowed` parts may differ.

    Raises ConfigError with the names of everything else that changed.
    """
    before = read(folder)
    if before is None:  # `read` has printed a warning
        return
    # A run of an older version may have recorded fewer parts.
    if unrecorded := [part for part in current if part not in before]:
        print(
            f"warning: {folder / FILE}: holds nothing of {', '.join(unrecorded)}; it is not known "
            "whether these changed",
            file=sys.stderr,
        )
    changed: dict[str, list[str]] = {}
    for part in current:
        if part in before:
            old, new = before[part], current[part]  # name of a digest -> digest
            names = dict.fromkeys([*old, *new])  # of either, in order
            changed[part] = [name for name in names if old.get(name) != new.get(name)]
    refused = {part: names for part, names in changed.items() if names and part not in allowed}
    if refused:
        refused_names = ", ".join(name for names in refused.values() for name in names)
        # The setting's new value replaces the present one, so it lists the allowed parts again.
        parts_to_allow = ",".join([*refused, *allowed])
        raise ConfigError(
            f"resume={quote(str(folder))}: {refused_names} changed since the run "
            "was started. Restore it; or continue with the changed version: add "
            f"resume_changed=[{parts_to_allow}]; or start a new run"
        )
    for part in allowed:
        changed_names = ", ".join(changed.get(part, ())) or "nothing of it"
        print(f"resume_changed={part}: {changed_names} changed", flush=True)


def check_resumed(components: Components) -> None:
    """Call `check_unchanged` for a run that would be resumed, if it has done a step."""
    config = components.config
    if config.resume is not None and done_steps(Path(config.resume)):
        check_unchanged(Path(config.resume), fingerprints(components), config.resume_changed)


def write(folder: Path, current: Fingerprints) -> None:
    """Write a run's fingerprints."""
    write_atomically(folder / FILE, json.dumps(current, indent=1) + "\n")


def read(folder: Path) -> Fingerprints | None:
    """Return a run's fingerprints; warn and return None if they are missing or not readable."""
    path = folder / FILE
    try:
        parts: Fingerprints = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(digests, dict) for digests in parts.values()):
            raise ValueError("not a digest by name for each part")
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: it is no object
        problem, detail = "not readable", f": {error}"
        if isinstance(error, FileNotFoundError):
            problem, detail = "missing", ""
        print(
            f"warning: {path}: {problem}, it is not known whether data, template, tools, rewards "
            f"or model changed{detail}",
            file=sys.stderr,
        )
        return None
    return parts


def _rows_digest(source: TaskSource) -> str:
    """Return the digest of the number of rows and of the content of some of them.

    Those are the first ENDLESS_ROWS rows of a source without end, and at most ROWS rows, evenly
    spaced, of any other.
    """
    total = len(source)
    if source.endless:
        indices = list(range(ENDLESS_ROWS))
    else:
        count = min(total, ROWS)
        indices = [i * total // count for i in range(count)]
    return _digest_of_lines([str(total), *(_json(_row_content(source.row(i))) for i in indices)])


def _row_content(task: Task) -> dict[str, Any]:
    """Return all fields of a task but the name of its source, which is no part of its row."""
    return {name: value for name, value in asdict(task).items() if name != "source"}


def _code_digests(key: str, sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the user's own functions and classes, which `sections` name.

    Example: ``{"code of tools.find": "5c0d…"}`` for the key "tools" and a section "find".
    """
    digests = {}
    for name, section in sections.items():
        for argument in CODE_ARGUMENTS:
            path = section.get(argument) if isinstance(section, Mapping) else None
            if not isinstance(path, str) or path.startswith(OURS):
                continue
            # `_target_` of tools.find: "tools.find"; `connect` of user: "user.connect".
            full_key = ".".join(filter(None, (key, name, argument.replace("_target_", ""))))
            code = code_of(locate(path, key=full_key))
            if code is not None:
                digests[f"code of {full_key}"] = _digest(code)
    return digests


def _file_digests(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files and folders that bundled tools read.

    A folder's digest covers the names and contents of all files in it.
    """
    digests = {}
    for name, section in sections.items():
        if not isinstance(section, Mapping) or not str(section.get("_target_")).startswith(OURS):
            continue
        for argument in FILE_ARGUMENTS:
            value = section.get(argument)
            path = None if value is None else Path(value).expanduser()
            if path is None or not path.exists():  # the name of a bundled corpus is no path
                continue
            files = [path]
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
            lines = []
            for file in files:
                with file.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                lines.append(f"{file.relative_to(path).as_posix()} {digest}")
            digests[f"tools.{name}.{argument}"] = _digest_of_lines(lines)
    return digests


def _model_digests(config: RunConfig, verb: str) -> dict[str, str]:
    """Return the commits of models of the hub, and the digests of the weights of local models.

    Local weights count only if a resumed run still reads them: the policy's own as the reference of
    the KL penalty or as the model under adapters, those of roles, and the teacher's in training by
    reinforcement.
    """
    teacher = config.algorithm.loaded_teacher
    reads_policy = bool(config.algorithm.kl or config.model.lora.rank)
    model = config.model
    digests = _weights_digest("model.path", model.path, model.revision, is_read=reads_policy)
    if teacher is not None and verb == "train":
        key = "algorithm.teacher.path"
        digests |= _weights_digest(key, teacher.path, teacher.revision, is_read=True)
    for name, role in used_roles(config, verb).items():
        assert role.model is not None
        key = f"roles.{name}.model"
        digests |= _weights_digest(key, role.model, role.revision, is_read=True)
    return digests


def _weights_digest(key: str, path: str, revision: str | None, *, is_read: bool) -> dict[str, str]:
    """Return the commit of a model of the hub, or the digest of a local folder's weights.

    `key` is the model's setting, with which the entry is named. Reading all weights takes time:
    without `is_read` a local folder has no entry.
    """
    if is_hub_id(path):
        return {f"revision of {key}": str(revision)}
    if not is_read:
        return {}
    files = sorted(model_folder(path, key=key).glob("*.safetensors"))
    digests = [digest_of_blocks(file, BLOCK_BYTES) for file in files]
    return {f"weights of {key}": _digest_of_lines(digests)} if digests else {}


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


def _digest_of_lines(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def code_of(target: Any) -> str | None:
    """Return the source of `target` and of everything in its module that it uses, also indirectly.

    "Uses" means that its code has the name: names are followed from definition to definition.
    Comments, blank lines and the module's other functions are left out, so that changes in them do
    not count. Imports from other modules are not followed. Return None if there is no source.
    """
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    # The definition at the module's top level: of an object its class, of a method or a nested
    # class the outermost class.
    top_name = getattr(target, "__qualname__", type(target).__qualname__).partition(".")[0]
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return None
    definitions: dict[str, list[ast.stmt]] = {}  # name -> the statements that define it
    for node in tree.body:
        for defined_name in _defined_names(node):
            definitions.setdefault(defined_name, []).append(node)
    used: set[str] = set()
    to_visit = [top_name]
    while to_visit:
        name = to_visit.pop()
        if name in used or name not in definitions:
            continue
        used.add(name)
        for node in definitions[name]:
            to_visit += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    texts = [ast.unparse(node) for node in tree.body if used & set(_defined_names(node))]
    return "\n".join(texts) or None


def _defined_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines; none for an import."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif not isinstance(node, ast.Import | ast.ImportFrom):
        yield from (
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )
