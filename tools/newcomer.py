"""The first hour of somebody new, with a clock: `make newcomer`.

Clones the project into an empty folder, runs the shell lines of the README there, and the Python of README and guides
in the order of the site: the blocks of a page in one process, in a folder of its own. Prints a table of what was run,
how long it took and how many lines it printed, and fails where one of them does, with all that this one printed.

Needs git and Python alone. Without `--venv` the README's own lines install what they need, in `.venv` of the clone.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDEX = Path("docs/index.md")
LIMIT = 1800.0  # seconds of one command or page
DONE = ("git clone", "cd ")  # by the clone


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was run: its name in the table, its exit code, seconds, and what it printed."""

    name: str
    code: int
    seconds: float
    printed: str

    @property
    def lines(self) -> int:
        return len(self.printed.splitlines())

    @property
    def row(self) -> str:
        failed = f"**failed: {self.code}** " if self.code else ""
        return f"| {failed}{self.name} | {self.seconds:.1f} | {self.lines} |"


# --- what is run --------------------------------------------------------------------------------------------------


def shell_lines(page: Path) -> list[str]:
    """The commands of a page's `sh` blocks, without comments; a line that ends in a backslash goes on in the next."""
    blocks = [match[2] for match in FENCE.finditer(page.read_text()) if match[1] == "sh"]
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


def skipped(command: str, *, installed: bool) -> str:
    """Why a command is not run here; "" where it is."""
    if command.startswith(DONE):
        return "cloned"
    if re.search(r"\bpip install\b", command):
        if re.search(r"\bcuda\d", command) and not shutil.which("nvidia-smi"):
            return "needs a GPU"
        return "installed" if installed else ""
    if re.fullmatch(r"make test", command):
        return "CI runs it"
    return ""


def python_of(page: Path) -> str:
    """The Python blocks of a page as one file, in which each line has the number that it has on the page."""
    text, lines = page.read_text(), []
    for match in FENCE.finditer(text):
        if match[1] == "python":
            start = text[: match.start()].count("\n") + 1
            lines += [""] * (start - len(lines)) + match[2].splitlines()
    return "\n".join([*lines, ""]) if lines else ""


def pages(clone: Path) -> list[Path]:
    """README, and the pages of the site that `docs/index.md` lists, in its order."""
    listed = re.findall(r"^([\w/-]+)$", (clone / INDEX).read_text(), re.MULTILINE)
    found = [clone / INDEX.parent / f"{name}.md" for name in listed]
    return [clone / "README.md", *(page for page in found if page.exists())]


# --- running --------------------------------------------------------------------------------------------------------


def run(name: str, command: list[str], folder: Path, environment: dict[str, str]) -> Run:
    """Runs a command in a folder to its end, at most for `LIMIT` seconds."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT,
        )  # fmt: skip
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, printed = 124, f"{(late.stdout or b'').decode(errors='replace')}\nended after {LIMIT:.0f} s"
    return Run(name=name, code=code, seconds=time.monotonic() - start, printed=printed)


def first_hour(source: Path, folder: Path, venv: Path | None) -> Iterator[Run]:
    """Each run when it has ended. `folder`: empty · `venv`: an environment in which all is installed, or None."""
    clone, environment = folder / "tieredemb", environment_of(folder / "tieredemb", venv)
    yield run("`git clone`", ["git", "clone", "--quiet", str(source), str(clone)], folder, environment)
    if venv is not None:
        (clone / ".venv").symlink_to(venv.resolve())
        for name in ("pyproject.toml", "constraints.txt"):  # older than what is installed: make installs nothing
            if (clone / name).exists():
                os.utime(clone / name, (0, 0))
    for command in shell_lines(clone / "README.md"):
        reason = skipped(command, installed=venv is not None)
        if reason:
            yield Run(name=f"`{command}`: not run ({reason})", code=0, seconds=0.0, printed="")
            continue
        if "pip install" in command and not (clone / ".venv").exists():  # nothing goes into the system's Python
            yield run("`python3 -m venv .venv`", ["python3", "-m", "venv", ".venv"], clone, environment)
        yield run(f"`{command}`", ["bash", "-c", command], clone, environment)
    for page in pages(clone):
        code = python_of(page)
        if code:
            yield run_page(page.relative_to(clone).as_posix(), code, folder / page.stem, environment)


def run_page(name: str, code: str, folder: Path, environment: dict[str, str]) -> Run:
    """Runs the Python of a page, in a folder that has nothing else."""
    folder.mkdir()
    script = folder / f"{folder.name}.py"
    script.write_text(code)
    return run(name, ["python", script.name], folder, environment)


def environment_of(clone: Path, venv: Path | None) -> dict[str, str]:
    """As after `source .venv/bin/activate`. A given environment has the package of another tree: the clone's counts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    kept["PATH"] = os.pathsep.join([str(clone / ".venv" / "bin"), kept["PATH"]])
    return kept if venv is None else kept | {"PYTHONPATH": str(clone)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make newcomer", description=__doc__.split("\n\n")[1])
    parser.add_argument("source", nargs="?", type=Path, default=REPOSITORY, help="what is cloned; default: this tree")
    parser.add_argument("--venv", type=Path, help="an environment in which all is installed; default: none")
    options = parser.parse_args()
    runs: list[Run] = []
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        print("| command or page | seconds | lines printed |\n|---|---|---|", flush=True)
        for each in first_hour(options.source.resolve(), Path(folder), options.venv):
            runs.append(each)
            print(each.row, flush=True)
    print(f"| all of it | {sum(each.seconds for each in runs):.1f} | {sum(each.lines for each in runs)} |\n")
    print(f"*{machine}, python {platform.python_version()}*")
    failed = [each for each in runs if each.code]
    for each in failed:
        print(f"\n--- {each.name} printed, and ended with {each.code}:\n{each.printed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
