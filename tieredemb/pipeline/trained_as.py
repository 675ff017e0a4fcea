"""Whether modules train as they did when a step was captured: asked of all as one, in a fraction of the time that each
of many tables takes, as each replay asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tieredemb.modules.base import TieredModule
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.step.table_parameter import PLAIN, REQUIRES_GRAD, TableParameter


class TrainedAs:
    """What `modules` did when it was made."""

    def __init__(self, modules: Sequence[LookupModule]) -> None:
        self._modules = [(module, module.is_trainable) for module in modules]
        self._look()

    def _look(self) -> None:
        """What tells that all is as it is, of those that follow a torch optimizer: the parameters of their tables,
        where these are among the module's, by whether they want gradients."""
        self._tables: list[tuple[dict[str, Any], str, TableParameter]] = []
        self._others = []
        for module, trains in self._modules:
            if isinstance(module, TieredModule) and module.table_parameters and trains:
                parameters: dict[str, Any] = module._parameters
                self._tables += [(parameters, name, each) for name, each in module.table_parameters.items()]
            else:
                self._others.append((module, trains))

    def is_still_so(self) -> bool:
        """Whether they do now."""
        if any(parameters.get(name) is not each for parameters, name, each in self._tables):
            return self._ask()
        with PLAIN():
            if not all(REQUIRES_GRAD(each) for _, _, each in self._tables):
                return self._ask()
        return all(module.is_trainable is trains for module, trains in self._others)

    def _ask(self) -> bool:
        """Each by itself."""
        if any(module.is_trainable is not trains for module, trains in self._modules):
            return False
        self._look()
        return True
