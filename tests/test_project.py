"""What a public project has beside its code says the same as the code: versions, linters, workflow, templates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import tieredemb

REPOSITORY = Path(__file__).parents[1]
RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
TRIED = r"^\| (pinned|oldest) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|"
TYPE_IGNORES, CASTS = 34, 12  # in the package: limits, which only fall
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # of Keep a Changelog


def parsed(name):
    return yaml.safe_load((REPOSITORY / name).read_text())


@pytest.fixture(scope="module")
def changelog():
    return (REPOSITORY / "CHANGELOG.md").read_text()


# --- versions ---------------------------------------------------------------------------------------------------------


def test_version_has_one_source():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "tieredemb.__version__"


def test_version_is_the_newest_of_the_changelog(changelog):
    releases = RELEASE.findall(changelog)
    headings = re.findall(r"^## \[(.*)\]", changelog, re.MULTILINE)
    assert [version for version, _ in releases] == headings[headings[0] == "Unreleased" :]
    order = [(date, [int(part) for part in version.split(".")]) for version, date in releases]
    assert order == sorted(order, reverse=True)
    assert releases[0][0] == tieredemb.__version__


def test_versions_that_were_tried_are_those_of_the_project():
    """The pinned ones, and the oldest that are allowed."""
    rows = {
        row[0]: row[1:] for row in re.findall(TRIED, (REPOSITORY / "docs" / "install.md").read_text(), re.MULTILINE)
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([\w-]+)==(.*)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    oldest = dict(wanted.split(">=") for wanted in project["dependencies"])
    assert rows["pinned"][1:] == tuple(pins[name] for name in ("torch", "numpy", "numba"))
    assert rows["oldest"][0] == project["requires-python"].removeprefix(">=")
    assert all(
        given.startswith(oldest[name])
        for name, given in zip(("torch", "numpy", "numba"), rows["oldest"][1:], strict=True)
    )


def test_changelog_has_the_headings_of_keep_a_changelog(changelog):
    assert set(re.findall(r"^### (.*)$", changelog, re.MULTILINE)) <= KINDS


def test_citation_is_of_this_version(changelog):
    citation = parsed("CITATION.cff")
    version, date = RELEASE.search(changelog).groups()
    assert (citation["version"], citation["date-released"].isoformat()) == (version, date)
    license = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["license"]
    assert citation["license"] == license
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


# --- checks -----------------------------------------------------------------------------------------------------------


def test_commits_are_checked_as_by_make_lint():
    (repo,) = parsed(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1]
    linted = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    assert entries == linted


def test_comments_and_casts_for_the_type_checker_only_fall():
    """Above a limit: have the types say it, as by a narrower signature, a Protocol, or a check that mypy follows."""
    source = "".join(path.read_text() for path in sorted((REPOSITORY / "tieredemb").rglob("*.py")))
    ignores, casts = source.count("type: ignore"), len(re.findall(r"(?<![.\w])cast\(", source))  # those of typing
    assert ignores <= TYPE_IGNORES
    assert casts <= CASTS


def test_workflow_runs_what_ci_runs():
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run"]
    assert (REPOSITORY / ".ci" / "run").exists()


def test_workflow_takes_the_oldest_python():
    oldest = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    (job,) = parsed(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python"][0] == oldest.removeprefix(">=")


def test_bug_reports_have_what_the_doctor_prints():
    fields = {field.get("id"): field for field in parsed(".github/ISSUE_TEMPLATE/bug_report.yml")["body"]}
    assert "python -m tieredemb doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]
