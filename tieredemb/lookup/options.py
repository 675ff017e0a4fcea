"""How lookups treat rows, whatever tables they look up in."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tieredemb.config import FLOAT32_MAX, check_finite, check_flag, is_number, keep_plain
from tieredemb.errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """How lookups treat rows. `max_norm`: rows are scaled down to it when looked up · `scale_grad_by_freq`: a row's
    gradient is divided by its occurrences in the call · `padding_is_dropped`: padding adds nothing to its bag (bags),
    rather than being read without gradient (`TieredEmbedding`). Its row is scaled down either way, as in torch."""

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    padding_is_dropped: bool = True

    def __post_init__(self) -> None:
        keep_plain(self)
        check_flag("scale_grad_by_freq", self.scale_grad_by_freq)
        if self.max_norm is not None:
            check_finite("max_norm, where it is not None,", self.max_norm, low=0.0)
        if not (is_number(self.norm_type) and (self.norm_type == math.inf or 0 < self.norm_type <= FLOAT32_MAX)):
            raise ConfigError(
                f"norm_type must be a number above 0 that float32 holds (2 is Euclid's norm), or math.inf, "
                f"got {shown(self.norm_type)}"
            )

    @functools.cached_property
    def plans_padding(self) -> bool:
        """Whether the rows of padding are planned: they are read, or scaled, as torch scales them even if no bag reads
        them. Rows that are only scaled are neither read nor trained."""
        return not self.padding_is_dropped or self.max_norm is not None
