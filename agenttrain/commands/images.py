"""`agenttrain images`: the images that a run's rows need, and building those that are missing."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import asdict, dataclass

from agenttrain.commands.verb import STDOUT, as_config_error, write_report
from agenttrain.runs.setup import Components, prepare_images, tasks_to_prepare
from agenttrain.runtimes import images
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReport:
    """One image that rows need."""

    image: str
    source: str
    """Folder of which it is made; empty for an image with a name."""
    present: bool


def show(config: RunConfig, args: Namespace) -> int:
    """List the images; with `--build`, build the missing ones. Return 1 if one is missing."""
    with as_config_error():
        components = Components(config)
        if components.machines is None:
            raise ConfigError(f"runtime={config.runtime.name}: has no images; add runtime=podman")
        if args.build:
            prepare_images(components)
        names = list(components.machines.images_of(tasks_to_prepare(components)))
        reports = asyncio.run(_examine(config.runtime.client, names))
    write_report([asdict(report) for report in reports], args.json)
    if args.json != STDOUT:  # there the JSON takes the place of the text
        for report in reports:
            state = "present" if report.present else "missing"
            origin = f"  from {report.source}" if report.source else ""
            print(f"{state}  {report.image}{origin}")
    return int(not all(report.present for report in reports))


async def _examine(client: str, names: list[str]) -> list[ImageReport]:
    """Return a report of each name, which is an image's or a folder's to build one from.

    `client` is the program that is asked for the images: podman or docker.
    """
    reports = []
    for name in names:
        folder = images.is_folder(name)
        image = images.content_tag(images.folder_of(name)) if folder else name
        reports.append(
            ImageReport(
                image=image,
                source=name if folder else "",
                present=await images.exists(client, image),
            )
        )
    return reports
