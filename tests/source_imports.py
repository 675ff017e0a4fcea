"""What a package's modules import, read from their source: nothing is executed, so imports under `TYPE_CHECKING` and
inside functions count too."""

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


def imports_of(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that module `name` imports. `from a import b` yields `a.b`: whether `b` is a
    module only its reader can know. `importlib.import_module` with a literal name counts too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
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


def own_imports(name: str, modules: dict[str, Path]) -> set[str]:
    """The modules of the same package that module `name` names in its imports."""
    found = set()
    for _, target in imports_of(name, modules[name]):
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
