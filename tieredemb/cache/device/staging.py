"""Where rows are between a GPU and a host that alone reaches cold storage: pinned buffers, and words about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tieredemb.cache.device.copy_threads import CopyJob, MissReport
from tieredemb.kernels.constants import REPORT_NUMBER, REPORT_WORDS
from tieredemb.storage.base import RowLayout


class PinnedRows:
    """Room for `rows` rows as they lie in cold storage, and whether each is to be written whole, in pinned memory:
    kernels write there, and copies to the device run beside what the host does. `copied`: comes once the last such copy
    is over."""

    def __init__(self, layout: RowLayout, rows: int = 0) -> None:
        self.rows = rows
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.inference_mode(False):  # they are changed in place when that is over
            self.weight = torch.empty((rows, layout.columns), dtype=layout.device_dtype, device="cpu", pin_memory=True)
            self.state = torch.empty((rows, layout.state_width + 1), dtype=torch.int32, device="cpu", pin_memory=True)
            self.dirty = torch.empty(rows, dtype=torch.uint8, device="cpu", pin_memory=True)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.weight[start:stop], self.state[start:stop], self.dirty[start:stop]

    def size_bytes(self) -> int:
        return self.weight.nbytes + self.state.nbytes + self.dirty.nbytes


class Moves(NamedTuple):
    """What a plan moves, as the device has told. `keys`: int64 (M,), that are missed; the first `room` get slots never
    used · `leaving`: int64 (V,), the keys whose slots the next ones get · `dirty`: uint8 (V,), whether their rows are
    to be written. The keys that then follow get no slots."""

    keys: torch.Tensor
    room: int
    leaving: torch.Tensor
    dirty: torch.Tensor

    @property
    def with_slots(self) -> int:
        return self.room + len(self.leaving)


class MissReports:
    """What plans tell the host that they move, one at a time (`missed_tell`): words in pinned memory."""

    def __init__(self) -> None:
        self._number = 0
        self._make_room(0)

    def expect(self, n: int) -> Asked:
        """Room for what a plan of n ids will tell; what the one before has told is lost."""
        words, flags = REPORT_WORDS + 2 * n, -(-n // 8)
        if len(self._words) < words + flags:
            self._make_room(2 * (words + flags))
        self._number += 1
        told, sent = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        return Asked(n, MissReport(self._words, self._number, told), self._words[words : words + flags], sent)

    def _make_room(self, words: int) -> None:
        torch.cuda.current_stream().synchronize()  # a plan that was interrupted may tell yet
        with torch.inference_mode(False):
            self._words = torch.empty(REPORT_WORDS + words, dtype=torch.int64, device="cpu", pin_memory=True)
        self._words[REPORT_NUMBER] = 0  # and no number that is expected

    def size_bytes(self) -> int:
        return self._words.nbytes


@dataclass
class Asked:
    """What a plan of `n` ids was asked. `report`: of what it misses · `flags`: uint8 (n,) in them, whether what leaves
    is dirty · `sent`: comes once the victims' rows are with the host · `gathers`: what gathers the missed rows, if that
    has begun, and `gathered`, where."""

    n: int
    report: MissReport
    flags: torch.Tensor
    sent: torch.cuda.Event
    gathers: CopyJob | None = None
    gathered: PinnedRows | None = None

    def moves(self) -> Moves:
        """Waits for the device to tell."""
        n, words = self.n, self.report.words
        self.report.event.synchronize()
        count, room, leaving = words[:3].tolist()
        victims = words[REPORT_WORDS + n + room : REPORT_WORDS + n + room + leaving]
        dirty = self.flags.view(torch.uint8)[room : room + leaving]
        return Moves(words[REPORT_WORDS : REPORT_WORDS + count], room, victims, dirty)
