"""A vLLM server whose workers fail at an update, as a file in the run's folder orders.

The file `fault-<number of the server>` holds the fault, of the next update only:

    deaf    every call answers 200, and nothing is loaded
    die     the worker ends between the load and the end of the update
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from agenttrain.engines.vllm_server import files_transport, server_process

ORDERS = "FAULTY_SERVER_ORDERS"
"""Environment variable with the file, for the processes below the server."""
make_class = files_transport._engine_class


def faulty_class() -> Any:
    class FaultyEngine(make_class()):
        fault = ""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            file = Path(os.environ[ORDERS])
            self.fault = file.read_text() if file.exists() else ""
            file.unlink(missing_ok=True)
            if self.fault != "deaf":
                super().update_weights(update_info)

        def finish_weight_update(self) -> None:
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault != "deaf":
                super().finish_weight_update()

    return FaultyEngine


files_transport._engine_class = faulty_class  # also in processes that import this file anew


if __name__ == "__main__":
    os.environ[ORDERS] = str(Path(sys.argv[1], f"fault-{sys.argv[2]}"))
    server_process.main()
