"""What is published: wheel and sdist, lock file, citation, Dockerfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = re.findall(r"for extra in (.*?);", (ROOT / "scripts" / "lock").read_text())[0].split()
"""Extras whose packages scripts/lock writes."""


def run(*command: str, cwd: Path) -> str:
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_lock_file_has_a_version_of_every_requirement():
    """Remake it with scripts/lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked: dict[str, list[Requirement]] = {}
    for line in lines:
        if not line.startswith("#"):
            one = Requirement(line)
            locked.setdefault(canonicalize_name(one.name), []).append(one)
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(text for name in LOCKED for text in extras[name])]
    for text in wanted:
        requirement = Requirement(text)
        found = locked.get(canonicalize_name(requirement.name), [])
        assert found, f"{text}: is not in requirements.lock"
        for one in found:
            (version,) = one.specifier
            assert version.operator == "==" and requirement.specifier.contains(version.version), one


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"], citation["license"]) == (
        *(PROJECT["name"], PROJECT["version"], PROJECT["license"]),
    )
    assert citation["authors"] and citation["message"]


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="needs hadolint: pip install '.[test]'"
)
def test_the_dockerfile_has_no_lint():
    run("hadolint", "Dockerfile", cwd=ROOT)


def test_the_dockerfile_copies_what_the_package_is_built_of():
    text = (ROOT / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()}
    assert {"pyproject.toml", "requirements.lock", "README.md", "LICENSE"} <= copied
    assert {"agenttrain", "conf", "skills"} <= copied
    assert all((ROOT / name).exists() for name in copied)


def tracked(*folders: str) -> set[str]:
    """The committed files in these folders."""
    return set(run("git", "ls-files", *folders, cwd=ROOT).splitlines())


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository, to list its files")
def test_sdist_and_wheel_hold_the_committed_files_and_no_others(tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), cwd=ROOT)
    stem = f"{PROJECT['name']}-{PROJECT['version']}"
    with ZipFile(tmp_path / f"{stem}-py3-none-any.whl") as archive:
        metadata = archive.read(f"{stem}.dist-info/METADATA").decode()
        entries = archive.read(f"{stem}.dist-info/entry_points.txt").decode()
        wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    packaged = {f"agenttrain/{name}" for name in tracked("conf", "skills")}
    assert wheel == tracked("agenttrain") | packaged
    with tarfile.open(tmp_path / f"{stem}.tar.gz") as archive:
        sdist = {
            name.removeprefix(f"{stem}/")
            for name in archive.getnames()
            if "__pycache__" not in name
        }
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    places = config["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    expected = tracked(*(place.removeprefix("/") for place in places))
    assert expected <= sdist
    assert sdist - expected <= {"PKG-INFO", "pyproject.toml", ".gitignore"}

    header, _, description = metadata.partition("\n\n")
    assert f"\nVersion: {PROJECT['version']}\n" in header
    assert "\nDescription-Content-Type: text/markdown" in header
    assert description == (ROOT / "README.md").read_text()
    extras = set(re.findall(r"^Provides-Extra: (.+)$", header, re.M))
    assert extras == set(PROJECT["optional-dependencies"])
    assert {"agenttrain = agenttrain.cli:main"} <= set(entries.splitlines())


@pytest.mark.long
def test_a_wheel_made_of_the_sdist_trains_outside_the_checkout(tmp_path):
    build = (sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path))
    run(*build, "-t", "sdist", cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    run(*build, "-t", "wheel", cwd=tmp_path / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"agenttrain/py.typed", "agenttrain/skills/agenttrain/SKILL.md"} <= names
    conf = {str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}
    packaged = {name.removeprefix("agenttrain/") for name in names if "/conf/" in name}
    assert conf == {name for name in packaged if name.endswith(".yaml")}

    run(sys.executable, "-m", "venv", "venv", cwd=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel), cwd=tmp_path)
    # Its requirements are those of the environment that runs this test.
    packages = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    (Path(packages.strip()) / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    work = tmp_path / "work"
    work.mkdir()
    agenttrain = str(tmp_path / "venv" / "bin" / "agenttrain")
    where = run(python, "-c", "import agenttrain; print(agenttrain.__file__)", cwd=work)
    assert where.startswith(str(tmp_path / "venv"))
    run(agenttrain, "check", "experiment=calculator", cwd=work)
    run(agenttrain, "debug=tiny", "tracker=none", "hydra.run.dir=run", cwd=work)
    assert '"status": "finished"' in (work / "run" / "summary.json").read_text()
