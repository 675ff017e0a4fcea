"""What the system refuses of row files and checkpoints is said with the path, what is needed, and what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import tieredemb as te
from tieredemb.errors import CheckpointError, StorageError

NOBODY = 65534


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """All that is imported late: a user who is not root may not read the libraries of root."""
    path = tmp_path_factory.mktemp("place")
    for storage in (None, te.File(path / "rows")):
        module = bag(storage)
        module(torch.tensor([[1]]))
        module.save_checkpoint(path / "saved")
        module.load_checkpoint(path / "saved")
        module.close()


@pytest.fixture
def place(imported):
    """A directory of a user who is not root, as whom the test runs: root may write everywhere."""
    path = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield path
    finally:
        if is_root:
            os.seteuid(0)
        for directory, *_ in os.walk(path):
            os.chmod(directory, 0o700)
        shutil.rmtree(path)


def bag(storage=None):
    return te.TieredEmbeddingBag(10, 4, storage=storage)


def row_file(path, mode):
    bag(te.File(path)).close()
    path.chmod(mode)


def directory(path, mode):
    path.mkdir()
    path.chmod(mode)


def sizes(path):
    """Of all files below a directory, whose owner may read all others."""
    for each, *_ in os.walk(path):
        os.chmod(each, 0o700)
    return {str(each): each.stat().st_size for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize(
    ("prepare", "name", "said"),
    [
        (lambda path: directory(path, 0o500), "there/rows", "right to create files in '{}/there': change its mode"),
        (lambda path: directory(path, 0o300), "there/rows", "right to read and write '{}/there'"),
        (lambda path: row_file(path, 0o400), "there", "right to read and write '{}/there': change its mode or owner"),
        (lambda path: directory(path, 0o700), "there", "'{}/there' is a directory: give the path of a file"),
        (lambda path: path.touch(), "there/rows", "a file stands where '{}/there/rows' needs a directory"),
        (lambda path: None, "there/rows", "there is no '{}/there': create that directory"),
    ],
    ids=["directory not to write", "directory not to read", "file", "directory", "below a file", "nothing"],
)
def test_row_file_that_cannot_be_opened_says_what_is_needed(place, prepare, name, said):
    prepare(place / "there")
    for flags in ({}, {"fresh": True}):
        with pytest.raises(StorageError) as caught:
            bag(te.File(place / name, **flags))
        assert said.format(place) in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
    assert set(sizes(place)) <= {str(place / "there")}


@pytest.mark.parametrize(
    ("prepare", "name", "said"),
    [
        (lambda path: directory(path, 0o500), "there", "right to create files in '{}/there': change its mode"),
        (lambda path: directory(path, 0o500), "there/new", "right to create files in '{}/there': change its mode"),
        (lambda path: path.touch(), "there", "a file stands where '{}/there' needs a directory"),
        (lambda path: path.touch(), "there/new", "a file stands where '{}/there/new' needs a directory"),
    ],
    ids=["directory", "parent", "file", "below a file"],
)
def test_checkpoint_that_cannot_be_saved_says_what_is_needed(place, prepare, name, said):
    prepare(place / "there")
    with pytest.raises(CheckpointError) as caught:
        bag().save_checkpoint(place / name)
    assert said.format(place) in str(caught.value)
    assert set(sizes(place)) <= {str(place / "there")}


def test_checkpoint_that_cannot_be_read_says_what_is_needed(place):
    module = bag()
    module(torch.tensor([[1]]))
    module.save_checkpoint(place / "saved")
    for path in (place / "saved").iterdir():
        path.chmod(0o200)
        with pytest.raises(CheckpointError) as caught:
            module.load_checkpoint(place / "saved")
        assert f"this user needs the right to read '{path}': change its mode or owner" in str(caught.value)
        path.chmod(0o600)
    (place / "saved").chmod(0o500)  # a load writes nothing
    module.load_checkpoint(place / "saved")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "is read-only: mount it writable, or give a path on another one"),
        (errno.EMFILE, r"raise the limit \(ulimit -n\)"),
        (errno.ENOLCK, r"gives no locks \(flock\)"),
        (errno.EIO, r"Input/output error: '.*rows'$"),  # of which nothing is known: the system's words alone
    ],
)
def test_what_a_filesystem_or_a_limit_refuses_says_what_to_do(tmp_path, monkeypatch, number, said):
    def refuse(*arguments, **keywords):
        raise OSError(number, os.strerror(number), None if number == errno.ENOLCK else str(tmp_path / "rows"))

    with monkeypatch.context() as patch:
        patch.setattr(*((fcntl, "flock") if number == errno.ENOLCK else (os, "open")), refuse)
        with pytest.raises(StorageError, match=said):
            bag(te.File(tmp_path / "rows"))
        with pytest.raises(CheckpointError, match=said):
            bag().save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "rows").exists()
    bag(te.File(tmp_path / "rows")).close()
