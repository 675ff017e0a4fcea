"""The command line: `python -m tests.golden`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from devices import default_device

from golden import programs, run, several

CPU_FILE = programs.HERE / "cpu.json"
COVERAGE_FILE = programs.HERE / "COVERAGE.md"
RAISED = "raised"
Recorded = dict[int, dict[str, str]]  # digests by number
Ran = tuple[int, dict[str, str], float]  # number, digests, seconds
Task = Callable[[programs.Program, Path, Callable[[int], Any]], dict[str, str]]  # what is done with a program
_worker: list[Any] = []  # in a process of a pool: its task, its device, what ends its worlds, and its worlds


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=programs.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help="draw all programs anew, and count what they cover")
    for name, what in (("show", "print programs"), ("run", "run programs, and print their hashes")):
        commands.add_parser(name, help=what).add_argument("numbers", type=int, nargs="+")
    for name, what in (("record", "run all, and keep their hashes"), ("compare", "run all, and compare the hashes")):
        chosen = commands.add_parser(name, help=what)
        chosen.add_argument("file", type=Path, nargs="?", default=CPU_FILE)
    chosen = commands.add_parser("ranks", help="run programs of ranks by so many, and compare them with one process")
    chosen.add_argument("ranks", type=int)
    for name in ("record", "compare", "ranks"):
        commands.choices[name].add_argument("--only", type=int, nargs="+", help="these programs")
        jobs = min(8, max(1, (os.cpu_count() or 1) // 2))  # each has up to seven processes, each with memory of a GPU
        commands.choices[name].add_argument("--jobs", type=int, default=jobs, help="in so many processes at once")
    for name in ("run", "record", "compare", "ranks"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        commands.choices[name].add_argument("--device", choices=("cpu", "cuda"), default=device)
    chosen = parser.parse_args(args)
    if chosen.command == "draw":
        found = programs.draw()
        programs.save(found)
        COVERAGE_FILE.write_text(programs.coverage(found))
        return 0
    all_of_them = programs.load()
    if chosen.command == "show":
        for number in chosen.numbers:
            print(all_of_them[number])
        return 0
    if chosen.command == "run":
        for number, digests, seconds in run_all([all_of_them[n] for n in chosen.numbers], chosen.device):
            print(all_of_them[number])
            print(f"  {text(digests)}   ({seconds:.1f} s)")
        return 0
    wanted = [each for each in all_of_them if chosen.only is None or each.number in chosen.only]
    if chosen.command == "ranks":
        if chosen.ranks < 1:
            parser.error(f"ranks must be 1 or more, got {chosen.ranks}")
        return compare_with_one(chosen.ranks, [p for p in wanted if p.face == "ranks"], chosen.device, chosen.jobs)
    if chosen.command == "record":
        before = load(chosen.file)["programs"] if chosen.only is not None else {}
        return record(chosen.file, wanted, chosen.device, chosen.jobs, before)
    return compare(chosen.file, wanted, chosen.jobs)


@contextlib.contextmanager
def worlds(device: str):
    """Worlds of ranks, each started when a program first asks for it."""
    from sharding.worlds import kept

    started = kept(device, wait_s=300)  # the first programs wait for compilers
    try:
        yield next(started)
    finally:
        started.close()


def run_all(chosen: Sequence[programs.Program], device: str, jobs: int = 1, task: Task | None = None) -> Iterator[Ran]:
    """Does the `task` with each, by default runs it, in `jobs` processes, in order; of one that raises, the error is in
    place of its digests."""
    task = task or run.run
    if jobs == 1:
        with worlds(device) as world:
            yield from (run_one(program, task, device, world) for program in chosen)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(task, device)) as pool:
        yield from pool.map(_run_in_worker, chosen)


def run_one(program: programs.Program, task: Task, device: str, world: Callable[[int], Any]) -> Ran:
    begun = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as directory, default_device(device):
            digests = task(program, Path(directory), world)
    except Exception as error:  # the programs after it run as well
        traceback.print_exc()
        digests = {RAISED: f"{type(error).__name__}: {error}".splitlines()[0]}
    return program.number, digests, time.perf_counter() - begun


def _start_worker(task: Task, device: str) -> None:
    _worker.extend((task, device, contextlib.ExitStack()))
    _worker.append(_worker[2].enter_context(worlds(device)))


def _run_in_worker(program: programs.Program) -> Ran:
    task, device, _, world = _worker
    return run_one(program, task, device, world)


def text(digests: dict[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in digests.items())


def record(
    file: Path, chosen: list[programs.Program], device: str, jobs: int = 1, before: Recorded | None = None
) -> int:
    """Keeps those of programs that end, beside those of `before`; returns 1 if any raised."""
    found, failed, begun = dict(before or {}), 0, time.perf_counter()
    for number, digests, seconds in run_all(chosen, device, jobs):
        raised = RAISED in digests
        print(f"| {number} | {seconds:.1f} s | {differs(digests, digests) if raised else 'recorded'} |", flush=True)
        if not raised:
            found[number] = digests
        failed += raised
    save(file, found, device)
    print(f"{len(chosen) - failed} of {len(chosen)} programs in {time.perf_counter() - begun:.0f} s: {file}")
    return int(failed > 0)


def save(file: Path, found: Recorded, device: str) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = ",\n".join(f'  "{number}": {json.dumps(digests)}' for number, digests in sorted(found.items()))
    file.write_text(f'{{"device": "{device}", "machine": "{name}", "programs": {{\n{lines}\n}}}}\n')


def load(file: Path) -> dict[str, Any]:
    kept = json.loads(file.read_text())
    return kept | {"programs": {int(number): digests for number, digests in kept["programs"].items()}}


def compare(file: Path, chosen: list[programs.Program], jobs: int = 1) -> int:
    """Prints a line a program; returns 1 if any differs."""
    kept, different = load(file), 0
    for number, digests, seconds in run_all(chosen, kept["device"], jobs):
        unlike = differs(kept["programs"].get(number), digests)
        different += bool(unlike)
        print(f"| {number} | {seconds:.1f} s | {unlike or 'same'} |", flush=True)
    print(f"{len(chosen) - different} of {len(chosen)} programs have the bits of {file}")
    return int(different > 0)


def compare_with_one(ranks: int, chosen: list[programs.Program], device: str, jobs: int = 1) -> int:
    """Prints a line a program; returns 1 if any has other bits in so many ranks than in one process."""
    different = 0
    for number, found, seconds in run_all(chosen, device, jobs, functools.partial(several.differences, ranks)):
        different += bool(found)
        print(f"| {number} | {seconds:.1f} s | {text(found) or 'same'} |", flush=True)
    print(f"{len(chosen) - different} of {len(chosen)} programs have in {ranks} ranks the bits of one process")
    return int(different > 0)


def differs(before: dict[str, str] | None, now: dict[str, str]) -> str:
    """Which sections do, in words."""
    if RAISED in now:
        return f"raised {now[RAISED]}"
    if before is None:
        return "was not recorded"
    unlike = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return f"differs in {', '.join(unlike)}" if unlike else ""
