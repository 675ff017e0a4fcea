"""Backward and optimizer in one pass: a row's gradients are summed along its segment, then row and state are read and
written once.

Sums run in chunks counted from the segment's first occurrence, and a row is updated with explicit fused multiply-adds,
so a result depends on neither slots nor threads. Formulas are those of the torch optimizers of the same names; row-wise
Adagrad follows FBGEMM.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.config import Array, OptimizerConfig, StepTerms
from tieredemb.errors import ConfigError, shown
from tieredemb.lookup.histories import Histories
from tieredemb.lookup.history import DenseStep, History

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

MOST_NUMBERS = 12  # hyperparameters and numbers derived from them: a param group on a GPU (optimizer.cuh)


def state_width(optimizer: OptimizerConfig | None, width: int) -> int:
    """32-bit words of state of a row of `width` weights: of its tensors, and for a dense optimizer one for the step
    that it last caught up to."""
    if optimizer is None:
        return 0
    return sum(tensor.width(width) for tensor in optimizer.tensors) + optimizer.is_dense


def rows_of(optimizer: OptimizerConfig | None) -> Hashable:
    """A key, equal for optimizers whose rows can be in one storage, and updated by one kernel."""
    if optimizer is None:
        return None
    return type(optimizer), optimizer.tensors, optimizer.is_dense, optimizer.state_start, optimizer.flags


def state_start(optimizer: OptimizerConfig | None) -> float:
    """What every word of state starts as."""
    return 0.0 if optimizer is None else optimizer.state_start


def named_numbers(optimizer: type[OptimizerConfig], group: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters in a param group by name, in the order of the config's fields; a pair, betas, is beta1 and
    beta2."""
    named: dict[str, float] = {}
    for field in fields(optimizer):
        value = group[field.name]
        if isinstance(value, (tuple, list)):
            named |= {f"{field.name[:-1]}{i}": float(part) for i, part in enumerate(value, start=1)}
        else:
            named[field.name] = float(value)
    return named


def recipe_file(optimizer: OptimizerConfig) -> str:
    """The CUDA file of an optimizer, as a path inside the package."""
    return "/".join(type(optimizer).__module__.split(".")[1:]) + ".cu"


def recipe_flags(optimizer: OptimizerConfig) -> tuple[str, ...]:
    """Flags of the file in addition to the row's format: the names of its numbers, in the order in which
    `device_numbers` packs them."""
    hyper = named_numbers(type(optimizer), asdict(optimizer))
    changing = optimizer.step_numbers(hyper, 1.0) if optimizer.is_dense else {}
    numbers = (*optimizer.numbers(hyper), *changing, "scale")
    dense = ("-DDENSE",) if optimizer.is_dense else ()
    return f"-DHYPER={','.join(hyper)}", f"-DNUMBERS={','.join(numbers)}", *dense, *optimizer.flags


def device_numbers(optimizer: OptimizerConfig, group: Mapping[str, Any]) -> list[float]:
    """What a GPU needs of a param group: `MOST_NUMBERS` floats, its hyperparameters first, then what the update takes
    of them, then zeros."""
    hyper = named_numbers(type(optimizer), group)
    numbers = [*hyper.values(), *optimizer.numbers(hyper).values()]
    return numbers + [0.0] * (MOST_NUMBERS - len(numbers))


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one update. `recipe`: the optimizer's config · `rate`: float32 (T,), the step size of each table,
    including decays and bias corrections · `numbers`: further arguments of the row update · `scale`: a factor of
    gradients; if it is not finite, a dense optimizer's step leaves NaN in rows without a gradient, too · `step`: of a
    dense optimizer, the number of the step · `missed`: the numbers by which rows that miss it replay it · `terms`: its
    effect on rows without a gradient."""

    recipe: type[OptimizerConfig]
    rate: Array
    numbers: tuple[float, ...] = ()
    scale: float = 1.0
    step: int = 0
    missed: tuple[float, ...] = ()
    terms: StepTerms | None = None

    @property
    def dense_step(self) -> DenseStep | None:
        """What a history keeps of it, if it is a dense optimizer's."""
        return None if self.terms is None else DenseStep(self.step, float(self.rate[0]), self.missed, self.terms)


def check_rate(lr: object) -> float:
    """The learning rate as a number. Raises `ConfigError` if it is negative or none."""
    try:
        rate = math.nan if isinstance(lr, str) else float(lr)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        rate = math.nan
    if not math.isfinite(rate) or rate < 0:
        raise ConfigError(
            f"the learning rate is {shown(lr)}; it must be a finite number of 0 or more: check the scheduler. "
            f"Nothing was updated"
        )
    return rate


def hyperparameters(
    optimizer: OptimizerConfig, group: Mapping[str, Any], steps: Array, scale: float
) -> Hyperparameters:
    """The numbers of an update whose tables take their `steps`-th step (int64 (T,), from 1). `group` holds lr, eps, …
    as a torch param group does. Raises `ConfigError` for a learning rate that is negative or no number."""
    check_rate(group["lr"])
    hyper = named_numbers(type(optimizer), group)
    rate = optimizer.rate(hyper, steps.astype(np.float64)).astype(np.float32)
    numbers = optimizer.numbers(hyper)
    if not optimizer.is_dense:
        return Hyperparameters(type(optimizer), rate, tuple(numbers.values()), scale)
    step = int(steps[0])
    numbers |= optimizer.step_numbers(hyper, float(step))
    missed = tuple((numbers | optimizer.missed_numbers(hyper)).values())
    terms = optimizer.step_terms(hyper, float(step))
    if not math.isfinite(scale):  # 0 · scale is what the gradient of rows that miss the step was
        missed, terms = (math.nan,) * len(missed), terms._replace(coupled=1.0)
    return Hyperparameters(type(optimizer), rate, tuple(numbers.values()), scale, step, missed, terms)


@functools.lru_cache(maxsize=16)
def hyperparameters_after(
    optimizer: OptimizerConfig, options: tuple[tuple[str, Any], ...], steps: tuple[int, ...], scale: float
) -> Hyperparameters:
    """As `hyperparameters`, of tables that have taken `steps` before: computed once for tables that one optimizer
    updates. `options`: the items of a param group, numbers and pairs of numbers."""
    return hyperparameters(optimizer, dict(options), np.array(steps, np.int64) + 1, scale)


def check_fixed(optimizer: OptimizerConfig, hyper: Mapping[str, float]) -> None:
    """Raises `ConfigError` where steps taken with the options of `optimizer` cannot be followed by one with `hyper`."""
    for name, value in optimizer.fixed.items():
        if hyper[name] != value:
            raise ConfigError(
                f"{name} of the param group of {type(optimizer).__name__} is {hyper[name]:g}, and the steps so far "
                f"were taken with {value:g}: {', '.join(optimizer.totals(0))} is kept of steps that all have one "
                f"{name}. Leave it as it is; of a OneCycleLR pass cycle_momentum=False. Nothing was changed"
            )


def new_history(optimizer: OptimizerConfig | None) -> History | None:
    """Where a dense optimizer keeps what its steps took; None for others."""
    if optimizer is None or not optimizer.is_dense:
        return None
    hyper = named_numbers(type(optimizer), asdict(optimizer))
    return History(type(optimizer), len(optimizer.numbers(hyper)) + len(optimizer.step_numbers(hyper, 1.0)))


def new_histories(optimizer: OptimizerConfig | None, count: int) -> Histories | None:
    """`count` of them; None where there is none."""
    made = [new_history(optimizer) for _ in range(count)]
    histories = Histories([each for each in made if each is not None])
    histories.share()  # of tables that have taken no step yet
    return histories if histories.of else None
