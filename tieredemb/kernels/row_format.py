"""The layout of a row in memory, for storage, transfers, lookup and update.

A row has D weights and S words of optimizer state, both equal in every home. The layout of weights is an `Encoding`: an
element a weight in the three existing ones, or the output of a codec, such as scaled integers. Outputs have a dtype of
their own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tieredemb.errors import ConfigError, ConfigTypeError, UnsupportedError, shown

STATE_DTYPE = np.dtype(np.uint32)
VECTOR_BYTES = 16  # that a thread of a GPU reads at once, at most


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The layout of a row's weights in memory.

    `name`: in files · `dtype`: of weights as tensors, and of outputs by default · `carrier`: the numpy type of a row's
    elements, different for each encoding, as kernels distinguish them by it · `flag`: of CUDA kernels; None if they
    cannot read it · `head`: elements of a row before its weights · `codec`: if a weight is not one element, the module
    that reads and writes rows.

    A codec has two device functions, which kernels compile in: `load(array, row, column)`, a weight as float32, and
    `row_store(array, row, values)`, which rounds float32 `values` (1, D) into a row as a whole.
    """

    name: str
    dtype: torch.dtype
    carrier: np.dtype[Any]
    flag: str | None = None
    head: int = 0
    codec: str = ""

    @property
    def is_direct(self) -> bool:
        """Whether an element is a weight."""
        return not self.codec


_ENCODINGS: dict[str, Encoding] = {}


def register(encoding: Encoding) -> Encoding:
    """Makes an encoding known: to kernels by its carrier, to files by its name. Raises `ConfigError` where another has
    either."""
    for other in _ENCODINGS.values():
        if other != encoding and (other.name == encoding.name or other.carrier == encoding.carrier):
            raise ConfigError(f"rows of {encoding.name} share a name or a carrier with those of {other.name}")
    return _ENCODINGS.setdefault(encoding.name, encoding)


def encodings() -> dict[str, Encoding]:
    """All encodings by name."""
    return dict(_ENCODINGS)


# numba has neither half nor bfloat16: such rows travel as the 16-bit integers that carry their bits
_PLAIN = {
    encoding.dtype: register(encoding)
    for encoding in (
        Encoding(name="float32", dtype=torch.float32, carrier=np.dtype(np.float32), flag="-DROW_FLOAT"),
        Encoding(name="float16", dtype=torch.float16, carrier=np.dtype(np.uint16), flag="-DROW_HALF"),
        Encoding(name="bfloat16", dtype=torch.bfloat16, carrier=np.dtype(np.int16), flag="-DROW_BFLOAT16"),
    )
}
CARRIERS: dict[torch.dtype, np.dtype[Any]] = {dtype: encoding.carrier for dtype, encoding in _PLAIN.items()}


def encoding_of(dtype: torch.dtype | Encoding, of: str = "the rows") -> Encoding:
    """The encoding of rows with a dtype. Raises `ConfigError`, with their owner `of`, if there are no such rows, or it
    is no dtype."""
    if isinstance(dtype, Encoding):
        return register(dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in _PLAIN:
        kind = ConfigError if isinstance(dtype, torch.dtype) else ConfigTypeError
        allowed = ", ".join(map(str, _PLAIN))
        raise kind(f"dtype of {of} must be one of {allowed}, got {shown(dtype)}; pass one of them as dtype=")
    return _PLAIN[dtype]


def codec_of(carrier: np.dtype[Any]) -> tuple[Encoding, ModuleType]:
    """The encoding whose rows an array of that type holds, and its codec: for kernels that are being compiled."""
    found = next((each for each in _ENCODINGS.values() if each.carrier == carrier and each.codec), None)
    if found is None:
        raise TypeError(f"no rows are carried by {carrier}")
    return found, importlib.import_module(found.codec)


def carrier_view(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous CPU tensor of a rows' dtype as the numpy array that carries it."""
    carriers = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}
    return values.view(carriers[values.dtype]).numpy() if values.dtype in carriers else values.numpy()


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A row: D = `width` weights, as `dtype` says or an `Encoding`, and S = `state_width` 32-bit words of state."""

    width: int
    dtype: torch.dtype | Encoding = torch.float32
    state_width: int = 0

    def __post_init__(self) -> None:
        encoding = encoding_of(self.dtype)
        if _PLAIN.get(encoding.dtype) is encoding:  # one way to say it
            object.__setattr__(self, "dtype", encoding.dtype)
        if self.width < 0 or self.state_width < 0:
            raise ConfigError(f"a row needs sizes of 0 or more, got {self}")

    @property
    def encoding(self) -> Encoding:
        return encoding_of(self.dtype)

    @property
    def carrier(self) -> np.dtype[Any]:
        return self.encoding.carrier

    @property
    def columns(self) -> int:
        """Elements of a row's weights in memory."""
        return self.encoding.head + self.width

    @property
    def is_float32(self) -> bool:
        """Whether weights are float32 in memory, so that nothing rounds them."""
        return self.encoding.is_direct and self.carrier == np.float32

    @property
    def hot_bytes(self) -> int:
        """Bytes of weights and state."""
        return self.columns * self.carrier.itemsize + self.state_width * STATE_DTYPE.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one cold row: weights, state and score."""
        return self.hot_bytes + STATE_DTYPE.itemsize

    # --- on a GPU ---------------------------------------------------------------------------------------------------

    @property
    def device_dtype(self) -> torch.dtype:
        """dtype of the tensors that hold rows on a GPU. Raises `UnsupportedError` where no kernel reads them."""
        return self._on_device()[0]

    def _on_device(self) -> tuple[torch.dtype, str]:
        encoding = self.encoding
        if encoding.flag is None:
            raise UnsupportedError(f"rows of {encoding.name} have no CUDA kernels; use device='cpu'")
        return encoding.dtype, encoding.flag

    @property
    def vector(self) -> int:
        """Weights that a thread reads at once, as VECTOR of the kernels."""
        vector = VECTOR_BYTES // self.device_dtype.itemsize
        while self.width % vector:
            vector //= 2
        return vector

    @property
    def lanes(self) -> int:
        """Threads that share a row, as LANES of the kernels."""
        units = self.width // self.vector
        return next((lanes for lanes in (1, 2, 4, 8, 16) if units <= lanes), 32)

    @property
    def flags(self) -> tuple[str, ...]:
        """What CUDA kernels are compiled with for such rows."""
        return self._on_device()[1], f"-DWIDTH={self.width}", f"-DSTATE={self.state_width}"
