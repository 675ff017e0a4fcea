"""The tests that are likely to see a mutant: those that run what it changed.

Coverage sees no line of a compiled kernel, and runs those outside functions at imports alone. So what runs is looked
for in three steps: the lines of the function around the change; for a kernel, or a name outside functions, the lines of
functions that use it, found by name through the files that import it; for a kernel's file, those of its host twin too.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Places = dict[str, set[int]]  # lines by file

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STEPS = 4  # from a kernel to who uses it, through other kernels


class Sources:
    """The package's files, parsed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files = [str(path.relative_to(root)) for path in sorted((root / "tieredemb").rglob("*.py"))]

    @functools.cache  # noqa: B019 (one lives as long as the process)
    def tree(self, file: str) -> ast.Module:
        return ast.parse((self._root / file).read_text())

    @functools.cache  # noqa: B019
    def _used_by(self, file: str) -> dict[str, set[str]]:
        """What a file defines, and the names that each definition uses."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, node in _definitions(self.tree(file)):
            found[name] |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return found

    @functools.cache  # noqa: B019
    def _imported(self, file: str) -> dict[str, set[str]]:
        """The names that a file imports from each module, inside functions too."""
        found: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found[node.module] |= {alias.asname or alias.name for alias in node.names}
        return found

    def places_of(self, file: str, line: int) -> Places:
        """Lines that run what stands in this line."""
        node = _function_at(self.tree(file), line)
        if node is not None and not file.endswith("_cpu.py"):
            return {file: _body(node)}
        places: Places = defaultdict(set)
        names = {name for name, top in _definitions(self.tree(file)) if top.lineno <= line <= (top.end_lineno or 0)}
        attributes = {
            target.id
            for each in ast.walk(self.tree(file))
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.lineno <= line <= (each.end_lineno or 0)
            for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
            if isinstance(target, ast.Name)
        }
        self._add_uses(file, frozenset(names), places, STEPS)
        for other in self.files if attributes - names else ():  # of a class: they are used wherever its objects are
            uses = [each for each in ast.walk(self.tree(other)) if isinstance(each, ast.Attribute)]
            places[other] |= {each.lineno for each in uses if each.attr in attributes - names}
        if not any(places.values()):  # nobody names it: who runs anything of the file
            for function in _functions(self.tree(file)):
                places[file] |= _body(function)
        return {each: lines for each, lines in places.items() if lines}

    def _add_uses(self, file: str, names: frozenset[str], places: Places, steps: int) -> None:
        """The lines of functions that use what `file` defines by these names, or by what it defines with them."""
        grown = True
        while grown:
            using = {name for name, used in self._used_by(file).items() if used & names}
            grown, names = not using <= names, names | using
        twin = file.replace("_cpu.py", ".py")
        if twin == file:
            for function in _functions(self.tree(file)):
                places[file] |= _lines_of_names(function, names)
        elif twin in self.files:
            for function in _functions(self.tree(twin)):
                places[twin] |= _body(function)
        if steps == 0:
            return
        module = file.removesuffix(".py").replace("/", ".")
        for other in self.files:
            taken = names & self._imported(other).get(module, set())
            if taken:
                self._add_uses(other, taken, places, steps - 1)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def _function_at(tree: ast.Module, line: int) -> ast.AST | None:
    """The innermost function that has this line, among its decorators and the defaults of its arguments as well."""
    around = [node for node in _functions(tree) if _first_line(node) <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno, default=None)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _body(function: ast.AST) -> set[int]:
    body = function.body  # type: ignore[attr-defined]
    return set(range(body[0].lineno, (body[-1].end_lineno or 0) + 1))


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """What a module defines: name and statement."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node


def _lines_of_names(function: ast.AST, names: frozenset[str]) -> set[int]:
    return {each.lineno for each in ast.walk(function) if isinstance(each, ast.Name) and each.id in names}


def order(tests: dict[str, tuple[int, float]], room: str, budget_s: float) -> list[str]:
    """The tests to run, which together take `budget_s` at most: the files of the mutant's room first, then the others,
    in turns; in a file those that run most of its lines first, and of them the quickest. Files are not mixed in the
    answer, as fixtures of modules would be made again and again."""
    by_module: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (-tests[test][0], tests[test][1])):
        by_module[test.partition("::")[0]].append(test)
    modules = sorted(by_module, key=lambda module: (Path(module).parent.name != room, -len(by_module[module]), module))
    chosen: dict[str, list[str]] = defaultdict(list)
    left = budget_s
    for turn in range(max(map(len, by_module.values()), default=0)):
        for module in modules:
            if turn < len(by_module[module]):
                test = by_module[module][turn]
                if tests[test][1] <= left:
                    left -= tests[test][1]
                    chosen[module].append(test)
    return [test for module in modules for test in chosen[module]]
