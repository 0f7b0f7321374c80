"""What every benchmark shares: `--quick`, `--json FILE`, and one flat object of figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path


def run(description: str, measure: Callable[[bool], dict[str, float]]) -> None:
    """Parse the command line, measure, print the figures and write them where asked."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, same figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    for name, value in figures.items():
        print(f"{name:36} {value:12.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
