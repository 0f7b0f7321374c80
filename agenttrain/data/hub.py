"""Rows of a dataset on the Hugging Face hub, or of a local folder of data files."""

from __future__ import annotations

from typing import Any

from agenttrain.config.row_file import check_hub
from agenttrain.data.rows import ArrowRows, load, reason


class HubRows(ArrowRows):
    """The rows of one split, by number; what is in the cache needs no network.

    Example: ``HubRows("openai/gsm8k", subset="main", split="test", limit=100)``
    """

    def __init__(
        self,
        path: str,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Raises ValueError, beginning with the argument, for what the hub does not have."""
        check_hub(path, subset, split, revision, limit)
        import datasets

        def read() -> Any:
            return datasets.load_dataset(path, subset, split=split, revision=revision)

        def message(error: Exception) -> str:
            """Return the error in terms of the setting that is to blame."""
            text = " ".join(str(error).split())
            if isinstance(error, ConnectionError):
                return (
                    f"path={path}: is not in the cache of datasets (HF_HOME), and the hub cannot "
                    "be reached; load it once where there is a network (HF_HUB_OFFLINE unset) and "
                    "bring the cache, or save_to_disk it and use data=file "
                    f"({reason(error)})"
                )
            if "split" in text.lower() and f'"{split}"' in text:
                return f"split={split}: {text}"
            if "config" in text.lower() and not isinstance(error, OSError):
                return f"subset={subset}: {text}; set data.subset=…"
            return f"path={path}: {reason(error)}"

        name = path if subset is None else f"{path} ({subset})"
        super().__init__(load(read, message), name=name, limit=limit)
        if len(self) == 0:
            raise ValueError(f"split={split}: has no rows")
