"""Whether modules still train as they did when a step was captured. Each replay checks this, so it is checked for all
tables at once, in a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tieredemb.modules.base import TieredModule
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.step.table_parameter import PLAIN, REQUIRES_GRAD, TableParameter


class TrainedAs:
    """Whether each of `modules` trained when this was made."""

    def __init__(self, modules: Sequence[LookupModule]) -> None:
        self._modules = [(module, module.is_trainable) for module in modules]
        self._note_parameters()

    def _note_parameters(self) -> None:
        """Notes the parameters of tables that follow a torch optimizer and train: it is enough to check that these are
        still the module's, and require gradients."""
        self._tables: list[tuple[dict[str, Any], str, TableParameter]] = []
        self._others = []
        for module, trains in self._modules:
            if isinstance(module, TieredModule) and module.table_parameters and trains:
                parameters: dict[str, Any] = module._parameters
                self._tables += [(parameters, name, each) for name, each in module.table_parameters.items()]
            else:
                self._others.append((module, trains))

    def is_still_so(self) -> bool:
        """Whether they train as before."""
        if any(parameters.get(name) is not each for parameters, name, each in self._tables):
            return self._check_each()
        with PLAIN():
            if not all(REQUIRES_GRAD(each) for _, _, each in self._tables):
                return self._check_each()
        return all(module.is_trainable is trains for module, trains in self._others)

    def _check_each(self) -> bool:
        """Checks each module by itself."""
        if any(module.is_trainable is not trains for module, trains in self._modules):
            return False
        self._note_parameters()
        return True
