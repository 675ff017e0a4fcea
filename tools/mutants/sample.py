"""Mutants of a source, by the operators of cosmic-ray, and a sample of them by a seed.

A room gets its share of the sample by its lines. In it lines are drawn, then one of the operators' kinds that can
change the line, then one change of that kind: there are ten ways to replace one `+`, and two to change `True`, so a
sample of all changes would be one of arithmetic. Each line is drawn once.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.ast as trees
from cosmic_ray.operators.provider import OperatorProvider

ROOMS = ("cache", "lookup", "step", "tables", "storage", "sharding")
# what runs with a GPU alone, by name: in this folder, or with this in the file's name
GPU_FOLDERS = ("cache/device/",)
GPU_FILES = (
    "cuda", "device_", "gpu_", "recorded_", "graph", "captures", "persistent_call", "stream_use", "symmetric",
    "unified",
)  # fmt: skip
UNUSED = ("VariableReplacer", "VariableInserter")  # they take arguments, and change a run at random
UNSEEN = re.compile(r"TYPE_CHECKING|@(abc\.)?abstractmethod|@overload")  # in a line: for readers and type checkers
OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if name not in UNUSED}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change. `file`: from the root of the checkout · `operator`: of cosmic-ray · `occurrence`: which of the places
    in the file that this operator can change."""

    file: str
    line: int
    operator: str
    occurrence: int


class _Change(trees.Visitor):  # cosmic-ray's own needs all that it installs
    def __init__(self, operator: str, occurrence: int) -> None:
        self.operator, self.left = OPERATORS[operator], occurrence

    def visit(self, node):
        for index, _ in enumerate(self.operator.mutation_positions(node)):
            if self.left == 0:
                node = self.operator.mutate(node, index)
            self.left -= 1
        return node


def files_of(root: Path, room: str) -> list[str]:
    """Its files that are not empty and run without a GPU."""
    found = []
    for path in sorted((root / "tieredemb" / room).rglob("*.py")):
        name = str(path.relative_to(root))
        needs_gpu = any(folder in name for folder in GPU_FOLDERS) or any(word in path.name for word in GPU_FILES)
        if path.stat().st_size and not needs_gpu:
            found.append(name)
    return found


def mutated(source: str, mutant: Mutant) -> str:
    return _Change(mutant.operator, mutant.occurrence).walk(trees.get_ast(source)).get_code()


def diff(source: str, changed: str) -> str:
    """The lines that differ, without a header."""
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def mutants_of(root: Path, file: str) -> Iterator[Mutant]:
    """All of a file, in an order that depends on the file alone."""
    nodes = list(trees.ast_nodes(trees.get_ast((root / file).read_text())))
    for name, operator in OPERATORS.items():
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, ((line, _), _) in enumerate(positions):
            yield Mutant(file=file, line=line, operator=name, occurrence=occurrence)


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """The sample, in an order in which every beginning is a sample too."""
    choice = random.Random(seed)
    files = {room: files_of(root, room) for room in ROOMS}
    lines = {room: sum(len((root / file).read_text().splitlines()) for file in files[room]) for room in ROOMS}
    exact = {room: count * lines[room] / sum(lines.values()) for room in ROOMS}
    shares = {room: int(exact[room]) for room in ROOMS}
    for room in sorted(ROOMS, key=lambda room: shares[room] - exact[room])[: count - sum(shares.values())]:
        shares[room] += 1
    sample = [mutant for room in ROOMS for mutant in _drawn_of_room(root, files[room], shares[room], choice)]
    choice.shuffle(sample)
    return sample


def _drawn_of_room(root: Path, files: list[str], count: int, choice: random.Random) -> Iterator[Mutant]:
    by_line: dict[tuple[str, int], dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in (each for file in files for each in mutants_of(root, file)):
        kind = type(OPERATORS[mutant.operator]).__name__.partition("_")[0]
        by_line[mutant.file, mutant.line][kind].append(mutant)
    places = list(by_line)
    choice.shuffle(places)
    for place in places:
        if count == 0:
            return
        mutant = choice.choice(by_line[place][choice.choice(list(by_line[place]))])
        if _changes_what_runs((root / mutant.file).read_text(), mutant):
            count -= 1
            yield mutant


def _changes_what_runs(source: str, mutant: Mutant) -> bool:
    """False for what does not parse, and for a change of an annotation or a decorator that no test can see."""
    if UNSEEN.search(source.splitlines()[mutant.line - 1]):
        return False
    try:
        return _without_annotations(mutated(source, mutant)) != _without_annotations(source)
    except SyntaxError:
        return False


def _without_annotations(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, ast.Constant(None))
    return ast.dump(tree)
