"""Whether a change made steps slower: `python -m benchmarks.compare_checkouts OLD NEW`.

OLD and NEW are directories that hold the package, or revisions of this repository. Processes of both make the steps of
benchmarks/warm_steps.py by turns, in short blocks, so that whatever else the machine does hits both. One pair of blocks
gives one ratio, new time / old time. Two processes of the very same code differ, too, by where their memory happens to
lie. So processes are started anew in each round, and the interval comes from the medians of the rounds: see "Rigorous
benchmarking in reasonable time" (Kalibera and Jones, 2013). This process does not import the package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS_OF = Path(__file__).with_name("warm_steps.py")
ROUNDS, PAIRS = 8, 100
BLOCK_SECONDS = 0.01  # long beside the clock and the way through a pipe, short beside what disturbs a machine
CONFIDENCE = 0.95  # that the intervals of all paths of a run hold the true ratios


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """New time / old time, and the ends of its interval."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 1:
            return "slower"
        return "faster" if self.high < 1 else "not told apart"


def ratio_of(rounds: Sequence[Sequence[float]], confidence: float) -> Ratio:
    """`rounds`: the ratios of the pairs of each, two rounds at least. Student's interval of the mean of the rounds'
    medians, in logarithms: of a ratio and its reciprocal, so that old and new have equal rights."""
    from scipy.stats import t  # type: ignore[import-untyped]

    medians = [math.log(statistics.median(pairs)) for pairs in rounds]
    mean, error = statistics.fmean(medians), statistics.stdev(medians) / math.sqrt(len(medians))
    half = float(t.ppf((1 + confidence) / 2, len(medians) - 1)) * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def confidence_of_each(confidence: float, count: int) -> float:
    """Of each of `count` intervals, so that all of them hold at once with `confidence` at least (Bonferroni)."""
    return 1 - (1 - confidence) / count


# --- checkouts --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_out(where: str) -> Iterator[Path]:
    """The directory `where`, or one that holds this revision of the repository meanwhile."""
    if Path(where).is_dir():
        yield Path(where).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tieredemb-compare-") as above:
        directory = Path(above).resolve() / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(directory), where], capture_output=True, text=True)
        if added.returncode:
            raise SystemExit(f"{where!r} is no directory, and no revision of {ROOT}: {added.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run([*git, "remove", "--force", str(directory)], check=True)


class Checkout:
    """The processes of a checkout, one for each rank; the first one makes the steps of paths of one rank, too."""

    def __init__(self, directory: Path, device: str, clock: str) -> None:
        self._meeting = tempfile.TemporaryDirectory(prefix="tieredemb-meeting-")
        self._directory, self._how = directory, (device, clock)
        self._processes: list[subprocess.Popen[str]] = []
        self._ranks: dict[str, int] = {}
        self._start()

    def wait_until_ready(self) -> list[str]:
        """The names of all paths."""
        self._wait_for(self._processes[0])
        return list(self._ranks)

    def seconds(self, path: str, steps: int) -> float:
        """Of one step on the first rank, when `steps` are made in a row."""
        ranks = self._ranks[path]
        while len(self._processes) < ranks:
            self._start()
            self._wait_for(self._processes[-1])
        for process in self._processes[:ranks]:
            print(json.dumps([path, steps]), file=process.stdin, flush=True)
        answers = [float(self._answer(process)) for process in self._processes[:ranks]]
        return answers[0]

    def _start(self) -> None:
        rank, meeting = len(self._processes), os.path.join(self._meeting.name, "store")
        command = [sys.executable, "-P", str(STEPS_OF), *self._how, str(rank), meeting]
        started = subprocess.Popen(
            command,
            cwd=self._directory,
            env=os.environ | {"PYTHONPATH": str(self._directory), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(started)

    def _wait_for(self, process: subprocess.Popen[str]) -> None:
        ready = self._answer(process)
        if not Path(ready["package"]).is_relative_to(self._directory):
            raise SystemExit(f"{self._directory} holds no package: {ready['package']} was imported in its place")
        self._ranks = ready["paths"]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of {self._directory} has ended: see its error above")
        return json.loads(line)

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._meeting.cleanup()


# --- measuring --------------------------------------------------------------------------------------------------------


def one_round(old: Path, new: Path, chosen: argparse.Namespace, order: random.Random) -> dict[str, list[float]]:
    """The ratios of the pairs of each path, of processes that are started for them."""
    with contextlib.ExitStack() as ends:
        both = [
            ends.enter_context(contextlib.closing(Checkout(directory, chosen.device, chosen.clock)))
            for directory in (old, new)
        ]
        paths, _ = (checkout.wait_until_ready() for checkout in both)
        names = [name for name in paths if not chosen.path or name in chosen.path]
        if not names:
            raise SystemExit(f"no path is called {' or '.join(chosen.path)}; there are: {'; '.join(paths)}")
        return {name: ratios_of(both, name, chosen.pairs, order) for name in names}


def ratios_of(both: Sequence[Checkout], name: str, pairs: int, order: random.Random) -> list[float]:
    first = [checkout.seconds(name, 10) for checkout in both]
    steps = max(3, round(BLOCK_SECONDS / max(first)))
    found = []
    for _ in range(pairs):
        seconds = {i: both[i].seconds(name, steps) for i in order.sample((0, 1), 2)}
        found.append(seconds[1] / seconds[0])
    return found


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_checkouts", description=__doc__)
    parser.add_argument("old", help="a directory, or a revision of this repository")
    parser.add_argument("new", help="the same")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where there is a GPU, else cpu")
    parser.add_argument("--path", action="append", default=[], help="name of a path; may be given again (default: all)")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: time of all threads of a process, without what it waits for; where others use the machine too",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes of each checkout (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of blocks of a round (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of which is first in a pair (default: %(default)s)")
    chosen = parser.parse_args(args)
    if chosen.rounds < 2 or chosen.pairs < 1:
        parser.error("an interval needs 2 rounds and a pair in each, at least")
    chosen.device = chosen.device or default_device()
    return chosen


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(args: Sequence[str] | None = None) -> None:
    chosen = parse(args)
    order, rounds = random.Random(chosen.seed), []
    with checked_out(chosen.old) as old, checked_out(chosen.new) as new:
        for number in range(chosen.rounds):
            rounds.append(one_round(old, new, chosen, order))
            print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
    each = confidence_of_each(CONFIDENCE, len(rounds[0]))
    print(
        f"{chosen.new} / {chosen.old}: {chosen.clock} time of a step on {chosen.device}, intervals of {each:.1%} each"
    )
    for name in rounds[0]:
        found = ratio_of([of_round[name] for of_round in rounds], each)
        print(f"{name:36} {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]  {found.verdict}")


if __name__ == "__main__":
    main()
