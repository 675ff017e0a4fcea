"""Every system call of the file tier and of checkpoints fails, once and for good: the rule of `disturbed` holds."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

import pytest
import torch
from disturbed import Pair, contents, make, same, train
from faults import Faults

import tieredemb as te
from tieredemb.errors import StorageError, TieredEmbError

KINDS = {
    "ENOSPC once": (errno.ENOSPC, False),
    "ENOSPC for good": (errno.ENOSPC, True),
    "EIO once": (errno.EIO, False),
    "EIO for good": (errno.EIO, True),
    "interrupt": (None, False),
}


class Disk:
    """A module whose row files and checkpoints are on one disk, which fails; another one is sound."""

    def __init__(self, tmp_path: Any) -> None:
        self.path, self.sound = tmp_path / "disk", tmp_path / "sound"
        self.path.mkdir()
        self.sound.mkdir()
        self.pair = Pair(self.open, self.sound)
        for number in range(3):
            self.pair.run(lambda module, number=number: train(module, number), Faults(self.path))

    def open(self) -> Any:
        return make(te.File(str(self.path / "rows")))

    def fail(self, act: Any, faults: Faults) -> bool:
        """Runs `act` with faults, and again once the disk works; does what the errors ask for in between. Returns
        whether it failed."""
        pair, before = self.pair, contents(self.pair.twin)
        act(pair.twin)
        after, error = contents(pair.twin), None
        with faults.on():
            try:
                act(pair.module)
            except (TieredEmbError, KeyboardInterrupt) as caught:
                error = caught.with_traceback(None)
            if error is not None and faults.for_good:
                with pytest.raises((TieredEmbError, KeyboardInterrupt)):
                    act(pair.module)
        if error is None:
            assert same(contents(pair.module), after)
            return False
        if pair._is_broken():
            pair._mend()
        else:
            found = contents(pair.module)
            assert same(found, before) or same(found, after)
        if "save_checkpoint(directory)" in str(error):  # the disk may have lost rows
            with pytest.raises(StorageError, match="may be lost there"):
                pair.module.flush()
            pair.module.save_checkpoint(str(self.sound / "kept"))
        if not same(contents(pair.module), after):
            act(pair.module)
        pair.module.flush()
        assert same(contents(pair.module), after)
        return True


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    yield disk
    disk.pair.module.close()


def load_state(module: Any, number: int) -> None:
    module.load_state_dict({name: torch.full_like(value, number % 7) for name, value in module.state_dict().items()})


def campaign(disk: Disk, kind: str, act: Any) -> None:
    code, for_good = KINDS[kind]
    counting = Faults(disk.path)
    disk.fail(lambda module: act(module, 0), counting)
    assert counting.count > 1
    for at in range(counting.count):
        faults = Faults(disk.path, at, code, for_good=for_good)
        assert disk.fail(lambda module, at=at: act(module, 1 + at), faults), f"{faults.called[at]} failed in silence"


@pytest.mark.parametrize("kind", KINDS)
def test_training_over_a_failing_disk_loses_nothing(disk, kind):
    def act(module, number):
        if module is disk.pair.module:
            for group in module.tables.groups:  # so that space is taken again
                group.cache.cold._weight_pages.clear()
                group.cache.cold._state_pages.clear()
        train(module, number, samples=8)

    campaign(disk, kind, act)


@pytest.mark.parametrize("kind", KINDS)
def test_flush_to_a_failing_disk_loses_nothing(disk, kind):
    campaign(disk, kind, lambda module, number: module.flush())


@pytest.mark.parametrize("kind", KINDS)
def test_save_to_a_failing_disk_leaves_a_whole_checkpoint(disk, kind):
    directory, loaded = str(disk.path / "checkpoint"), make(capacity=1.0)

    def act(module, number):
        if module is disk.pair.module:
            module.save_checkpoint(directory)

    act(disk.pair.module, 0)
    saved, counting = contents(disk.pair.twin), Faults(disk.path)
    with counting.on():
        act(disk.pair.module, 0)
    code, for_good = KINDS[kind]
    for at in range(counting.count):
        disk.pair.run(lambda module, at=at: train(module, at), Faults(disk.path))
        now = contents(disk.pair.twin)
        faults, error = Faults(disk.path, at, code, for_good=for_good), None
        with faults.on():
            try:
                act(disk.pair.module, 0)
            except (TieredEmbError, KeyboardInterrupt) as caught:
                error = caught.with_traceback(None)
        loaded.load_checkpoint(directory)
        found = contents(loaded)
        assert same(found, now) or (error is not None and same(found, saved))
        assert same(contents(disk.pair.module), now)
        saved = found
    act(disk.pair.module, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_load_from_and_to_a_failing_disk_is_all_or_known(disk, kind):
    directory = str(disk.path / "checkpoint")
    disk.pair.twin.save_checkpoint(directory)

    def act(module, number):
        module.load_checkpoint(directory)

    code, for_good = KINDS[kind]
    counting = Faults(disk.path)
    with counting.on():
        act(disk.pair.module, 0)
    disk.pair.twin.load_checkpoint(directory)
    for at in range(counting.count):
        disk.pair.run(lambda module, at=at: train(module, at), Faults(disk.path))
        disk.fail(lambda module: act(module, 0), Faults(disk.path, at, code, for_good=for_good))


@pytest.mark.parametrize("kind", KINDS)
def test_load_state_dict_to_a_failing_disk_is_all_or_known(disk, kind):
    campaign(disk, kind, load_state)


@pytest.mark.parametrize("kind", KINDS)
def test_open_that_fails_leaves_a_clean_file_clean(tmp_path, kind):
    """A new file, and one that is there."""
    code, for_good = KINDS[kind]
    disk = tmp_path / "disk"
    for name in ("new", "old"):
        disk.mkdir(exist_ok=True)

        def build() -> Any:
            return make(te.File(str(disk / "rows")))

        counting = Faults(disk)
        with counting.on():
            module = build()
        if name == "old":
            train(module, 1)
        before = contents(module)
        module.close()
        for at in range(counting.count):
            if name == "new":
                for path in disk.iterdir():
                    path.unlink()
            opened = None
            with Faults(disk, at, code, for_good=for_good).on(), contextlib.suppress(TieredEmbError, KeyboardInterrupt):
                opened = build()
            if opened is not None:  # nobody minds whether a descriptor's end succeeds
                opened.close()
            module = build()
            assert same(contents(module), before)
            module.close()


@pytest.mark.parametrize("kind", KINDS)
def test_close_over_a_failing_disk_loses_nothing(disk, kind):
    code, for_good = KINDS[kind]
    counting = Faults(disk.path)
    with counting.on():
        disk.pair.module.close()
    for at in range(counting.count):
        disk.pair.module = disk.open()
        disk.pair.run(lambda module, at=at: train(module, at), Faults(disk.path))
        module, error = disk.pair.module, None
        with Faults(disk.path, at, code, for_good=for_good).on():
            try:
                module.close()
            except (TieredEmbError, KeyboardInterrupt) as caught:
                error = caught.with_traceback(None)
        if "save_checkpoint(directory)" in str(error):
            with pytest.raises(StorageError, match="may be lost there"):
                module.close()
            module.save_checkpoint(str(disk.sound / "kept"))
        module.close()
        again = disk.open()
        assert same(contents(again), contents(disk.pair.twin))
        again.close()
    disk.pair.module = disk.open()
