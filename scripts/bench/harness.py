"""What every benchmark shares: `--quick`, `--json FILE`, and one flat object of figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

Measure = Callable[[bool], dict[str, float]]
"""Takes `quick`, and returns figures by name."""


def run(description: str, measure: Measure) -> None:
    """Parse the command line, measure, print the figures and write them where asked."""
    arguments = _parser(description).parse_args()
    figures = measure(arguments.quick)
    _print(figures)
    if arguments.json:
        _write(arguments.json, figures)


def run_parts(description: str, parts: Mapping[str, Measure]) -> None:
    """Take the options of `run`, and `--only`, which names the parts to measure.

    Figures of other parts that the file has stay in it.
    """
    parser = _parser(description)
    parser.add_argument("--only", nargs="+", choices=parts, default=[*parts], metavar="PART")
    arguments = parser.parse_args()
    for name in arguments.only:
        figures = parts[name](arguments.quick)
        _print(figures)
        if path := arguments.json:
            _write(path, {**(json.loads(path.read_text()) if path.exists() else {}), **figures})


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, same figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def _print(figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        print(f"{name:36} {value:12.4g}", flush=True)


def _write(path: Path, figures: Mapping[str, float]) -> None:
    path.write_text(json.dumps(figures, indent=2) + "\n")
