"""What everything that looks up in tiered tables has, wherever their rows are: what fetching ahead needs of it."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from tieredemb.cache.base import AHEAD, PlanKind
from tieredemb.kernels.tracing import no_export
from tieredemb.lookup.bags import Places
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    import torch

    from tieredemb.step.agreement import Agreement
    from tieredemb.step.engine import Engine


class _Named:
    """Has every name that a state dict may have for a table."""

    def __getattr__(self, name: str) -> _Named:
        if name.startswith("__") or name == "_fqn_modifiers":
            raise AttributeError(name)
        return self


class LookupModule(nn.Module, abc.ABC):
    """A module whose forwards may be planned before they come. `engine`: what looks up and updates here; None where
    several ranks do that together."""

    engine: Engine | None
    _named = _Named()

    def _fqn_modifiers(self) -> dict[str, str]:
        """Asked by `torch.distributed.checkpoint.state_dict`, which looks for names of the state dict among attributes:
        where to look for those behind "tables", which no attribute has."""
        return {"tables": "_named"}

    @property
    def __prepare_scriptable__(self) -> Callable[[], nn.Module]:
        """What `torch.jit` asks a module for before it scripts it. Raises `UnsupportedError` there, and has no such
        attribute for others, who look at all."""
        if str(sys._getframe(1).f_globals.get("__name__")).startswith(("torch.jit", "torch._jit_internal")):
            raise no_export("torch.jit.script or torch.jit.trace")
        raise AttributeError("__prepare_scriptable__")

    @property
    @abc.abstractmethod
    def tables(self) -> TableSet:
        """The tables, wherever their rows are; of a sharded module some of those that lie here."""

    @property
    @abc.abstractmethod
    def engines(self) -> Sequence[Engine]:
        """Those of all tables of it that lie here."""

    @abc.abstractmethod
    def follow(
        self, optimizer: torch.optim.Optimizer, *, group: int | dict[str, Any] | None = None, in_state_dict: bool = True
    ) -> None:
        """See `TieredModule.follow`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flushes and closes the cold storage."""

    @property
    def distributed_ranks(self) -> Any:
        """What saves and loads the rows of several ranks; None of one that has all of them."""
        return None

    @property
    def agreement(self) -> Agreement | None:
        """What the ranks agree on around a captured step; None of a rank that looks up and updates alone."""
        return None

    @property
    @abc.abstractmethod
    def planned(self) -> PlannedForwards:
        """The forwards that were planned, and have yet to come."""

    @property
    @abc.abstractmethod
    def is_trainable(self) -> bool:
        """Whether a backward updates the rows."""

    @abc.abstractmethod
    def plan_ahead(
        self,
        executor: PlanExecutor,
        *inputs: torch.Tensor | Places,
        kind: PlanKind = AHEAD,
        memory: Any = None,
    ) -> Planned:
        """Plans a forward before it comes, by `executor`, from what it will be given (`Batch.given`). A forward of
        other tensors, or of these once they were changed, plans by itself, and so does one whose plan failed; plans
        never taken are to be dropped. `kind`: how, made ahead; a frozen module expects no backward · `memory`: on a GPU
        that of a call that is over, to plan into."""
