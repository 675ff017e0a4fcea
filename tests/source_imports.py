"""What a package's modules import, read from their source: nothing is executed, so imports inside functions count too,
and those under `TYPE_CHECKING` where they are asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def module_name(path: Path, root: Path) -> str:
    """Dotted name of the module at `path`, whose package lies in `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(package: Path) -> dict[str, Path]:
    """All modules of the package directory `package` by dotted name."""
    return {module_name(path, package.parent): path for path in sorted(package.rglob("*.py"))}


def nodes_of(tree: ast.AST, *, type_checking: bool) -> Iterator[ast.AST]:
    """All nodes below `tree`, with those under `if TYPE_CHECKING:` or without."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" and not type_checking:
            yield from (each for other in node.orelse for each in (other, *nodes_of(other, type_checking=False)))
            continue
        yield node
        yield from nodes_of(node, type_checking=type_checking)


def imports_of(name: str, path: Path, *, type_checking: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that module `name` imports. `from a import b` yields `a.b`: whether `b` is a
    module only its reader can know. `importlib.import_module` with a literal name counts too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes_of(ast.parse(path.read_text()), type_checking=type_checking):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def own_imports(name: str, modules: dict[str, Path], *, type_checking: bool = True) -> set[str]:
    """The modules of the same package that module `name` names in its imports."""
    found = set()
    for _, target in imports_of(name, modules[name], type_checking=type_checking):
        while target and target not in modules:
            target = target.rpartition(".")[0]
        found.add(target)
    return found - {"", name}


def import_closure(name: str, modules: dict[str, Path]) -> set[str]:
    """Module `name` and all that it reaches by imports within the package."""
    reached, todo = {name}, [name]
    while todo:
        new = own_imports(todo.pop(), modules) - reached
        reached |= new
        todo += new
    return reached


def circle_groups(modules: dict[str, Path]) -> list[list[str]]:
    """Files that reach one another by imports: the largest such groups, each in order. To read one is to read
    all of its group."""
    imported = {name: own_imports(name, modules) for name in modules}

    def reached_from(name: str) -> set[str]:
        reached, todo = set[str](), [name]
        while todo:
            new = imported[todo.pop()] - reached
            reached |= new
            todo += new
        return reached

    reached = {name: reached_from(name) for name in modules}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in modules}
    return [list(group) for group in sorted(groups) if group]
