"""Where rows are between a GPU and a host that alone reaches cold storage: pinned buffers, and reports about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tieredemb.cache.device.copy_threads import CopyJob, MissReport
from tieredemb.kernels.constants import REPORT_NUMBER, REPORT_WORDS
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import Recording
from tieredemb.kernels.streams import current_stream
from tieredemb.storage.base import RowLayout


class RowBuffers(NamedTuple):
    """Buffers for `rows` rows that kernels write: addresses of weights, states and flags."""

    rows: int
    weight: int
    state: int
    dirty: int


class PinnedRows:
    """Pinned memory for `rows` rows in the layout of cold storage, and a flag for each: whether it is to be written
    whole. Kernels write and read it. The keys of the rows are for the host alone. `copied`: the event after the
    device's last read there."""

    def __init__(self, layout: RowLayout, rows: int = 0) -> None:
        self.rows = rows
        self.copied = torch.cuda.Event()
        with no_inference():  # they are changed in place when that is over
            self.weight = torch.empty((rows, layout.columns), dtype=layout.device_dtype, device="cpu", pin_memory=True)
            self.state = torch.empty((rows, layout.state_width + 1), dtype=torch.int32, device="cpu", pin_memory=True)
            self.dirty = torch.empty(rows, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._keys = torch.empty(rows, dtype=torch.int64, device="cpu")
        self.buffers = RowBuffers(rows, self.weight.data_ptr(), self.state.data_ptr(), self.dirty.data_ptr())

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights, states and flags of the rows start … stop − 1."""
        return self.weight[start:stop], self.state[start:stop], self.dirty[start:stop]

    def keep(self, keys: torch.Tensor) -> torch.Tensor:
        """A copy of `keys`, int64 of as many rows at most, which lasts until the next one."""
        kept = self._keys[: len(keys)]
        np.copyto(kept.numpy(), keys.numpy())  # and not torch, which would wake its own threads for it
        return kept

    def size_bytes(self) -> int:
        return self.weight.nbytes + self.state.nbytes + self.dirty.nbytes + self._keys.nbytes


class Misses(NamedTuple):
    """What a plan misses, as the device has reported it. `keys`: int64 (M,), the missed keys; the first `into_unused`
    get slots never used · `leaving`: int64 (V,), the victims' keys, whose slots the next keys get · `dirty`: uint8
    (V,), whether the victims' rows are to be written. The remaining keys get no slots."""

    keys: torch.Tensor
    into_unused: int
    leaving: torch.Tensor
    dirty: torch.Tensor

    @property
    def with_slots(self) -> int:
        return self.into_unused + self.leaving.shape[0]


class MissReports:
    """The reports of plans, one at a time, which `missed_report` writes to words in pinned memory."""

    def __init__(self) -> None:
        self._number = 0
        self._reserve(0)

    def expect(self, n: int) -> tuple[MissReport, torch.Tensor]:
        """The next report, of a plan of n ids, and the words for its flags (`HostPhase`); the report before is lost."""
        words, flags = REPORT_WORDS + 2 * n, -(-n // 8)
        if self._words.shape[0] < words + flags:
            self._reserve(2 * (words + flags))
        self._number += 1
        reported = torch.cuda.Event()
        return MissReport(self._words, self._number, reported), self._words[words : words + flags]

    def _reserve(self, words: int) -> None:
        current_stream().synchronize()  # a plan that was interrupted may report yet
        with no_inference():
            self._words = torch.empty(REPORT_WORDS + words, dtype=torch.int64, device="cpu", pin_memory=True)
        self._words[REPORT_NUMBER] = 0  # and no number that is expected

    def size_bytes(self) -> int:
        return self._words.nbytes


class HostPhase:
    """What the host does of a plan of `n` ids between `start` and `move`. `reports`: where the device reports misses ·
    `report`: of this plan · `flags`: int64 words of its memory, uint8 (n,): whether the rows that leave are dirty ·
    `gather`: the job that gathers the missed rows, if that has begun, and `gathered`: where they are.

    Of a recorded plan `reports` are its own. `words`: on the device, stand for the number of the report and the
    addresses of the buffers for rows that leave, which differ from replay to replay · `graph`: of what `move` launches,
    and of what is done beside."""

    def __init__(self, n: int, reports: MissReports, words: Sequence[torch.Tensor] = ()) -> None:
        self.n = n
        self.reports = reports
        self.words = words
        self.graph: Recording | None = None
        self.gather: CopyJob | None = None
        self.gathered: PinnedRows | None = None
        self.expect()

    def expect(self) -> None:
        """The plan is about to be launched, or replayed."""
        self.report, self.flags = self.reports.expect(self.n)

    def read(self) -> Misses:
        """The misses. Waits until the device has reported them."""
        n, words = self.n, self.report.words
        self.report.wait()
        count, into_unused, leaving = words[:3].tolist()
        victims = words[REPORT_WORDS + n + into_unused : REPORT_WORDS + n + into_unused + leaving]
        dirty = self.flags.view(torch.uint8)[into_unused : into_unused + leaving]
        return Misses(words[REPORT_WORDS : REPORT_WORDS + count], into_unused, victims, dirty)
