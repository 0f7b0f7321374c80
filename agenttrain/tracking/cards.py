"""The dense bf16 peak rates of GPUs, from the table cards.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from agenttrain.utils.files import parse_yaml

PEAK_TFLOPS: Mapping[str, float] = parse_yaml(
    Path(__file__).with_name("cards.yaml").read_text(encoding="utf-8")
)
"""Words of a card's name -> dense bf16 peak in TFLOP/s."""
OTHER_RATE = {"MIG", "Laptop", "Ti", "D"}
"""Words in the names of parts of cards and of variants, whose rates are others."""


def peak_tflops(name: str) -> float | None:
    """Return the dense bf16 peak of a card by the driver's name for it; None if it is not known.

    Example: ``NVIDIA H100 80GB HBM3`` has 989, ``NVIDIA H100 PCIe`` 756.
    """
    words = set(re.split(r"[\s-]+", name))  # ``NVIDIA A100-SXM4-80GB``
    if words & OTHER_RATE:
        return None
    matches = [entry for entry in PEAK_TFLOPS if set(entry.split()) <= words]
    best = max(matches, key=lambda entry: len(entry.split()), default=None)
    return None if best is None else PEAK_TFLOPS[best]
