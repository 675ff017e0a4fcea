"""How the calls of a captured step were run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# why a call ran the function
FIRST = "the first batch, which shows what the function looks up"
WARM_UP = "warm-up before a capture"
NOTHING_AHEAD = (
    "the next two batches were not known, or not planned, as where a loop begins or ends, or a step stops going ahead"
)
IN_FLIGHT = "other batches were in flight, or something else was planned or moved since the last call"
OTHER_PLANS = "its plans were of another kind than those that were captured"
OTHER_RANK = "another rank could neither replay nor capture"
OTHER_SHAPES = "a batch of other shapes"
NO_GPU = "no table of it is on a GPU"
ACCUMULATES = "inside accumulate()"


@dataclass
class StepSummary:
    """How the calls of a captured step were run. `replayed`: by replays · `captured`: captured, and then replayed for
    the first time · `eager`: by calling the function, how many for each reason."""

    replayed: int = 0
    captured: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.replayed} replayed, {self.captured} captured, {self.eager.total()} eager"]
        lines += [f"  {count} eager: {reason}" for reason, count in self.eager.most_common()]
        return "\n".join(lines)
