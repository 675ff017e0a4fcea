"""Signatures as their source has them: types by the names that a caller would write.

autodoc evaluates annotations, so that `Capacity` becomes `int | float | str`, and `torch.device` a bare `device`. The
names that stand for several types are explained on the page (`py:type`), and become links.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

HIDDEN = {"self", "cls", "_weight", "_freeze"}  # the last two only torch itself passes
WITHOUT = {"FusedOptimizer", "ShardedOptimizer"}  # returned by modules, never constructed
PUBLIC_TYPES = {  # for what is returned, and has no name of its own in the package
    r"\bPrefetch\[B\]": "Iterable[B]",
    r"\bGraphStep\[R\]": "Callable[[Any], R]",
    r"\bTieredModule\b": "torch.nn.Module",
    r"(?<!\.)\bnn\.": "torch.nn.",
    r"\bdist\.": "torch.distributed.",
    r"(?<![\w.])Tensor\b": "torch.Tensor",
    r"^Iterator\[None\]$": "contextlib.AbstractContextManager[None]",  # of a function that is made one
}


def process(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Sphinx's event `autodoc-process-signature`."""
    if signature is None or what not in ("class", "function", "method"):
        return signature, returned
    if name.rpartition(".")[2] in WITHOUT:
        return "", None
    return written(obj)


def written(obj: Any) -> tuple[str, str | None]:
    """The arguments of a class or function, and what it returns, None of a class."""
    found = inspect.signature(obj)
    parameters = [
        parameter.replace(annotation=_Text(parameter.annotation))
        if parameter.annotation is not parameter.empty
        else parameter
        for name, parameter in found.parameters.items()
        if name not in HIDDEN
    ]
    arguments = str(inspect.Signature(parameters))
    if inspect.isclass(obj) or found.return_annotation is found.empty:
        return arguments, None
    return arguments, repr(_Text(found.return_annotation))


class _Text:
    """An annotation that is written without quotation marks."""

    def __init__(self, annotation: Any) -> None:
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        text = self.text
        for internal, public in PUBLIC_TYPES.items():
            text = re.sub(internal, public, text)
        return text
