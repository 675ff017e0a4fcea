"""Libraries that the example needs and the library does not: named with their install command when absent."""

from __future__ import annotations

import importlib
from typing import Any

from tieredemb.errors import MissingDependencyError


def require(module: str, package: str, purpose: str) -> Any:
    """The imported `module`. Raises `MissingDependencyError` with the command that installs `package`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(f"{purpose} needs {package}, which is missing: pip install {package}") from error
