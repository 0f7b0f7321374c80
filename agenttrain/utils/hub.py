"""Models of the Hugging Face hub: `org/name` and a revision -> a folder of the local cache.

`snapshot` downloads every file but the weights, `fetch_weights` the weights too. A snapshot's
folder is named by its commit, so all files in it are of one revision. For data sets, which
`datasets` downloads, `data_commit` only asks for the commit. huggingface_hub reads
`HF_HUB_OFFLINE`, `HF_HOME`, `HF_ENDPOINT` and `HF_TOKEN`; no token passes through this module.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean

LIGHT = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "vocab.*")
"""Files of a model besides its weights: configuration, tokenizer, chat template, indexes."""
WEIGHTS = (
    ("model*.safetensors", "adapter_model*.safetensors"),
    ("pytorch_model*.bin", "adapter_model*.bin"),
)
"""Files of weights; the second kind where a model has none of the first."""
NESTED = "*/*"
"""Files in a model's folders: its weights in formats of other libraries."""
PAUSES_S = (0.5, 2.0)
"""Seconds before each further try, after an answer 5xx or a broken connection."""
COMMIT = re.compile(r"[0-9a-f]{40}")
PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
ID = re.compile(f"{PART}/{PART}")
ANSWER_S = 10.0
"""Longest wait for an answer about a data set."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoKind:
    """A kind of repository on the hub, and the words for it in messages."""

    noun: str
    """``model``: a message says "the model is gated"."""
    page: str
    """Path before a repository's name in the address of its page: ``datasets/``."""
    offline: str
    """Remedy if the hub cannot be reached, a template: `{command}` is the command that downloads
    the repository, `{cache}` the folder with the downloaded files."""

    def remedy_without_hub(self, name: str, revision: str | None) -> str:
        """Return the template `offline` with its values, for the end of a message."""
        from huggingface_hub import constants

        command = download_command(name, revision)
        return self.offline.format(command=command, cache=constants.HF_HUB_CACHE)


MODEL = RepoKind(
    noun="model",
    page="",
    offline="run `{command}` where there is a network, and bring the cache ({cache})",
)
DATA = RepoKind(
    noun="data set",
    page="datasets/",
    offline="set HF_HUB_OFFLINE=1 if its rows are in the cache (HF_HOME), or use data=file with a "
    "folder that save_to_disk wrote",
)


def is_hub_id(path: str) -> bool:
    """Return True for `org/name`, unless there is a local folder or file of that name."""
    return bool(ID.fullmatch(path)) and not Path(path).exists()


@cache
def snapshot(name: str, revision: str | None, key: str) -> Path:
    """Return the folder of a model's snapshot, with all files but the weights.

    A commit that is in the cache needs no network. A branch or tag (None: main) is resolved by the
    hub, or by the cache where the hub cannot be reached. Raises ConfigError that begins with `key`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    def download() -> str:
        return snapshot_download(
            name, revision=revision, allow_patterns=list(LIGHT), ignore_patterns=[NESTED]
        )

    shows_bars = not are_progress_bars_disabled()
    disable_progress_bars()  # small files, and a bar would stand between the lines of `check`
    try:
        with explained(name, revision, key):
            return Path(_with_retries(download))
    finally:
        if shows_bars:
            enable_progress_bars()


@cache
def data_commit(name: str, revision: str | None, key: str) -> str | None:
    """Return the commit of a data set's revision; None if the hub cannot be reached.

    Raises ConfigError, which begins with `key`, if the hub refuses.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    def ask() -> str | None:
        information = HfApi().dataset_info(name, revision=revision, timeout=ANSWER_S)
        if information.gated:  # the hub describes it to anybody, but serves it only to some
            HfApi().auth_check(name, repo_type="dataset")
        return information.sha

    try:
        with explained(name, revision, key, DATA):
            return _with_retries(ask)
    except (HTTPError, OSError):  # no answer
        return None


def has_weights(folder: Path) -> bool:
    """Return True if a snapshot has every file of its weights."""
    for patterns in WEIGHTS:
        files = {file.name for pattern in patterns for file in folder.glob(pattern)}
        # Weights in several files have an index: name of a weight -> its file.
        index_file = next(folder.glob(f"*{Path(patterns[0]).suffix}.index.json"), None)
        if files:
            index = {} if index_file is None else json.loads(index_file.read_text(encoding="utf-8"))
            return set(index.get("weight_map", {}).values()) <= files
    return False


def fetch_weights(name: str, revision: str | None, key: str) -> Path:
    """Return the folder of a model's snapshot with its weights, downloaded if the cache lacks them.

    One process downloads; others of this machine wait for it. Files that an earlier attempt has
    completed are not downloaded again. Raises ConfigError that begins with `key`.
    """
    folder = snapshot(name, revision, key)
    if has_weights(folder):
        return folder
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import WeakFileLock

    repository = folder.parents[1]  # `folder` is <repository>/snapshots/<commit>
    lock = repository.parent / ".locks" / repository.name / f"{folder.name}.lock"
    with explained(name, folder.name, key):
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if has_weights(folder):
                return folder
            information = _with_retries(
                lambda: HfApi().model_info(name, revision=folder.name, files_metadata=True)
            )
            sizes = {file.rfilename: file.size or 0 for file in information.siblings or ()}
            for patterns in WEIGHTS:  # take the first kind of weights that the model has
                files = [
                    file
                    for file in sizes
                    if "/" not in file and any(fnmatch(file, pattern) for pattern in patterns)
                ]
                if files:
                    break
            else:
                raise ConfigError(
                    f"{key}={name}: has no weights that transformers reads (*.safetensors, *.bin); "
                    "name the repository that it was converted from"
                )
            needed = sum(sizes[file] for file in files if not (folder / file).exists())
            free = shutil.disk_usage(repository).free
            print(
                f"{key}={name}: downloading {_size_text(needed)} of weights to "
                f"{repository.parent}, where {_size_text(free)} are free",
                flush=True,
            )
            if needed > free:
                raise OSError(errno.ENOSPC, f"{_size_text(needed)} are needed")
            _with_retries(
                lambda: snapshot_download(name, revision=folder.name, allow_patterns=list(files))
            )
    return folder


def _size_text(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def download_command(name: str, revision: str | None) -> str:
    """Return the command that brings a whole model into the cache."""
    return f"hf download {name}" + ("" if revision is None else f" --revision {revision}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that caused an error; None without an answer."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if response is not None:
            return int(response.status_code)
    return None


def _with_retries(request: Callable[[], T]) -> T:
    """Return `request()`, called again after an answer 5xx or a broken connection."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    for pause in PAUSES_S:
        try:
            return request()
        except Exception as error:
            causes = list(_causes(error))
            status = _http_status(error)
            if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
                raise
            connection_broke = status is None and any(isinstance(c, HTTPError) for c in causes)
            server_failed = status is not None and status >= HTTPStatus.INTERNAL_SERVER_ERROR
            if not (connection_broke or server_failed):
                raise
        time.sleep(pause)
    return request()


@contextmanager
def explained(name: str, revision: str | None, key: str, kind: RepoKind = MODEL) -> Iterator[None]:
    """Turn errors of huggingface_hub, the network and the disk into one ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        problem = _describe_problem(error, name, revision, key, kind)
        if problem is None:
            raise
        raise ConfigError(f"{key}={name}: {problem}") from error


def revision_key(key: str) -> str:
    """Return the setting of the revision of a model that `key` names.

    Example: "model.base_path" -> "model.base_revision", "roles.judge.model" ->
    "roles.judge.revision".
    """
    return f"{key.removesuffix('path').removesuffix('model')}revision"


def _describe_problem(
    error: Exception, name: str, revision: str | None, key: str, kind: RepoKind
) -> str | None:
    """Return an error's problem and remedy; None if it is not about the hub."""
    refusal = _describe_refusal(error, name, revision, key, kind)
    if refusal is not None:
        return refusal
    # Without an answer of the hub, `datasets` may still find the rows in its own cache.
    return None if kind is DATA else _describe_failed_download(error, name, revision, key)


def _is_caused_by(error: BaseException, *kinds: type[BaseException]) -> bool:
    return any(isinstance(cause, kinds) for cause in _causes(error))


def _describe_refusal(
    error: Exception, name: str, revision: str | None, key: str, kind: RepoKind
) -> str | None:
    """Return the problem and remedy of an error status of the hub, or of a name that is no id.

    None if the hub has not answered. The exact errors come before the bare statuses, because they
    have a status too; a GatedRepoError is also a RepositoryNotFoundError.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status, hub, store = _http_status(error), constants.ENDPOINT, Path(constants.HF_HUB_CACHE)
    page, noun = f"{hub}/{kind.page}{name}", kind.noun
    if _is_caused_by(error, GatedRepoError):
        return (
            f"the {noun} is gated; accept its terms at {page}, and set HF_TOKEN to a token of the "
            "account that did"
        )
    if _is_caused_by(error, RevisionNotFoundError):
        return (
            f"the hub has no revision {revision} of it; set {revision_key(key)} to one that it has"
        )
    if _is_caused_by(error, RepositoryNotFoundError):
        cached = [
            folder.parent.name.removeprefix("models--").replace("--", "/")
            for folder in (store.glob("models--*/snapshots") if kind is MODEL else ())
        ]
        return (
            f"there is no such folder, and {hub} has no such {noun}{did_you_mean(name, cached)}; "
            "if it is private, set HF_TOKEN to a token that may read it"
        )
    if _is_caused_by(error, HFValidationError):
        return f"is no id of a {noun}: {str(error).splitlines()[0]}"
    if status == 401:
        return f"{hub} does not know the token (401); set HF_TOKEN to a valid one, or unset it"
    if status == 403:
        return (
            f"the token may not read it (403); accept the {noun}'s terms at {page} if it has any, "
            "or give the token the right to read it"
        )
    if status is not None:
        times = (  # only such answers are asked for again: `_with_retries`
            f", {len(PAUSES_S) + 1} times in a row"
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR
            else ""
        )
        remedy = kind.remedy_without_hub(name, revision)
        return f"{hub} answers with status {status}{times}; try again later, or {remedy}"
    return None


def _describe_failed_download(
    error: Exception, name: str, revision: str | None, key: str
) -> str | None:
    """Return the problem and remedy of a model's download that failed without the hub's answer.

    No network is wanted (HF_HUB_OFFLINE), the cache cannot be written, or the connection broke.
    None if the error is none of these.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    causes, hub, store = list(_causes(error)), constants.ENDPOINT, Path(constants.HF_HUB_CACHE)
    remedy = MODEL.remedy_without_hub(name, revision)
    # LocalEntryNotFoundError: a file is not in the cache. It is also raised if the network failed.
    is_offline = _is_caused_by(error, OfflineModeIsEnabled) or (
        constants.HF_HUB_OFFLINE and _is_caused_by(error, LocalEntryNotFoundError)
    )
    if is_offline:
        snapshots = (store / f"models--{name.replace('/', '--')}" / "snapshots").glob("*")
        complete = [folder.name for folder in snapshots if has_weights(folder)]
        if complete:  # weights and tokenizer have to be of one revision
            return (
                f"the cache has no weights of revision {revision or 'main'}, and HF_HUB_OFFLINE is "
                f"set; it has those of {', '.join(complete)}: set {revision_key(key)} to that, or "
                f"{remedy}"
            )
        return (
            "there is no such folder, it is not in the cache of the hub, and HF_HUB_OFFLINE is "
            f"set; unset it, or {remedy}"
        )
    disk_errors = [
        c for c in causes if isinstance(c, OSError) and c.errno in (errno.ENOSPC, errno.EDQUOT)
    ]
    if disk_errors:
        free = shutil.disk_usage(next(p for p in (store, *store.parents) if p.exists())).free
        return (
            f"the disk of the cache ({store}) is full: {disk_errors[0].strerror}, "
            f"{_size_text(free)} are free; make room, or set HF_HOME to a folder on another disk"
        )
    if _is_caused_by(error, PermissionError):
        return f"the cache ({store}) may not be written; set HF_HOME to a folder that may"
    if _is_caused_by(error, HTTPError, LocalEntryNotFoundError, ConnectionError):
        failure = next((c for c in reversed(causes) if isinstance(c, HTTPError)), causes[-1])
        return (
            f"is no folder, and {hub} cannot be reached, or the connection broke off "
            f"({str(failure) or type(failure).__name__}); files that are complete stay in the "
            f"cache. Try again, or {remedy}"
        )
    if isinstance(error, OSError):  # a file of the wrong length, for one
        return f"the download failed: {' '.join(str(error).split())}; try again"
    return None
