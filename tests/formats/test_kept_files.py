"""Files that earlier versions of the library have written open in this one, or are refused by their name and version.

`NAME.tar.xz` holds what `write.py` wrote with the version `NAME`, and the rows that have to come back.
"""

from __future__ import annotations

import functools
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from formats.models import (
    LATER_STEPS,
    ONE_PROCESS,
    RANK_KINDS,
    STEPS,
    collection,
    collection_rows,
    converted,
    converted_rows,
    sharded,
    train_collection,
    train_converted,
    whole,
)

import tieredemb as te

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))
VERSIONS = [path.name.removesuffix(".tar.xz") for path in ARCHIVES]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The files of an archive, unpacked once."""

    def unpack(archive):
        directory = tmp_path_factory.mktemp("unpacked")
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
        return directory

    return functools.cache(unpack)


@pytest.fixture(params=ARCHIVES, ids=VERSIONS)
def kept(request, unpacked, tmp_path):
    """A copy of the files of one version, which the test may change: where it names a model, of that one."""
    name = request.node.callspec.params.get("name")
    others = {*ONE_PROCESS, "ranks"} - {name} if name else set()
    if name in RANK_KINDS:
        others.remove("ranks")
    ignore = shutil.ignore_patterns(*others)
    return shutil.copytree(unpacked(request.param), tmp_path, ignore=ignore, dirs_exist_ok=True)


def expected_of(kept, name):
    """The rows of a model. Skips the test where the version did not have its optimizer."""
    expected = torch.load(kept / "expected.pt")
    if name not in expected:
        pytest.skip(f"that version has written no {name}")
    return expected[name]


def check(rows, expected, *, later=False):
    """The same bits; of a few steps later within rounding, as formulas may be written anew."""
    assert rows.keys() == expected.keys()
    for name, value in expected.items():
        if later:
            torch.testing.assert_close(rows[name], value, rtol=1e-6, atol=1e-7, msg=name)
        else:
            assert torch.equal(rows[name], value), name


def check_collection(model, expected):
    check(collection_rows(model), expected["now"])
    train_collection(model, STEPS, LATER_STEPS)
    check(collection_rows(model), expected["later"], later=True)
    model.close()


@pytest.mark.parametrize("name", [name for name in ONE_PROCESS if name not in ("converted", "unclean")])
def test_kept_row_files_open_with_their_rows(kept, name):
    expected = expected_of(kept, name)
    check_collection(collection(name, te.File(kept / name / "rows")), expected)


@pytest.mark.parametrize("name", [name for name in ONE_PROCESS if name not in ("converted", "unclean")])
def test_kept_row_files_open_again_after_they_were_used(kept, name):
    expected = expected_of(kept, name)
    model = collection(name, te.File(kept / name / "rows"))
    train_collection(model, STEPS, LATER_STEPS)
    model.close()
    model = collection(name, te.File(kept / name / "rows"))
    check(collection_rows(model), expected["later"], later=True)
    model.close()


@pytest.mark.parametrize("name", [name for name in ONE_PROCESS if name != "converted"])
def test_kept_checkpoints_load_with_their_rows(kept, name):
    expected = expected_of(kept, name)
    model = collection(name)
    assert model.load_checkpoint(kept / name / "checkpoint") == {"step": STEPS}
    check_collection(model, expected)


def test_kept_files_that_were_not_closed_open_to_be_recovered(kept):
    expected = torch.load(kept / "expected.pt")["unclean"]
    storage = te.File(kept / "unclean" / "rows")
    with pytest.raises(te.errors.UncleanFileError, match="recover=True"):
        collection("unclean", storage)
    check_collection(collection("unclean", te.File(storage.path, recover=True)), expected)


def test_kept_checkpoints_of_a_converted_model_load(kept):
    expected = torch.load(kept / "expected.pt")["converted"]
    model, optimizer = converted()
    for name in ("user", "word"):
        model[name].load_checkpoint(kept / "converted" / f"checkpoint-{name}")
    check(converted_rows(model, optimizer), expected["now"])
    train_converted(model, optimizer, STEPS, LATER_STEPS)
    check(converted_rows(model, optimizer), expected["later"], later=True)


def test_kept_checkpoints_of_a_whole_model_load(kept):
    if not (kept / "converted" / "checkpoint-model").exists():
        pytest.skip("that version saved no whole models")
    expected = torch.load(kept / "expected.pt")["converted"]
    model, optimizer = converted()
    both = whole(model, seed=1)
    assert te.load_checkpoint(both, kept / "converted" / "checkpoint-model") == {"step": STEPS}
    assert torch.equal(both["top"].weight, whole(model)["top"].weight)
    check(converted_rows(model, optimizer), expected["now"])
    train_converted(model, optimizer, STEPS, LATER_STEPS)
    check(converted_rows(model, optimizer), expected["later"], later=True)


def test_kept_row_files_of_a_converted_model_go_on(kept):
    expected = torch.load(kept / "expected.pt")["converted"]
    model, optimizer = converted(te.File(kept / "converted" / "rows", keep=True))
    check(converted_rows(model, optimizer), expected["now"])
    train_converted(model, optimizer, STEPS, LATER_STEPS)
    check(converted_rows(model, optimizer), expected["later"], later=True)
    for module in model.values():
        module.close()


def rows_of_ranks(rank, size, name, directory, opens):
    """What a rank of two finds in kept files: its rows, as rank 0 has them, now and later."""
    storage = te.File(f"{directory}/{name}/rows") if opens else None
    model = sharded(name, storage)
    if not opens:
        model.load_checkpoint(f"{directory}/{name}/checkpoint")
    now = collection_rows(model)
    train_collection(model, STEPS, LATER_STEPS, seed=rank)
    later = collection_rows(model)
    model.close()
    return now, later


@pytest.mark.parametrize("opens", [True, False], ids=["row files", "checkpoint"])
@pytest.mark.parametrize("name", RANK_KINDS)
def test_kept_files_of_two_ranks_open_with_their_rows(kept, worlds, name, opens):
    expected = torch.load(kept / "ranks" / "expected.pt")[name]
    now, later = worlds(2).run(rows_of_ranks, name, str(kept / "ranks"), opens)[0]
    check(now, expected["now"])
    check(later, expected["later"], later=True)
