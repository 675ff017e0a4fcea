"""Named ranges in profiles: what of a step is planning, moving rows, looking up, updating.

They are torch's, so `torch.profiler` shows them.
"""

from __future__ import annotations

import contextlib

import torch

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def marked(name: str) -> contextlib.AbstractContextManager[object]:
    """A range called "tieredemb.<name>"; nothing while nobody profiles."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"tieredemb.{name}")  # type: ignore[no-untyped-call]
