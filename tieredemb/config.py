"""Frozen configs of tables, initial values, policies and optimizers, checked where they are made.

One class per choice, never a string that selects an algorithm. Storage configs live with their tiers in `storage/`,
optimizers with their recipes in `lookup/optimizers/`.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import isabstract
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch

from tieredemb.errors import ConfigError, ConfigTypeError, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Array = np.ndarray[Any, Any]

Mode = Literal["sum", "mean", "max"]
MODES: tuple[Mode, ...] = ("sum", "mean", "max")
Placement = Literal["auto", "resident", "cached"]
PLACEMENTS: tuple[Placement, ...] = ("auto", "resident", "cached")
CheckIds = Literal["deferred", "always"]
CHECKS: tuple[CheckIds, ...] = ("deferred", "always")
Capacity = int | float | str
MAX_ROWS = 2**48  # of one key space: a key takes 48 bits of the hash, see hash/slot_map.py
MAX_WIDTH = 2**31 - 1  # kernels number the columns of a row in int32
MAX_BYTES = 2**62  # of one key space: half of what int64 holds, so that headers and paddings may be added
MAX_SLOTS = 2**31 - 2**16  # slots are int32; the lowest int32 values are sentinels
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127  # rows and updates are computed in float32, where more is infinite


def plain(value: Any) -> Any:
    """`value` as Python's own int or float, if it is an integer of NumPy, of torch or of any class with `__index__`, or
    a float of NumPy; a tuple of these likewise. Anything else, booleans of all kinds included, is returned
    unchanged."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if str(getattr(value, "dtype", "")) in ("bool", "torch.bool") or isinstance(value, bool):
        return value
    if isinstance(value, (float, np.floating)):
        return float(value)
    try:
        return operator.index(value)
    except TypeError:  # no integer; tensors and arrays of several elements are none, too
        return value


def keep_plain(config: DataclassInstance) -> None:
    """Makes the numbers in the fields of a frozen config `plain`, before they are checked: configs are compared, and
    written to files, by what they hold."""
    for field in fields(config):
        object.__setattr__(config, field.name, plain(getattr(config, field.name)))


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_finite(name: str, value: float, *, low: float = -math.inf, open_low: bool = False) -> None:
    """Raises `ConfigError` unless `value` is a number of at least (with `open_low` above) `low` that float32 holds."""
    if not is_number(value):
        raise ConfigTypeError(f"{name} must be a number, got {shown(value)}")
    # compared and not converted: a huge int has no float
    if not abs(value) <= FLOAT32_MAX or value < low or (open_low and value == low):
        bound = "" if low == -math.inf else f" {'above' if open_low else 'of at least'} {low:g}"
        raise ConfigError(f"{name} must be a finite number{bound} that float32 holds, got {shown(value)}")


def check_whole(name: str, value: int, *, low: int, high: int) -> None:
    """Raises `ConfigError` unless `value` is an int from `low` to `high`."""
    if not is_whole(value) or not low <= value <= high:
        kind = ConfigError if is_whole(value) else ConfigTypeError
        raise kind(f"{name} must be an integer of at least {low} and at most {high}, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Raises `ConfigTypeError` unless `value` is True or False, or 1 or 0."""
    if not isinstance(value, bool | int | np.bool_) or value not in (True, False):
        raise ConfigTypeError(f"{name} must be True or False, got {shown(value)}")


def check_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises `ConfigError` unless `value` is one of the words `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


C = TypeVar("C", bound="DataclassInstance")


def by_name(config: type[C]) -> type[C]:
    """A class decorator of configs, whose fields are keywords: a positional argument, such as params for torch's
    optimizers, raises `ConfigTypeError`, which says how to write it."""
    make: Any = config.__init__
    names = [field.name for field in fields(config) if field.init]

    @functools.wraps(make)
    def init(self: C, *args: Any, **keywords: Any) -> None:
        if args:
            raise ConfigTypeError(_written_by_name(config, names, args))
        make(self, **keywords)

    config.__init__ = init  # type: ignore[assignment]
    return config


def _written_by_name(config: type, names: Sequence[str], args: Sequence[object]) -> str:
    """What to write where a config was given `args` by position."""
    name, values = config.__name__, [shown(each) if isinstance(each, int | float | str) else "…" for each in args]
    given = ", ".join(f"{field}={value}" for field, value in zip(names, values, strict=False))
    params = ", and no params: it updates the tables that it is given to" if issubclass(config, OptimizerConfig) else ""
    return f"{name} takes its arguments by name, as in {name}({given}); it has {', '.join(names) or 'none'}{params}"


def _as_floats(config: object, *names: str) -> None:
    """1 and 1.0 are one config: a file remembers its tables in words."""
    for name in names:
        object.__setattr__(config, name, float(getattr(config, name)))


# --- initial values -------------------------------------------------------------------------------------------------


@by_name
@dataclass(frozen=True, kw_only=True)
class Normal:
    """Rows start as independent normal values, as `torch.nn.EmbeddingBag`'s do.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, init=tieredemb.Normal(std=0.01))
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        keep_plain(self)
        check_finite("mean", self.mean)
        check_finite("std", self.std, low=0.0)
        _as_floats(self, "mean", "std")


@by_name
@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Rows start as independent uniform values between low and high; DLRM takes ±1/√num_embeddings.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, init=tieredemb.Uniform(low=-0.03, high=0.03))
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        keep_plain(self)
        check_finite("low", self.low)
        check_finite("high", self.high)
        if self.high < self.low:
            raise ConfigError(f"high must not be below low, got low={self.low!r}, high={self.high!r}")
        _as_floats(self, "low", "high")


@dataclass(frozen=True)
class Written:
    """Rows were written when their table was made, by a function that nothing remembers."""


InitFunction = Callable[[torch.Tensor, torch.Generator], torch.Tensor | None]
Init = Normal | Uniform | Written | InitFunction


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


# --- tables ---------------------------------------------------------------------------------------------------------


@by_name
@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table of a collection.

    `padding_idx`: an id that adds nothing to a bag and is never trained; negative values count from the end. `init`:
    the rows' initial values: `Normal()`, the default, or `Uniform(low=…, high=…)`, by which a row is generated when
    it is first used; or a function of rows and a generator, as `torch.nn.init` has them, that fills all rows when the
    table is made: it is given float32 (K, D) on the CPU, zeros, of at most 65,536 rows at a time, and a
    `torch.Generator` whose seed follows from `seed`, the table and the rows, and fills them in place or returns as
    many; the row of `padding_idx` starts as zeros. `placement`: "resident" keeps all rows in the hot cache, out of
    its capacity; "cached" lets them come and go; "auto" decides, on a GPU for resident where they are few beside the
    capacity, or where it holds all tables. `feature_names`: who looks up in it, as in `torchrec.EmbeddingBagConfig`;
    by default one feature, of the table's name. Each brings ids of its own and has columns of its own in the output.
    They share the rows: what several bring to a row is one gradient, and one update.

    >>> user = tieredemb.TableConfig(name="user", num_embeddings=1000, embedding_dim=4, padding_idx=0)
    >>> item = tieredemb.TableConfig(
    ...     name="item", num_embeddings=5000, embedding_dim=4, feature_names=("clicked", "bought")
    ... )
    >>> collection = tieredemb.TieredEmbeddingBagCollection([user, item], capacity=0.1)
    >>> item.features
    ('clicked', 'bought')
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    mode: Mode = "sum"
    padding_idx: int | None = None
    init: Init = Normal()
    placement: Placement = "auto"
    feature_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keep_plain(self)
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a table's name must be a non-empty string, got {shown(self.name)}")
        check_whole(f"num_embeddings of table {self.name!r}", self.num_embeddings, low=1, high=MAX_ROWS)
        check_whole(f"embedding_dim of table {self.name!r}", self.embedding_dim, low=1, high=MAX_WIDTH)
        check_one_of(f"mode of table {self.name!r}", self.mode, MODES)
        check_one_of(f"placement of table {self.name!r}", self.placement, PLACEMENTS)
        if not isinstance(self.init, (Normal, Uniform, Written)) and not _is_function(self.init):
            raise ConfigError(
                f"init of table {self.name!r} must be Normal(…), Uniform(…) or a function of rows and a generator, got "
                f"{shown(self.init)}"
            )
        if self.padding_idx is not None:
            rows, padding = self.num_embeddings, shown(self.padding_idx)
            if not is_whole(self.padding_idx):
                raise ConfigTypeError(f"padding_idx of table {self.name!r} must be an integer, got {padding}")
            if not -rows <= self.padding_idx < rows:
                raise ConfigError(
                    f"padding_idx {padding} of table {self.name!r} is out of range ({-rows} … {rows - 1})"
                )
            object.__setattr__(self, "padding_idx", self.padding_idx % rows)
        names = self.feature_names
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) and each for each in names):
            raise ConfigError(f"feature_names of table {self.name!r} must be a tuple of names, got {shown(names)}")
        if len(set(names)) < len(names):
            raise ConfigError(f"feature_names of table {self.name!r} must differ, got {shown(names)}")
        object.__setattr__(self, "feature_names", tuple(names))

    @property
    def features(self) -> tuple[str, ...]:
        """Those that look up in it: `feature_names`, or one of the table's own name."""
        return self.feature_names or (self.name,)


def without_functions(tables: Sequence[TableConfig]) -> tuple[TableConfig, ...]:
    """Tables whose rows are given by a function, which no file, copy or pickle could hold, as written ones."""
    return tuple(replace(table, init=Written()) if callable(table.init) else table for table in tables)


@dataclass(frozen=True)
class TablePart:
    """Which rows of a larger table a table is: its row k is row `first` + `step` · k of table `number`, which has
    `rows` of them."""

    number: int
    first: int
    step: int
    rows: int

    @property
    def own_rows(self) -> int:
        """How many of them it is."""
        return max(0, -(-(self.rows - self.first) // self.step))

    def span(self, start: int, rows: int) -> slice:
        """Where `rows` of its rows, from `start` on, are in the larger table."""
        return slice(self.first + self.step * start, self.first + self.step * (start + rows), self.step)


class Feature(NamedTuple):
    """A feature of a collection: its `name`, and the number of the `table` that it looks up in."""

    name: str
    table: int


def features_of(tables: Sequence[TableConfig]) -> list[Feature]:
    """The features of a collection, in the order of its tables and of their `feature_names`. Bags and outputs have the
    same order."""
    return [Feature(name, t) for t, table in enumerate(tables) for name in table.features]


# --- policies -------------------------------------------------------------------------------------------------------


@by_name
@dataclass(frozen=True, kw_only=True)
class LFU:
    """Keeps the rows that were used in most batches, a use losing half its weight every `half_life_batches`.

    LRFU (Lee et al., IEEE ToC 2001). `half_life_batches=math.inf` counts exactly. With `remember_evicted` (default)
    the score leaves and returns with the row, and of rows of equal score the one used longest ago leaves; without it an
    evicted row starts again and the score alone decides, as in classic LFU caches.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, capacity=100, policy=tieredemb.LFU(half_life_batches=50))
    """

    half_life_batches: float = 300.0
    remember_evicted: bool = True

    def __post_init__(self) -> None:
        keep_plain(self)  # files and checkpoints name the policy by its repr
        half_life = self.half_life_batches
        if not is_number(half_life) or not half_life >= 1:
            raise ConfigError(f"half_life_batches must be a number of at least 1, or math.inf, got {shown(half_life)}")
        if half_life != math.inf and half_life > 2**26:
            raise ConfigError(
                f"half_life_batches of {shown(half_life)} is not told apart from math.inf; pass math.inf, or at most "
                f"{2**26}"
            )
        check_flag("remember_evicted", self.remember_evicted)


@by_name
@dataclass(frozen=True, kw_only=True)
class LRU:
    """Keeps the rows that were used last.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, capacity=100, policy=tieredemb.LRU())
    """


Policy = LFU | LRU


# --- optimizers -----------------------------------------------------------------------------------------------------


class StateTensor(NamedTuple):
    """One tensor of an optimizer's state, named as torch names it: (rows, D), or with `row_wise` (rows, 1)."""

    name: str
    row_wise: bool = False

    def width(self, row_width: int) -> int:
        """32-bit words of it in a row of `row_width` weights."""
        return 1 if self.row_wise else row_width


class StepTerms(NamedTuple):
    """What a step without a gradient does to a row, in numbers of the step alone, for the closed form of several
    (`lookup/history.py`): with first and second moments m and v, m ← first · m, v ← root_second² · v,
    w ← decay · w − weight · m / (point · √v + eps), or where there is no v, or none in the move (a `point` of 0),
    w ← decay · w − weight · m. `coupled`: 1 where the step has no such form and is to be replayed."""

    weight: float
    point: float = 1.0
    first: float = 1.0
    root_second: float = 1.0
    decay: float = 1.0
    coupled: float = 0.0
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(abc.ABC):
    """An optimizer of the tables' rows, applied in backward. Each subclass is one optimizer, as a recipe from which all
    the rest is built: the config is in `lookup/optimizers/<name>.py`, and the row update in `<name>_cpu.py` and
    `<name>.cu` beside it.

    The fields are the hyperparameters, numbers and pairs of numbers: what a param group holds. A pair `betas` is
    `beta1` and `beta2` to the methods below, which are given the param group's numbers as they are at a step.

    Rows outside a batch do not change. If the optimizer `is_dense`, they catch up when they are next used: then its row
    update has a second part, in both languages, that brings a row from its last step to the current one, and its config
    has `step_terms`. The second part is a pure function of the row and of numbers of the steps.
    """

    lr: float

    state: ClassVar[tuple[StateTensor, ...]] = ()  # what a row stores, in this order

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """`state`, or what of it an optimizer with these hyperparameters needs."""
        return self.state

    def __post_init__(self) -> None:
        keep_plain(self)
        check_finite("lr", self.lr, low=0.0)

    @property
    def state_start(self) -> float:
        """What every word of state starts as."""
        return 0.0

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        """Step sizes, float64 (T,), of tables that take their `step`-th step (float64 (T,), from 1). The CUDA recipe
        spells it too, as a GPU counts steps itself."""
        return np.full(len(step), hyper["lr"])

    @abc.abstractmethod
    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        """The arguments of the row update in addition to the rate, rounded to float32, in this order: by name in CUDA,
        unpacked on the CPU. Raises `ConfigError` for hyperparameters that this config's state does not support."""

    @property
    def is_dense(self) -> bool:
        """Whether every row changes in every step: then a row's state ends with the step that it has caught up to."""
        return False

    @property
    def flags(self) -> tuple[str, ...]:
        """What the CUDA recipe is compiled with, where it serves two optimizers."""
        return ()

    def step_numbers(self, hyper: Mapping[str, float], step: float) -> dict[str, float]:
        """The arguments of the row update after `numbers` that change from step to step. The CUDA recipe lists the same
        ones. For dense optimizers, whose tables have one step count."""
        return {}

    def missed_numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        """What of `numbers` is another one, by name, for rows that miss a step and replay it. The CUDA recipe spells
        it too."""
        return {}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        """What the `step`-th step does to rows that have no gradient: nothing, unless the optimizer is dense. The CUDA
        recipe spells it too."""
        return StepTerms(weight=0.0)

    def totals(self, steps: int) -> dict[str, float]:
        """What torch keeps of a parameter after `steps` steps beside its tensors and the number of steps, by name."""
        return {}

    @property
    def fixed(self) -> dict[str, float]:
        """Hyperparameters by name that must stay as they are, as `totals` are of steps that all had these."""
        return {}

    @staticmethod
    def known() -> dict[str, type[OptimizerConfig]]:
        """The optimizers that there are, by name."""
        kinds = list(OptimizerConfig.__subclasses__())
        for kind in kinds:
            kinds += kind.__subclasses__()
        return {kind.__name__: kind for kind in sorted(kinds, key=lambda each: each.__name__) if not isabstract(kind)}


def check_betas(betas: tuple[float, float]) -> None:
    """Raises `ConfigError` unless `betas` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple) or len(betas) != 2:
        raise ConfigError(f"betas must be a pair of numbers, got {shown(betas)}")
    for beta in betas:
        check_finite("betas", beta, low=0.0)
        if beta >= 1:
            raise ConfigError(f"betas must lie in [0, 1), got {shown(betas)}")


def used_decay(hyper: Mapping[str, float]) -> float:
    """The factor by which a row's weights are added to its gradient in a step that uses it. Raises `ConfigError` if
    both kinds of L2 are set."""
    always, on_use = hyper["weight_decay"], hyper["weight_decay_on_use"]
    if always != 0 and on_use != 0:
        raise ConfigError(
            f"weight_decay is {always:g} and weight_decay_on_use is {on_use:g}: the first is added to the gradient of "
            f"every row in every step, as torch does, and the second to that of rows which a step uses alone; leave "
            f"one of them at 0"
        )
    return always + on_use


# --- capacity -------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*")
_UNIT_BYTES = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str) -> int:
    """Bytes in a size such as `"512MiB"`, `"1.5 GB"`, `"4096B"`. Raises `ConfigError`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{shown(text)} is no size; write a number and a unit, as in '512MiB', '1.5GB' or '4096B'")
    size = float(match[1]) * _UNIT_BYTES[match[2]]  # infinite where there are hundreds of digits
    if size > MAX_BYTES:
        raise ConfigError(f"{shown(text)} is beyond any memory; write a size of at most {MAX_BYTES >> 40}TiB")
    return int(size)


def parse_capacity(text: str) -> Capacity:
    """What a capacity in words means, here and on the command lines: rows (`"5000"`) as an int, a share of the rows
    (`"5%"`, `"0.05"`) as a float, or else bytes (`"512MiB"`), as they are. Its value is not checked."""
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if re.fullmatch(r"[+-]?[\d_]{1,4000}", text) else float(text)
    except ValueError:
        return text


def as_capacity(given: Any) -> Capacity:
    """A capacity as it was given: in words, or as a number of NumPy or torch. Its value is not checked."""
    return parse_capacity(given) if isinstance(given, str) else plain(given)


def slots_for(capacity: Capacity, *, rows: int, slot_bytes: int, of: str = "the rows") -> int:
    """Slots that `capacity` buys for a key space of `rows` rows.

    `capacity`: rows as an int, a share of the rows as a float in (0, 1], or bytes as a string, of which a slot takes
    `slot_bytes`. Never more than `rows`, never less than 1. Raises `ConfigError`, which names the owner of the
    rows (`of`), if the capacity is too large for them.
    """
    if isinstance(capacity, str) and _SIZE.fullmatch(capacity):
        budget = parse_bytes(capacity)
        if budget < slot_bytes:
            raise ConfigError(
                f"capacity {shown(capacity)} holds no row; one takes {slot_bytes} bytes in the cache, so raise it"
            )
        slots = budget // slot_bytes
    elif isinstance(capacity, float):
        if not 0 < capacity <= 1:
            raise ConfigError(
                f"capacity as a share of the rows must lie in (0, 1], got {shown(capacity)}; a number of rows is an int"
            )
        slots = math.ceil(rows * capacity)
    elif not isinstance(capacity, str) and is_whole(capacity) and capacity >= 1:
        slots = capacity
    else:
        raise ConfigError(
            f"capacity must be rows (an int of at least 1), a share (a float in (0, 1], or '5%') or bytes ('512MiB'), "
            f"got {shown(capacity)}"
        )
    slots = max(1, min(slots, rows))
    if slots > MAX_SLOTS:
        raise ConfigError(
            f"capacity {shown(capacity)} means {slots} slots for {of}; at most {MAX_SLOTS} are supported, so "
            f"lower the capacity"
        )
    return slots
