"""`make mutants`: breaks the code in one place, and looks whether a test fails.

A sample of mutants (`sample.py`) is drawn by a seed. Each is put into a copy of HEAD (`scratch.py`), and the tests that
run what it changed (`chosen.py`, `tests_map.py`) are run until one fails. cosmic-ray has the operators; its runner
starts the same tests for every mutant, and all of ours take a quarter of an hour. mutmut has one test run for all
mutants of a file, which lie side by side in it: our kernels are compiled, and found by what their files contain.

Everything may be interrupted: what is recorded stays, and the same command goes on. Results are in
tests/mutants/results.jsonl, a line a mutant, for the package as it is in HEAD. What has survived is run again when the
tests have changed. tests/mutants/README.md says of each survivor what was found when somebody looked at it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tools.mutants import chosen
from tools.mutants.sample import ROOMS, Mutant, diff, drawn, mutated
from tools.mutants.scratch import REPOSITORY, Result, Scratch, git
from tools.mutants.tests_map import TestsMap

RECORD = REPOSITORY / "tests" / "mutants"
RESULTS = RECORD / "results.jsonl"
STARTS_S = 60.0  # imports, ranks, and kernels that a mutant makes compile again
SLOWER = 3.0  # than when the map was recorded, is a hang
KILLED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NOT_FOUND = "ERROR: not found: "
ALIVE = ("survived", "no test")

Seen = dict[str, tuple[int, float]]  # tests: how many of the lines they run, and their seconds
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=50)
    parser.add_argument("--count", type=int, default=200, help="mutants of the sample (200)")
    parser.add_argument("--first", type=int, help="run only so many of them, from the sample's beginning")
    parser.add_argument("--budget", type=float, default=90.0, metavar="SECONDS", help="of tests a mutant (90)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of them at a time (as many as cores)")
    parser.add_argument("--map", action=argparse.BooleanOptionalAction, default=True, help="complete the map first")
    parser.add_argument("--report", action="store_true", help="only print what is recorded")
    args = parser.parse_args()
    if args.report:
        return report()
    settings = {"seed": args.seed, "count": args.count, "package": git("rev-parse", "HEAD:tieredemb")}
    scratches = [Scratch(str(number)) for number in range(args.jobs)]
    tests = TestsMap(scratches[0].root)
    for line in _at_a_time(tests.record, tests.missing() if args.map else [], scratches):
        print(line, flush=True)
    tests.read()
    sources = chosen.Sources(scratches[0].root)
    sample = drawn(scratches[0].root, args.seed, args.count)
    results = _results(settings)
    todo = []
    for number, mutant in enumerate(sample[: args.first]):
        known = results.get(number)
        if known is not None and (known["outcome"] not in ALIVE or known["map"] == tests.digest):
            continue
        seen = tests.tests_of(sources.places_of(mutant.file, mutant.line))
        if seen or not tests.missing():  # else the map may yet find some
            todo.append((number, mutant, seen))

    def outcome(mutant: tuple[int, Mutant, Seen], scratch: Scratch) -> dict[str, Any]:
        number, what, seen = mutant
        head = settings | {"number": number, "map": tests.digest} | asdict(what)
        return head | tried(scratch, seen, what, args.budget)

    for result in _at_a_time(outcome, todo, scratches):
        results[result["number"]] = result
        _write(results)
        print(_line(result), flush=True)
    report()


def _at_a_time(
    work: Callable[[Item, Scratch], Outcome], items: Iterable[Item], scratches: Sequence[Scratch]
) -> Iterator[Outcome]:
    """What `work` makes of each item, in the order in which they end; one at a time in a scratch."""
    free: SimpleQueue[Scratch] = SimpleQueue()
    for scratch in scratches:
        free.put(scratch)

    def one(item: Item) -> Outcome:
        scratch = free.get()
        try:
            return work(item, scratch)
        finally:
            free.put(scratch)

    pool = ThreadPoolExecutor(len(scratches))
    try:
        yield from (each.result() for each in as_completed([pool.submit(one, item) for item in items]))
    finally:
        pool.shutdown(cancel_futures=True)


def tried(scratch: Scratch, seen: Seen, mutant: Mutant, budget_s: float) -> dict[str, Any]:
    """What becomes of a mutant that these tests see."""
    source = (scratch.root / mutant.file).read_text()
    text = mutated(source, mutant)
    selected = chosen.order(seen, Path(mutant.file).parts[1], budget_s)
    found = {"diff": diff(source, text), "seen_by": len(seen), "tests": len(selected)}
    if not selected:
        return found | {"outcome": "no test", "killed_by": None, "seconds": 0.0}
    start = time.monotonic()
    with scratch.changed({mutant.file: text}):
        found |= _outcome(scratch, selected, {test: seen[test][1] for test in selected})
    return found | {"seconds": round(time.monotonic() - start, 1)}


def _outcome(scratch: Scratch, tests: list[str], seconds: dict[str, float]) -> dict[str, Any]:
    """A test that fails once, and not when it is run again, has seen something else, that kernels were compiled for
    one: the others are run without it."""
    while tests:
        result = _run(scratch, tests, STARTS_S + SLOWER * sum(seconds[test] for test in tests))
        if result.code is None:
            return {"outcome": "timeout", "killed_by": None}
        if result.code == 0:
            break
        named = KILLED.search(result.printed)
        if named is None and NOT_FOUND in result.printed:
            raise RuntimeError(f"tests of the map are not found:\n{result.printed}")
        if named is None or named[1] not in seconds:  # a file of tests, or conftest.py, cannot be imported
            return {"outcome": "killed", "killed_by": named[1] if named else "import"}
        if _run(scratch, [named[1]], STARTS_S + SLOWER * seconds[named[1]]).code != 0:
            return {"outcome": "killed", "killed_by": named[1]}
        tests = [test for test in tests if test != named[1]]
    return {"outcome": "survived", "killed_by": None}


def _run(scratch: Scratch, tests: list[str], seconds: float) -> Result:
    wanted = scratch.root / "wanted.txt"
    wanted.write_text("\n".join(tests))
    return scratch.pytest(["-x", "-rfE", f"@{wanted}"], seconds=seconds)


def _results(settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What is recorded of this sample: nothing, where the file is of another."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return {each["number"]: each for each in found if settings.items() <= each.items()}


def _write(results: dict[int, dict[str, Any]]) -> None:
    RECORD.mkdir(exist_ok=True)
    beside = RESULTS.with_suffix(".new")
    beside.write_text("".join(json.dumps(results[number]) + "\n" for number in sorted(results)))
    beside.replace(RESULTS)


def _line(result: dict[str, Any]) -> str:
    where = f"{result['file'].removeprefix('tieredemb/')}:{result['line']}"
    return (
        f"{result['number']:3} {result['outcome']:8} {result['seconds']:6.1f} s  {where}  {result['killed_by'] or ''}"
    )


def report() -> None:
    """Prints the kill rate of each room, and the survivors that nobody has looked at."""
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if not results:
        return print("nothing is recorded")
    rooms = {room: Counter[str]() for room in ROOMS}
    for each in results:
        rooms[Path(each["file"]).parts[1]][each["outcome"]] += 1
    print(f"\n{'room':10} {'run':>5} {'killed':>7} {'timeout':>8} {'survived':>9} {'no test':>8} {'rate':>6}")
    for room, counts in {**rooms, "all": sum(rooms.values(), Counter[str]())}.items():
        run, dead = counts.total(), counts["killed"] + counts["timeout"]
        rate = f"{dead / run:.1%}" if run else "–"
        print(
            f"{room:10} {run:5} {counts['killed']:7} {counts['timeout']:8} {counts['survived']:9} "
            f"{counts['no test']:8} {rate:>6}"
        )
    print(f"{len(results)} of {results[0]['count']} mutants of seed {results[0]['seed']} were run")
    notes = (RECORD / "README.md").read_text() if (RECORD / "README.md").exists() else ""
    for each in results:
        if each["outcome"] in ALIVE and f"| {each['number']} |" not in notes:
            print(f"nobody has looked at {each['number']} ({each['file']}:{each['line']}):\n{each['diff']}")


if __name__ == "__main__":
    main()
