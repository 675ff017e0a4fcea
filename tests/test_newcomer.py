"""`make newcomer`: what it runs of a project, and that it fails where a line of it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "tools" / "newcomer.py"
README = """# A project
```sh
git clone https://example.com/tieredemb && cd tieredemb
pip install .            # not where an environment is given
echo one; \\
    echo two  # a comment
ls README.md
```
```python
x = 1
```
Text.
```python
print(x + 1)
```
"""


@pytest.fixture
def first_hour(tmp_path):
    """Runs the script over a project of these files: (exit code, rows of the table by name, what is on stderr)."""

    def run(*, installed=True, **files):
        project = tmp_path / "project"
        for name, text in files.items():
            path = project / name.replace("__", "/")
            path = path.with_suffix(".md")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
            subprocess.run(["git", *command], cwd=project, env=os.environ | identity, check=True, timeout=60)
        venv = ["--venv", sys.prefix] if installed else []
        done = subprocess.run([sys.executable, SCRIPT, project, *venv], capture_output=True, text=True, timeout=120)
        rows = re.findall(r"^\| (.*) \| ([\d.]+) \| (\d*) \|$", done.stdout, re.MULTILINE)
        return done.returncode, {name: lines for name, _, lines in rows}, done.stderr

    return run


def test_newcomer_runs_readme_and_guides_in_order(first_hour):
    index = "```{toctree}\nguides/second\nguides/first\nplain\n```\n"
    pages = dict.fromkeys(("docs__guides__first", "docs__guides__second"), "```python\nprint('a')\nprint('b')\n```\n")
    code, rows, errors = first_hour(README=README, docs__index=index, docs__plain="No code.\n", **pages)
    assert code == 0, errors
    assert list(rows) == [
        "`git clone`",
        "`git clone https://example.com/tieredemb && cd tieredemb`: not run (cloned)",
        "`pip install .`: not run (installed)",
        "`echo one; echo two`",
        "`ls README.md`",
        "README.md",
        "docs/guides/second.md",
        "docs/guides/first.md",
        "all of it",
    ]
    assert list(rows.values()) == ["0", "0", "0", "2", "1", "1", "2", "2", "8"]


def test_newcomer_fails_where_a_command_fails(first_hour):
    code, rows, errors = first_hour(README="```sh\necho why; false\necho on\n```\n", docs__index="")
    assert code == 1
    assert rows["**failed: 1** `echo why; false`"] == "1"
    assert rows["`echo on`"] == "1"
    assert "why" in errors


def test_newcomer_names_the_line_of_a_page_that_fails(first_hour):
    code, rows, errors = first_hour(README="# A\n\n```python\nx = 1\n```\n\n```python\ny = x\nz\n```\n", docs__index="")
    assert code == 1
    assert "**failed: 1** README.md" in rows
    assert 'README.py", line 9' in errors


def test_newcomer_installs_into_an_environment_of_the_clone(first_hour):
    page = "import sys\nassert sys.prefix.endswith('tieredemb/.venv'), sys.prefix\n"
    readme = f"```sh\npython -m pip install --no-index --help >/dev/null\n```\n```python\n{page}```\n"
    code, rows, errors = first_hour(installed=False, README=readme, docs__index="")
    assert code == 0, errors
    assert "`python3 -m venv .venv`" in rows
