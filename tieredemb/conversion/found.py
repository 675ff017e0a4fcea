"""The embeddings of a model: which of them can have tiered twins, and which are to be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from tieredemb.config import Init, Normal
from tieredemb.errors import ConfigError, shown
from tieredemb.storage.base import CARRIERS

Embedding = nn.Embedding | nn.EmbeddingBag
Choice = str | Callable[[str, Embedding], bool] | Iterable[str] | None  # of embeddings, by name or by more

KINDS = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BEGIN = ("reset_parameters", "_fill_padding_idx_with_zero")
# what a subclass may define and still look up as its base does: its initial values, and how it is printed
_HARMLESS = {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__parameters__", "__orig_bases__",
             "__firstlineno__", "__static_attributes__", "extra_repr", *_BEGIN}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """An embedding of a model. `name`: its name in `named_modules()` · `reason`: why it cannot have a twin, as a
    text; None if it can."""

    name: str
    module: Embedding
    reason: str | None

    @property
    def is_meta(self) -> bool:
        """Whether its weight has no content yet, so that its table generates the initial rows."""
        return self.module.weight.is_meta

    @property
    def begins_by_itself(self) -> bool:
        """Whether its class initialises the weight with code of its own."""
        base = nn.EmbeddingBag if isinstance(self.module, nn.EmbeddingBag) else nn.Embedding
        return any(getattr(type(self.module), name) is not getattr(base, name) for name in _BEGIN)

    @property
    def shown(self) -> str:
        """The embedding, as messages name it."""
        return repr(self.name) if self.name else "the model"


def find(model: nn.Module) -> list[Found]:
    """Every `nn.Embedding` and `nn.EmbeddingBag` in `model`, once each, in the order of `named_modules()`."""
    owners: dict[nn.Parameter, list[str]] = {}
    for owner, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(owner)
    return [
        Found(name, module, _reason(name, module, owners))
        for name, module in model.named_modules()
        if isinstance(module, KINDS)
    ]


def _reason(name: str, module: Embedding, owners: dict[nn.Parameter, list[str]]) -> str | None:
    """Why a twin would not behave as the module does; None if it would."""
    base = next(kind for kind in KINDS if isinstance(module, kind))
    between = type(module).__mro__[: type(module).__mro__.index(base)]
    own = sorted({name for each in between for name in vars(each)} - _HARMLESS)
    if own:
        return f"is a {type(module).__name__}, a subclass with its own {', '.join(own)}"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "has hooks"
    if list(module._parameters) != ["weight"] or module._buffers or module._modules:
        return "has more than a weight, or no parameter for it"
    weight = module.weight
    if type(weight) is not nn.Parameter:
        return f"has a {type(weight).__name__} as its weight"
    others = [repr(owner) for owner in owners[weight] if owner != name]
    if others:
        return f"shares its weight with {', '.join(others)} (tied weights)"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "has hooks on its weight"
    if weight.dtype not in CARRIERS:
        return f"has rows of {weight.dtype}; tables have {', '.join(str(dtype) for dtype in CARRIERS)}"
    if tuple(weight.shape) != (module.num_embeddings, module.embedding_dim) or not weight.numel():
        return f"has a weight of shape {tuple(weight.shape)}"
    return None


def choose(found: list[Found], include: Choice, exclude: Choice) -> list[Found]:
    """Those that are included and not excluded. Raises `ConfigError` for a name or pattern that matches none, and for
    one that is included by its name and cannot have a twin."""
    wanted = _matches("include", found, include) if include is not None else {each.name for each in found}
    unwanted = _matches("exclude", found, exclude) if exclude is not None else set()
    named = set() if include is None or callable(include) else {include} if isinstance(include, str) else set(include)
    for each in found:
        if each.reason and each.name in named and each.name not in unwanted:
            raise ConfigError(f"{each.shown} {each.reason}, which a tiered twin would lose; replace it by hand")
    return [each for each in found if each.name in wanted and each.name not in unwanted]


def initial_values(found: list[Found], init: Init | Mapping[str, Init] | None) -> dict[str, Init]:
    """The initial values of each embedding whose weight has no content, by its name: `init`, or the first of several
    whose name or pattern matches, or else torch's normal values. Raises `ConfigError` for a pattern that matches none,
    and for a class that initialises the weight with code of its own, unless values are given."""
    given = init if isinstance(init, Mapping) else {} if init is None else {"*": init}
    fits = {pattern: _matches("init", found, pattern) for pattern in given} if isinstance(init, Mapping) else None
    values: dict[str, Init] = {}
    for each in found:
        named = [value for pattern, value in given.items() if fits is None or each.name in fits[pattern]]
        if each.is_meta and not named and each.begins_by_itself:
            raise ConfigError(
                f"{each.shown} is a {type(each.module).__name__} on the meta device, whose own reset_parameters() has "
                f"not run on its rows; pass init= what they begin as (tieredemb.Normal, tieredemb.Uniform, a function "
                f"of rows and a generator, or a dict of these by name), or exclude it"
            )
        values[each.name] = named[0] if named else Normal()
    return values


def _matches(keyword: str, found: list[Found], choice: Choice) -> set[str]:
    if isinstance(choice, type | torch.Tensor) or not (callable(choice) or isinstance(choice, Iterable)):
        raise ConfigError(
            f"{keyword} takes names, patterns such as 'user*', or a function of name and module; got {shown(choice)}"
        )
    if callable(choice):
        return {each.name for each in found if choice(each.name, each.module)}
    patterns = [choice] if isinstance(choice, str) else list(choice)
    matched: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(
                f"{keyword} takes names, patterns such as 'user*', or a function of name and module; got "
                f"{shown(pattern)}"
            )
        names = {each.name for each in found if fnmatchcase(each.name, pattern)}
        if not names:
            there = ", ".join(each.shown for each in found[:20]) or "none"
            raise ConfigError(f"{keyword}={pattern!r} matches no embedding of the model; there are: {there}")
        matched |= names
    return matched
