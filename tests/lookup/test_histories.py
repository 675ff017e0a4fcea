"""Histories that are damaged or crafted are refused by their reason, before memory is allocated for what they claim."""

from __future__ import annotations

import copy
import io
import random
import struct
import zipfile
from dataclasses import asdict

import numpy as np
import pytest

import tieredemb as te
from tieredemb.lookup.histories import Histories, StoredBytes
from tieredemb.lookup.history import DenseStep
from tieredemb.lookup.optimizer import hyperparameters, new_histories

ADAM = te.AdamW(lr=0.1, weight_decay=0.1)
HEAD = struct.Struct("<8sIIqqqq16x")


def history_of(steps, count=1):
    histories = new_histories(ADAM, count)
    for each in histories.of:
        for step in range(1, steps + 1):
            hyper = hyperparameters(ADAM, asdict(ADAM), np.array([step]), 1.0)
            each.append(step, hyper.rate[0], hyper.missed, hyper.terms)
    return histories


def archive_of(histories):
    """As 0.1.0 wrote them."""

    def one(each):
        taken, data = each.steps - each.base + 1, io.BytesIO()
        parts = {name: array[:taken] for name, array in each.arrays().items()}
        counted = np.array([each.base, each.steps, *each.first], np.int64)
        np.savez(data, **parts, windows=each.windows, counted=counted)
        return data.getvalue()

    if len(histories.of) == 1:
        return one(histories.of[0])
    data = io.BytesIO()
    np.savez(data, **{str(i): np.frombuffer(one(each), np.uint8) for i, each in enumerate(histories.of)})
    return data.getvalue()


class Claimed:
    """A file that starts as `data` does, and is claimed to go on with zeros."""

    def __init__(self, data, size_bytes):
        self.data, self.size_bytes, self.bytes_read = data, size_bytes, 0

    def read(self, start, count):
        count = min(count, self.size_bytes - start)
        self.bytes_read += count
        assert self.bytes_read < 1 << 24, "it is read before it is known to be right"
        return self.data[start : start + count].ljust(count, b"\0")

    def verify(self):
        raise ValueError("its checksum differs")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 5, 1500])
@pytest.mark.parametrize("written", [Histories.to_bytes, archive_of], ids=["fields", "archive"])
def test_history_is_read_as_it_was_written(written, steps, count):
    histories = history_of(steps, count)
    found = new_histories(ADAM, count).parsed(StoredBytes(written(histories)), [steps] * count)
    for one, other in zip(found.of, histories.of, strict=True):
        assert (one.base, one.steps, one.first) == (other.base, other.steps, other.first)
        for name, array in other.arrays().items():
            assert np.array_equal(one.arrays()[name][: steps + 1], array[: steps + 1], equal_nan=True), name
        assert np.array_equal(one.windows, other.windows, equal_nan=True)


def test_history_of_other_steps_than_its_tables_is_refused():
    stored = StoredBytes(history_of(5).to_bytes())
    with pytest.raises(ValueError, match="it has taken 5 steps, and its tables 7, 7"):
        new_histories(ADAM, 1).parsed(stored, [7, 7])


def test_history_of_another_number_of_tables_is_refused():
    for one, other in ((1, 2), (2, 1)):
        with pytest.raises(ValueError, match=r"bytes|ends within"):
            new_histories(ADAM, one).parsed(StoredBytes(history_of(5, other).to_bytes()))
        with pytest.raises(ValueError, match="no archive of a history"):
            new_histories(ADAM, one).parsed(StoredBytes(archive_of(history_of(5, other))))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        (0, b"TESTEPT\0", "no history of steps does"),
        (1, 2, "has version 2.*upgrade tieredemb"),
        (2, 99, "keeps 99 numbers a step"),
        (3, -1, "steps -1 … 5"),
        (3, 6, "steps 6 … 5"),
        (4, 2**32, "have to lie in 0"),
        (5, 7, "steps that were not taken"),
        (6, -1, "steps that were not taken"),
    ],
)
def test_head_that_no_history_has_is_refused(field, value, match):
    data = history_of(5).to_bytes()
    fields = list(HEAD.unpack_from(data))
    fields[field] = value
    with pytest.raises(ValueError, match=match):
        new_histories(ADAM, 1).parsed(StoredBytes(HEAD.pack(*fields) + data[HEAD.size :]))


def test_head_of_the_last_step_that_rows_can_note_is_refused_for_its_bytes_alone():
    data = history_of(5).to_bytes()
    fields = list(HEAD.unpack_from(data))
    fields[4] = 2**32 - 1
    with pytest.raises(ValueError, match=r"has \d+ bytes, and histories of such steps"):
        new_histories(ADAM, 1).parsed(StoredBytes(HEAD.pack(*fields) + data[HEAD.size :]))


@pytest.mark.parametrize("size", ["as it says", "larger"])
def test_history_of_holes_is_refused_before_it_is_read(size):
    """A sparse file that claims 80 million steps has 8 GiB, and none of them on the disk."""
    data = history_of(5).to_bytes()
    fields = list(HEAD.unpack_from(data))
    fields[4] = 80_000_000
    a_step = len(history_of(6).to_bytes()) - len(data)
    claimed = Claimed(HEAD.pack(*fields), len(data) + (80_000_000 - 5) * a_step + (size == "larger"))
    with pytest.raises(ValueError, match=r"checksum differs|has .* bytes"):
        new_histories(ADAM, 1).parsed(claimed, [80_000_000])


def test_archive_that_is_larger_than_its_steps_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="too many for 5 steps"):
        new_histories(ADAM, 1).parsed(Claimed(archive_of(history_of(5)), 1 << 33), [5])


def test_archive_that_unpacks_to_more_than_it_has_is_refused():
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*history_of(0).of[0].arrays(), "windows", "counted"):
            archive.writestr(f"{name}.npy", bytes(1 << 20))
    with pytest.raises(ValueError, match="compressed"):
        new_histories(ADAM, 1).parsed(StoredBytes(bomb.getvalue()))


@pytest.mark.parametrize("written", [Histories.to_bytes, archive_of], ids=["fields", "archive"])
def test_damaged_history_is_refused_or_read_and_nothing_else(written):
    whole, draw = written(history_of(3)), random.Random(0)
    starts, refused = [0, 4, 40, len(whole) - 30, len(whole) - 200], 0
    for trial in range(400):
        data = bytearray(whole)
        at = min(len(whole) - 1, starts[trial % len(starts)] + draw.randrange(64))
        if trial % 3 == 0:
            del data[at:]
        elif trial % 3 == 1:
            data[at] ^= 1 << draw.randrange(8)
        else:
            data[at : at + 8] = draw.randbytes(8)
        try:
            new_histories(ADAM, 1).parsed(StoredBytes(bytes(data)), [3])
        except ValueError:
            refused += 1
    assert refused > 100


# --- tables that have taken the same steps ----------------------------------------------------------------------------


def numbers(step, lr=0.1):
    hyper = hyperparameters(ADAM, {**asdict(ADAM), "lr": lr}, np.array([step]), 1.0)
    return step, hyper.rate[0], hyper.missed, hyper.terms


def taken(history):
    count = history.steps - history.base + 1
    return [
        history.steps,
        history.base,
        history.first,
        *(array[:count].tolist() for array in history.arrays().values()),
    ]


def alone(*rates):
    (history,) = new_histories(ADAM, 1).of
    for step, lr in enumerate(rates, start=1):
        history.append(*numbers(step, lr))
    return history


def test_tables_that_take_the_same_steps_share_what_is_kept_of_them():
    histories = new_histories(ADAM, 3)
    for step in range(1, 1500):  # more than there is room for at first
        histories.append(range(3), DenseStep(*numbers(step)))
    assert histories.shared_by([0, 1, 2]) is histories.of[0]
    assert histories.size_bytes() == histories.of[0].size_bytes()
    expected = taken(alone(*[0.1] * 1499))
    assert all(taken(each) == expected for each in histories.of)


def test_a_table_that_takes_a_step_of_its_own_leaves_the_others_theirs():
    histories = new_histories(ADAM, 3)
    histories.append(range(3), DenseStep(*numbers(1)))
    histories.append([0, 2], DenseStep(*numbers(2)))
    histories.append([2], DenseStep(*numbers(3, 0.2)))
    assert histories.shared_by([0, 2]) is histories.shared_by([0, 1]) is None
    expected = [alone(0.1, 0.1), alone(0.1), alone(0.1, 0.1, 0.2)]
    assert [taken(each) for each in histories.of] == [taken(each) for each in expected]
    histories.append([1], DenseStep(*numbers(2)))
    histories.append([0, 1], DenseStep(*numbers(3, 0.2)))
    assert [taken(each) for each in histories.of] == [taken(alone(0.1, 0.1, 0.2))] * 3
    assert histories.shared_by([0, 1, 2]) is None
    histories.share()  # as once they were read from a file
    assert histories.shared_by([0, 1, 2]) is histories.of[0]


def test_a_step_that_is_told_again_is_taken_once():
    histories = new_histories(ADAM, 2)
    for step in (1, 2):
        histories.append(range(2), DenseStep(*numbers(step)))
        histories.append(range(2), DenseStep(*numbers(step)))
    assert [taken(each) for each in histories.of] == [taken(alone(0.1, 0.1))] * 2


@pytest.mark.parametrize("change", ["restart", "take", "append", "copy"])
def test_a_history_that_becomes_another_one_leaves_those_that_shared_it(change):
    histories = new_histories(ADAM, 2)
    for step in (1, 2):
        histories.append(range(2), DenseStep(*numbers(step)))
    first, second = histories.of
    if change == "restart":
        first.restart(2)
    elif change == "take":
        first.take(alone(0.3, 0.3, 0.3))
    elif change == "append":
        first.append(*numbers(3))
    else:
        first = copy.deepcopy(first)
        first.append(*numbers(3))
    assert taken(second) == taken(alone(0.1, 0.1))
    second.append(*numbers(3, 0.2))
    assert taken(second) == taken(alone(0.1, 0.1, 0.2))


def test_histories_that_were_saved_are_shared_when_they_are_read():
    histories = new_histories(ADAM, 3)
    for step in (1, 2):
        histories.append([0, 1], DenseStep(*numbers(step)))
    read = new_histories(ADAM, 3)
    read.take(read.parsed(StoredBytes(histories.to_bytes()), [2, 2, 0]))
    assert [taken(each) for each in read.of] == [taken(each) for each in histories.of]
    assert read.shared_by([0, 1]) is not None
    assert read.shared_by([1, 2]) is None
