"""Inputs and outputs by key, as TorchRec has them: what is called `KeyedJaggedTensor` and `KeyedTensor` there.

Nothing of TorchRec is imported. Whoever passes a `KeyedJaggedTensor` has loaded it, and gets its `KeyedTensor` back; an
object of another library that looks like one, without such a class beside it, gets the `KeyedTensor` of this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch

from tieredemb.config import TableConfig, features_of
from tieredemb.errors import InvalidInputError, UnsupportedError
from tieredemb.lookup.bags import Places
from tieredemb.modules.base import TieredModule
from tieredemb.step.batch import Given


class KeyedJagged(Protocol):
    """What has bags of ids for each of its keys: `values()`, int32 or int64 (N,), key-major; `offsets()`, (K·B + 1,);
    and `weights_or_none()`, floats (N,)."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> torch.Tensor: ...
    def offsets(self) -> torch.Tensor: ...
    def weights_or_none(self) -> torch.Tensor | None: ...


def is_keyed(value: object) -> TypeGuard[KeyedJagged]:
    """Whether it is a `KeyedJagged`."""
    return not isinstance(value, torch.Tensor) and all(
        callable(getattr(value, name, None)) for name in ("keys", "values", "offsets", "weights_or_none")
    )


class KeyedTensor:
    """Blocks of columns by key: `values()` is (B, ΣD), and `length_per_key()` the columns of each of the `keys()`.

    >>> pooled = KeyedTensor(["user", "item"], [2, 1], torch.arange(6).reshape(2, 3))
    >>> pooled["item"].tolist()
    [[2], [5]]
    """

    def __init__(self, keys: list[str], length_per_key: list[int], values: torch.Tensor) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values

    def keys(self) -> list[str]:
        """The names of the blocks, in their order."""
        return self._keys

    def values(self) -> torch.Tensor:
        """All blocks side by side."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each block."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """First column of each block, and their number."""
        return [sum(self._length_per_key[:k]) for k in range(len(self._keys) + 1)]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Each block by its key."""
        return dict(zip(self._keys, torch.split(self._values, self._length_per_key, 1), strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        k = self._keys.index(key) if key in self._keys else None
        if k is None:
            raise KeyError(key)
        return self._values.narrow(1, self.offset_per_key()[k], self._length_per_key[k])

    def __repr__(self) -> str:
        blocks = ", ".join(f"{key}: {width}" for key, width in zip(self._keys, self._length_per_key, strict=True))
        return f"KeyedTensor({{{blocks}}}, {len(self._values)} rows)"


class JaggedTensor:
    """Rows of several samples: `values()` is (N, D), and `lengths()`, (B,), how many of them each sample has.

    >>> rows = JaggedTensor(torch.arange(6).reshape(3, 2), torch.tensor([1, 2]))
    >>> [sample.tolist() for sample in torch.split(rows.values(), rows.lengths().tolist())]
    [[[0, 1]], [[2, 3], [4, 5]]]
    """

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._values = values
        self._lengths = lengths
        self._weights = weights

    def values(self) -> torch.Tensor:
        """The rows of all samples, one after the other."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """Rows of each sample."""
        return self._lengths

    def weights_or_none(self) -> torch.Tensor | None:
        """The ids of the rows, where they were asked for."""
        return self._weights


def sibling(value: object, name: str, default: type) -> Any:
    """The class `name` that lies beside the class of `value`, or of one that it derives from; `default` where there is
    none."""
    for kind in reversed(type(value).__mro__):  # a module that derives one may have classes of any library
        found = getattr(sys.modules.get(kind.__module__), name, None)
        if isinstance(found, type):
            return found
    return default


def output_names(tables: Sequence[TableConfig]) -> list[str]:
    """What TorchRec calls the outputs of features: by their names, and `feature@table` where several tables have one of
    that name."""
    names = [feature.name for feature in features_of(tables)]
    return [
        f"{feature.name}@{tables[feature.table].name}" if names.count(feature.name) > 1 else feature.name
        for feature in features_of(tables)
    ]


class KeyedInputs:
    """Of a module of several tables, `table_configs`, whose inputs come by feature: as tensors in the features' order,
    or by key."""

    table_configs: tuple[TableConfig, ...]

    def _know_features(self) -> None:
        self._places: dict[tuple[str, ...], Places | None] = {}
        self._n_features = len(features_of(self.table_configs))

    def given_by_keys(self, keyed: KeyedJagged) -> Given:
        """What a forward of it is known by, see `by_feature`."""
        return tuple(part for part in self.by_feature(keyed) if part is not None)

    def by_feature(self, keyed: KeyedJagged) -> tuple[torch.Tensor, torch.Tensor, Places | None]:
        """Its ids and offsets, and where the features are in them. Raises `InvalidInputError` where a feature is
        missing, and `UnsupportedError` for samples that differ in number from key to key."""
        varies = getattr(keyed, "variable_stride_per_key", None)
        inverse = getattr(keyed, "inverse_indices_or_none", None)
        if (callable(varies) and varies()) or (callable(inverse) and inverse() is not None):
            raise UnsupportedError(
                "the KeyedJaggedTensor has numbers of samples that differ from key to key, or inverse indices; expand "
                "it to one number of samples for all keys"
            )
        return keyed.values(), keyed.offsets(), self._places_of(tuple(keyed.keys()))

    def _places_of(self, keys: tuple[str, ...]) -> Places | None:
        """Where features are among `keys`; None where they are the keys. The last of equal keys counts, as in
        TorchRec's `to_dict()`."""
        if keys not in self._places:
            block = {key: k for k, key in enumerate(keys)}
            features = features_of(self.table_configs)
            for feature in features:
                if feature.name not in block:
                    raise InvalidInputError(
                        f"the KeyedJaggedTensor has no key {feature.name!r}, which table "
                        f"{self.table_configs[feature.table].name!r} looks up; it has {', '.join(map(repr, keys))}"
                    )
            blocks = tuple(block[feature.name] for feature in features)
            places = Places(blocks, len(keys))
            self._places[keys] = None if blocks == tuple(range(len(keys))) else places
        return self._places[keys]


class KeyedModule(KeyedInputs, TieredModule):
    """A tiered module of several tables."""

    def _connect(self) -> None:
        super()._connect()
        self._know_features()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_places"]
        return state


def blocks_once(
    ids: torch.Tensor, edges: torch.Tensor, weights: torch.Tensor | None, places: Places
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Places]:
    """A batch in which no two features have one block: tables that look up the same feature get a copy each."""
    seen: dict[int, int] = {}
    copy = []
    for block in places.blocks:
        copy.append(seen.get(block, 0))
        seen[block] = copy[-1] + 1
    copies = max(seen.values(), default=1)
    if copies == 1:
        return ids, edges, weights, places
    moved = [edges[:1] * 0, *(edges[1:] + number * len(ids) for number in range(copies))]
    blocks = tuple(block + number * places.count for block, number in zip(places.blocks, copy, strict=True))
    shares = None if weights is None else weights.repeat(copies)
    return ids.repeat(copies), torch.cat(moved), shares, Places(blocks, copies * places.count)
