"""TorchRec's `KeyedJaggedTensor` as it behaves to whoever reads it, for tests without TorchRec."""

from __future__ import annotations

import torch


class KeyedJaggedTensor:
    """Bags of ids by key, key-major."""

    def __init__(self, keys, values, weights=None, lengths=None, offsets=None, stride=None):
        self._keys, self._values, self._weights = list(keys), values, weights
        self._lengths, self._offsets = lengths, offsets
        self._stride = stride
        self._inverse_indices = None

    @staticmethod
    def from_lengths_sync(keys, values, lengths, weights=None):
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths)

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def weights(self):
        if self._weights is None:
            raise ValueError("This (Keyed)JaggedTensor doesn't have weights.")
        return self._weights

    def weights_or_none(self):
        return self._weights

    def offsets(self):
        """Made once, and kept."""
        if self._offsets is None:
            ends = torch.cumsum(self._lengths, 0)
            self._offsets = torch.cat([ends.new_zeros(1), ends]).to(self._lengths.dtype)
        return self._offsets

    def lengths(self):
        if self._lengths is None:
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def stride(self):
        return len(self.lengths()) // len(self._keys)

    def length_per_key(self):
        return self.lengths().reshape(len(self._keys), -1).sum(1).tolist()

    def variable_stride_per_key(self):
        return False

    def inverse_indices_or_none(self):
        return self._inverse_indices

    def to(self, device, non_blocking=False):
        parts = (self._values, self._weights, self._lengths, self._offsets)
        moved = (None if part is None else part.to(device, non_blocking=non_blocking) for part in parts)
        return KeyedJaggedTensor(self._keys, *moved)


class JaggedTensor:
    """Rows of several lengths."""

    def __init__(self, values, weights=None, lengths=None, offsets=None):
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    def values(self):
        return self._values

    def weights_or_none(self):
        return self._weights

    def lengths(self):
        return self._lengths


class KeyedTensor:
    """Blocks of columns by key."""

    def __init__(self, keys, length_per_key, values, key_dim=1):
        assert values.shape[key_dim] == sum(length_per_key)
        self._keys, self._length_per_key, self._values = keys, length_per_key, values

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def length_per_key(self):
        return self._length_per_key

    def to_dict(self):
        return dict(zip(self._keys, self._values.split(self._length_per_key, 1), strict=True))

    def __getitem__(self, key):
        return self.to_dict()[key]
