"""Row files under odd names, and beside files of others: nothing else is opened, written or waited for."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
import torch
from formats.models import collection

import tieredemb as te
from tieredemb.errors import StorageError, StorageFormatError, StorageLockedError

ARCHIVE = Path(__file__).parents[1] / "formats" / "0.1.0.tar.xz"


def bag_over(path, **flags):
    storage = te.File(path, **flags)
    return te.TieredEmbeddingBag(60, 4, mode="sum", capacity=7, optimizer=te.Adam(lr=0.1), storage=storage)


def train(bag, steps=3):
    for step in range(steps):
        bag(torch.tensor([[step, 3 * step + 1]])).sum().backward()


def close_and_read(bag):
    rows = bag.state_dict()["weight"]
    bag.close()
    return rows


@pytest.mark.parametrize("name", ["rows.history", "rows.history.pending"])
def test_files_beside_a_row_file_stay_as_they_are(tmp_path, name):
    (tmp_path / name).write_text("a log of mine")
    bag = bag_over(tmp_path / "rows")
    train(bag)
    bag.close()
    assert (tmp_path / name).read_text() == "a log of mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows", name]


def test_a_row_file_may_be_called_as_the_history_of_another_was(tmp_path):
    other = bag_over(tmp_path / "rows.history")
    train(other)
    expected = close_and_read(other)
    bag = bag_over(tmp_path / "rows")
    train(bag, 2)
    bag.close()
    assert torch.equal(close_and_read(bag_over(tmp_path / "rows.history")), expected)


@pytest.mark.parametrize("target", ["there", "missing"])
def test_a_link_to_a_row_file_is_that_file(tmp_path, target):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "rows")
    if target == "there":
        bag_over(tmp_path / "disk" / "rows").close()
    bag = bag_over(tmp_path / "link")
    train(bag)
    with pytest.raises(StorageLockedError):
        bag_over(tmp_path / "disk" / "rows")
    expected = close_and_read(bag)
    assert torch.equal(close_and_read(bag_over(tmp_path / "disk" / "rows")), expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize("name", ["a" * 255, "new\nline", "-dash", "%s%d", "\udcff", "ünï-表", "sp ace"])
def test_names_that_a_directory_takes_are_taken(tmp_path, name):
    bag = bag_over(tmp_path / name)
    train(bag)
    expected = close_and_read(bag)
    assert torch.equal(close_and_read(bag_over(tmp_path / name)), expected)


def test_a_name_that_is_too_long_is_refused_at_once(tmp_path):
    with pytest.raises(StorageError, match="too long"):
        bag_over(tmp_path / ("a" * 256))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    os.mkfifo(tmp_path / "rows") if kind == "pipe" else (tmp_path / "rows").mkdir()
    with pytest.raises(StorageError):
        bag_over(tmp_path / "rows")


@pytest.mark.parametrize("kind", ["pipe", "link", "another history", "missing"])
def test_a_history_of_an_earlier_version_is_read_where_it_is_that(tmp_path, kind):
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(tmp_path, filter="data")
    rows, history = tmp_path / "Adam" / "rows", tmp_path / "Adam" / "rows.width4.history"
    before = (tmp_path / "Adam" / "rows.width4").read_bytes()
    (tmp_path / "kept").write_bytes(history.read_bytes())
    history.unlink()
    if kind == "pipe":
        os.mkfifo(history)
    elif kind == "link":
        history.symlink_to(tmp_path / "kept")
    elif kind == "another history":
        history.write_bytes(b"PK\x03\x04" + (tmp_path / "kept").read_bytes()[4:-1] + b"x")
    with pytest.raises(StorageFormatError, match=r"rows\.width4\.history' is (not the history|missing)"):
        collection("Adam", te.File(rows))
    assert (tmp_path / "Adam" / "rows.width4").read_bytes() == before
    history.unlink(missing_ok=True)
    history.write_bytes((tmp_path / "kept").read_bytes())
    collection("Adam", te.File(rows)).close()
    assert not history.exists()  # it lies in the row file now


def test_a_history_that_was_taken_in_half_way_is_taken_in_again(tmp_path):
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(tmp_path, filter="data")
    rows = tmp_path / "Adam" / "rows.width4"
    with rows.open("ab") as file:  # the new header was not written any more
        file.write((tmp_path / "Adam" / "rows.width4.history").read_bytes()[:1000])
    expected = torch.load(tmp_path / "expected.pt")["Adam"]["now"]
    model = collection("Adam", te.File(tmp_path / "Adam" / "rows"))
    assert torch.equal(model.state_dict()["tables.t0.weight"], expected["tables.t0.weight"])
    model.close()


def test_a_file_whose_flush_was_cut_off_opens_to_be_recovered(tmp_path):
    bag = bag_over(tmp_path / "rows")
    sizes = []
    for _ in range(4):  # the history is written behind the last one and in front of it in turn
        train(bag, 1)
        bag.flush()
        sizes.append((tmp_path / "rows").stat().st_size)
    assert max(sizes) < min(sizes) + 2 * (1 << 20)
    expected = bag.state_dict()["weight"]
    whole = (tmp_path / "rows").read_bytes()
    bag.close()
    (tmp_path / "larger").write_bytes(whole + bytes(5000))
    with pytest.raises(te.errors.UncleanFileError):
        bag_over(tmp_path / "larger")
    assert torch.equal(close_and_read(bag_over(tmp_path / "larger", recover=True)), expected)
    for size in (min(sizes) - 1, len(whole) - (1 << 20)):
        (tmp_path / "cut").write_bytes(whole[: max(0, size)])
        with pytest.raises(StorageError):
            close_and_read(bag_over(tmp_path / "cut", recover=True))
