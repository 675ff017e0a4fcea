"""What `make` installs: training gets what it needs, and no tools."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAME = re.compile(r"^[\w-]+")
REQUIRED = re.compile(r'require\(\s*"[\w.]+", "([\w-]+)"')


def packages_of(extra):
    """The packages of an extra, those of the extras that it names among them."""
    found = set()
    for wanted in EXTRAS[extra]:
        inner = re.fullmatch(r"tieredemb\[(.*)\]", wanted)
        found |= set().union(*map(packages_of, inner[1].split(","))) if inner else {NAME.match(wanted)[0]}
    return found


def commands_of(target):
    """What `make` would run on a fresh machine."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.parametrize(("target", "extra", "other"), [("train", "train", "dev"), ("test", "dev", "train")])
def test_target_installs_its_extra_alone(target, extra, other):
    commands = commands_of(target)
    assert f"'.[{extra}]'" in commands
    assert f'".[{extra},cuda$cuda]"' in commands
    assert f".[{other}" not in commands


def test_training_installs_what_the_example_asks_for():
    asked = {
        package for path in (REPOSITORY / "examples").rglob("*.py") for package in REQUIRED.findall(path.read_text())
    }
    brought = {NAME.match(wanted)[0] for wanted in metadata.requires("scikit-learn")}
    assert {"matplotlib", "tqdm"} <= asked
    assert asked <= packages_of("train") | brought


def test_training_installs_no_tools():
    assert packages_of("train") < packages_of("dev")
    assert not packages_of("train") & {"ruff", "mypy", "pytest", "hypothesis", "sphinx", "build"}
