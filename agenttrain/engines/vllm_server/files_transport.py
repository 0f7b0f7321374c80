"""vLLM plugin: the weight transfer backend "files", and processes that end with their parent.

vLLM calls `register` in each of its processes (entry points `vllm.general_plugins`). It does
nothing unless agenttrain has started the process as a server. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.weight_files import read_verified, verify

BACKEND = "files"
PLUGIN = "agenttrain"
"""Name of the entry point."""
OWN_GROUP = "AGENTTRAIN_SERVER_OWN_GROUP"
"""Environment variable of a run's servers: each has a process group, which ends as a whole."""
METHODS = "agenttrain.engines.vllm_server.files_transport.WorkerMethods"
VERIFY = "agenttrain_verify"
"""Name of the method in `WorkerMethods`."""


class Verification(Thread):
    """Verifies a version of the weights while the worker goes on sampling.

    A thread of a server's worker process. `WorkerMethods` starts one for each new version.
    """

    latest: Verification | None = None
    """The newest one of this worker process."""

    def __init__(self, folder: str, digest: str) -> None:
        super().__init__(daemon=True)
        self.version = (folder, digest)
        self.error = ""

    def run(self) -> None:
        """Read and hash all files. Hashing releases the GIL, so the worker goes on sampling."""
        folder, digest = self.version
        try:
            verify(Path(folder), digest)
        except Exception as error:
            self.error = f"{error}"

    @property
    def passed(self) -> bool:
        return not self.is_alive() and not self.error


class WorkerMethods:
    """Method that vLLM adds to its workers (--worker-extension-cls)."""

    def agenttrain_verify(self, folder: str, digest: str) -> dict[str, Any]:
        """Return the state of a version's verification, which the first call starts."""
        latest = Verification.latest
        if latest is None or latest.version != (folder, digest):
            latest = Verification.latest = Verification(folder, digest)
            latest.start()
        return {"done": not latest.is_alive(), "error": latest.error}


def register() -> None:
    """Add agenttrain's weight transfer backend, which reads files, to vLLM.

    A plugin: vLLM calls it in each of its processes. In a run's server it also makes these
    processes end with their parent.
    """
    if TOKEN not in os.environ:  # this process is no server of agenttrain's
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from agenttrain.utils.child_process import end_with_parent

    if BACKEND not in WeightTransferEngineFactory._registry:  # the first call in this process
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())
        if OWN_GROUP in os.environ:
            end_with_parent()


@dataclass
class FilesInit:
    """Settings of the backend at its start. There are none."""


def _engine_class() -> Any:
    """Return the backend's class, made here because its base class is vLLM's, imported late."""
    import torch
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class FilesUpdate(WeightTransferUpdateInfo):
        """One version: its folder, and the digest of its manifest."""

        folder: str
        digest: str

    class FilesEngine(WeightTransferEngine[FilesInit, FilesUpdate]):
        """Loads verified files into the model, in each worker of a server."""

        init_info_cls = FilesInit
        update_info_cls = FilesUpdate

        def init_transfer_engine(self, init_info: FilesInit) -> None:
            pass

        def start_weight_update(self) -> None:
            """Do nothing: the model is opened once the files have been verified."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load files, which are verified first unless `agenttrain_verify` has done so.

            After an error the model stays open. The server then dies at its next forward pass,
            instead of sampling from a mixture of weights.
            """
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            info = self.parse_update_info(update_info)
            latest, version = Verification.latest, (info.folder, info.digest)
            verified = latest is not None and latest.version == version and latest.passed
            weights = read_verified(Path(info.folder), info.digest, verified=verified)
            initialize_layerwise_reload(self.model)  # opens the model: its weights can be replaced
            self.model.load_weights(weights)
            self._loaded = True
            # The base class always synchronises, which raises without a GPU.
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: FilesUpdate) -> None:
            raise NotImplementedError("update_weights does all")

        def finish_weight_update(self) -> None:
            """Close the model. Raises RuntimeError without an update."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            if not getattr(self, "_loaded", False):  # `__init__`, which is vLLM's, does not set it
                raise RuntimeError("finish_weight_update came without update_weights")
            finalize_layerwise_reload(self.model, self.model_config)
            self._loaded = False

        def shutdown(self) -> None:
            pass

    return FilesEngine
