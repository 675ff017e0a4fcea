"""Rows of a file, and rows that are given: a script that runs a second time goes on, or is refused; it overwrites
nothing."""

from __future__ import annotations

import forks
import pytest
import torch
from torch import nn

import tieredemb as te
from tieredemb.errors import (
    CheckpointError,
    ConfigError,
    StorageError,
    StorageExistsError,
    StorageFormatError,
    UncleanFileError,
)
from tieredemb.lookup.histories import Histories
from tieredemb.storage.file.rows import FileRows

OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def model_of(seed=0):
    """Two tables of one width, which share a file, and one of another width."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "user": nn.EmbeddingBag(30, 4, mode="sum"),
            "item": nn.EmbeddingBag(20, 4, mode="sum"),
            "word": nn.EmbeddingBag(10, 8, mode="sum"),
        }
    )


def converted(storage, kind="Adam", seed=0, optimizer=None):
    model = model_of(seed)
    optimizer = optimizer or OPTIMIZERS[kind](model.parameters())
    te.replace_embedding_bags(model, capacity=7, optimizer=optimizer, storage=storage)
    return model, optimizer


def train(model, optimizer, first, steps):
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for module in model.values():
            out = module(torch.randint(0, 5 + step, (4, 2), generator=draw))
            out.backward(torch.randn(out.shape, generator=draw))
        optimizer.step()


def rows_of(model):
    return {name: module.state_dict()["weight"] for name, module in model.items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


def close(model):
    for module in model.values():
        module.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "user.rows"


@pytest.fixture
def trained(path):
    """Files of a converted model that was trained and closed, and the rows that they hold."""
    model, optimizer = converted(te.File(path))
    train(model, optimizer, 0, 3)
    rows = rows_of(model)
    close(model)
    return path, rows


def contents(path):
    return {each.name: each.read_bytes() for each in path.parent.iterdir()}


# --- given rows beside those of a file --------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"recover": True}], ids=["plain", "recover"])
def test_second_conversion_over_files_is_refused_and_writes_nothing(trained, flags):
    path, _ = trained
    before = contents(path)
    with pytest.raises(StorageExistsError, match=r"keep=True.*fresh=True") as error:
        converted(te.File(path, **flags), seed=1)
    assert isinstance(error.value, FileExistsError)
    assert contents(path) == before


@pytest.mark.parametrize("kind", [te.TieredEmbeddingBag, te.TieredEmbedding])
@pytest.mark.parametrize("how", ["from_pretrained", "_weight"])
def test_given_rows_over_a_file_are_refused_unless_it_is_kept(tmp_path, kind, how):
    def made(rows, **flags):
        storage = te.File(tmp_path / "rows", **flags)
        if how == "_weight":
            return kind(20, 4, capacity=5, storage=storage, _weight=rows)
        return kind.from_pretrained(rows, capacity=5, storage=storage)

    rows = torch.randn(20, 4)
    made(rows).close()
    with pytest.raises(StorageExistsError, match="keep=True"):
        made(torch.zeros(20, 4))
    kept = made(torch.zeros(20, 4), keep=True)
    assert torch.equal(kept.state_dict()["weight"], rows)
    kept.close()
    fresh = made(torch.zeros(20, 4), fresh=True)
    assert not fresh.state_dict()["weight"].any()
    fresh.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_kept_files_go_on_with_the_bits_of_one_run(path, kind):
    whole, optimizer = converted(None, kind)
    train(whole, optimizer, 0, 6)
    for first in (0, 3):  # a script that runs twice
        model, optimizer = converted(te.File(path, keep=True), kind, seed=first)
        train(model, optimizer, first, 3)
        rows = rows_of(model)
        close(model)
    assert same(rows, rows_of(whole))


def test_kept_files_take_options_from_the_optimizer(trained):
    path, rows = trained
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    converted_model = te.replace_embedding_bags(
        model, capacity=7, optimizer=optimizer, storage=te.File(path, keep=True)
    )
    train(converted_model, optimizer, 3, 2)
    assert same(rows_of(converted_model), rows)
    close(converted_model)


def test_kept_files_agree_with_an_optimizer_that_has_state(trained, tmp_path):
    path, rows = trained
    model = model_of()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, 0, 3)  # as the state of a saved optimizer
    te.replace_embedding_bags(model, capacity=7, optimizer=optimizer, storage=te.File(path, keep=True))
    assert same(rows_of(model), rows)
    close(model)


def test_kept_files_of_other_steps_than_the_optimizers_are_refused(trained):
    path, _ = trained
    before = contents(path)
    model = model_of()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    train(model, optimizer, 0, 2)
    with pytest.raises(ConfigError, match="after 3 steps, and the optimizer has state of 2 steps"):
        te.replace_embedding_bags(model, capacity=7, optimizer=optimizer, storage=te.File(path, keep=True))
    assert isinstance(model["user"], nn.EmbeddingBag)
    again, _ = converted(te.File(path, keep=True))
    close(again)
    assert contents(path).keys() == before.keys()


def test_loading_writes_over_kept_rows(trained):
    path, _ = trained
    model, _ = converted(te.File(path, keep=True))
    given = {name: torch.randn(module.num_embeddings, module.embedding_dim) for name, module in model.items()}
    model.load_state_dict({f"{name}.weight": rows for name, rows in given.items()})
    assert same(rows_of(model), given)
    close(model)


def test_fresh_discards_the_rows_of_a_file(trained):
    path, _ = trained
    model, _ = converted(te.File(path, fresh=True), seed=5)
    plain = model_of(5)
    assert all(torch.equal(rows, plain[name].weight) for name, rows in rows_of(model).items())
    close(model)


@pytest.mark.parametrize("other", ["keep", "recover"])
def test_fresh_and_what_keeps_rows_exclude_each_other(other):
    with pytest.raises(ConfigError, match=f"{other}=True keeps the rows of File and fresh=True discards them"):
        te.File("rows", fresh=True, **{other: True})


# --- kills ------------------------------------------------------------------------------------------------------------


def killed(code):
    """Runs a script that ends without closing anything."""
    run = forks.run(code)
    assert run.returncode == 9, run.stderr


def test_files_of_a_killed_run_are_kept_when_they_are_recovered(tmp_path):
    scratch = tmp_path / "rows"
    scratch.mkdir()
    killed(
        f"""
        import os, torch, tieredemb as te
        bag = te.TieredEmbeddingBag(20, 4, mode="sum", capacity=20, optimizer=te.SGD(lr=1.0),
            storage=te.File({str(scratch / "file")!r}, keep=True), _weight=torch.zeros(20, 4))
        bag(torch.tensor([[3]])).sum().backward()
        bag.flush()
        os._exit(9)
        """
    )

    def again(**flags):
        storage = te.File(scratch / "file", keep=True, **flags)
        return te.TieredEmbeddingBag(20, 4, mode="sum", capacity=20, storage=storage, optimizer=te.SGD(lr=1.0),
            _weight=torch.ones(20, 4))  # fmt: skip

    with pytest.raises(UncleanFileError, match="keep=True, recover=True"):
        again()
    bag = again(recover=True)
    expected = torch.zeros(20, 4)
    expected[3] = -1
    assert torch.equal(bag.state_dict()["weight"], expected)
    bag.close()


def test_a_file_whose_first_rows_were_never_all_written_counts_for_nothing(tmp_path):
    scratch = tmp_path / "rows"
    scratch.mkdir()
    killed(
        f"""
        import os, tieredemb as te
        def init(rows, generator):
            rows.fill_(7)
            if init.calls:
                os._exit(9)
            init.calls += 1
        init.calls = 0
        te.TieredEmbeddingBag(100_000, 2, capacity=10, storage=te.File({str(scratch / "file")!r}), init=init)
        """
    )
    storage = te.File(scratch / "file", keep=True)
    bag = te.TieredEmbeddingBag(100_000, 2, capacity=10, storage=storage, init=lambda rows, generator: rows.fill_(2))
    assert bool((bag.state_dict()["weight"] == 2).all())
    bag.close()


# --- files that do not belong together --------------------------------------------------------------------------------


def files_of(path):
    return sorted(each.name for each in path.parent.iterdir())


@pytest.mark.parametrize(
    ("widths", "names"),
    [
        ({"user": 4, "item": 4}, ["rows"]),
        ({"user": 4}, ["rows.user"]),
        ({"user": 4, "item": 2}, ["rows.item", "rows.user"]),
    ],
)
def test_files_are_named_as_the_guide_says(tmp_path, widths, names):
    """`path` where all tables share one cache, else, and for a table alone, with the name of the first module."""
    model = nn.ModuleDict({name: nn.EmbeddingBag(10, width, mode="sum") for name, width in widths.items()}).eval()
    te.replace_embedding_bags(model, capacity=5, storage=te.File(tmp_path / "rows"))
    assert files_of(tmp_path / "rows") == names
    assert model["user"].row_files()["files"] == sorted(str(tmp_path / name) for name in names)


def test_conversion_has_a_file_for_each_cache(trained):
    path, _ = trained
    assert files_of(path) == ["user.rows.user", "user.rows.word"]


@pytest.mark.parametrize("flags", [{"keep": True}, {"keep": True, "recover": True}], ids=["keep", "recover"])
@pytest.mark.parametrize("gone", ["user.rows.user", "user.rows.word"])
def test_a_set_that_lacks_a_file_is_refused(trained, gone, flags):
    path, _ = trained
    (path.parent / gone).unlink()
    before = contents(path)
    with pytest.raises(StorageFormatError, match=f"{gone}' is missing"):
        converted(te.File(path, **flags))
    assert contents(path) == before


def test_a_set_with_a_file_of_another_day_is_refused(trained, tmp_path):
    path, _ = trained
    older = (path.parent / "user.rows.word").read_bytes()
    model, optimizer = converted(te.File(path, keep=True))
    train(model, optimizer, 3, 1)
    close(model)
    (path.parent / "user.rows.word").write_bytes(older)
    for flags in ({}, {"recover": True}):
        with pytest.raises(StorageFormatError, match=r"generation 3.*generation 2"):
            converted(te.File(path, keep=True, **flags))


def test_a_set_with_a_file_of_another_set_is_refused(trained, tmp_path):
    path, _ = trained
    (tmp_path / "other").mkdir()
    model, optimizer = converted(te.File(tmp_path / "other" / "user.rows"))
    train(model, optimizer, 0, 3)
    close(model)
    (path.parent / "user.rows.word").write_bytes((tmp_path / "other" / "user.rows.word").read_bytes())
    (tmp_path / "other").rename(tmp_path.parent / f"{tmp_path.name}-other")
    with pytest.raises(StorageFormatError, match="different sets"):
        converted(te.File(path, keep=True))


def test_a_renamed_table_does_not_leave_its_rows_behind(trained):
    path, _ = trained
    model = model_of()
    renamed = nn.ModuleDict({"customer": model["user"], "item": model["item"], "word": model["word"]})
    optimizer = OPTIMIZERS["Adam"](renamed.parameters())
    with pytest.raises(StorageFormatError, match=r"user\.rows\.user'.*another model"):
        te.replace_embedding_bags(renamed, capacity=7, optimizer=optimizer, storage=te.File(path, keep=True))
    assert files_of(path) == ["user.rows.user", "user.rows.word"]


def test_a_table_that_is_left_out_does_not_leave_its_rows_behind(trained):
    path, _ = trained
    model = model_of()
    del model["word"]
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with pytest.raises(StorageFormatError, match="discard all of them"):
        te.replace_embedding_bags(model, capacity=7, optimizer=optimizer, storage=te.File(path, keep=True))
    te.replace_embedding_bags(model, capacity=7, optimizer=optimizer, storage=te.File(path, fresh=True))
    close(model)
    assert files_of(path) == ["user.rows"]


def test_a_file_under_the_name_of_another_is_refused(trained):
    path, _ = trained
    user, word = path.parent / "user.rows.user", path.parent / "user.rows.word"
    user.rename(path.parent / "kept")
    word.rename(user)
    (path.parent / "kept").rename(word)
    with pytest.raises(StorageFormatError, match=r"under another name"):
        converted(te.File(path, keep=True))


def test_a_collection_whose_width_has_no_file_any_more_is_refused(tmp_path):
    tables = [te.TableConfig(name=f"t{width}", num_embeddings=20, embedding_dim=width) for width in (4, 8)]

    def made(**flags):
        storage = te.File(tmp_path / "rows", **flags)
        return te.TieredEmbeddingBagCollection(tables, capacity=5, storage=storage, optimizer=te.SGD(lr=0.1))

    model = made()
    model(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
    model.close()
    (tmp_path / "rows.width8").unlink()
    with pytest.raises(StorageFormatError, match=r"rows\.width8' is missing"):
        made()
    made(fresh=True).close()


# --- generations ------------------------------------------------------------------------------------------------------


def test_generation_counts_sessions_and_is_that_of_all_tables(path):
    seen = []
    for first in (0, 3, 6):
        model, optimizer = converted(te.File(path, keep=True))
        found = [module.row_files() for module in model.values()]
        assert found[0] == found[1] == found[2]
        if first != 6:
            train(model, optimizer, first, 3)
        seen.append((found[0]["generation"], model["word"].row_files()["generation"]))
        assert model["user"].row_files()["files"] == [f"{path}.user", f"{path}.word"]
        identity = found[0]["identity"]
        close(model)
    assert seen == [(2, 2), (2, 3), (3, 3)]  # before and after steps; the first session has written the weights
    assert len(identity) == 32


def test_tables_in_memory_have_no_row_files():
    assert te.TieredEmbeddingBag(10, 2).row_files() is None


# --- what fails or is cut off leaves the files as they were -----------------------------------------------------------


def fails_in(monkeypatch, place, name, error, at=1):
    """The call number `at` of a function of the package raises; later ones do not."""
    real, calls = getattr(place, name), []

    def call(*args, **keywords):
        calls.append(1)
        if len(calls) == at:
            raise error
        return real(*args, **keywords)

    monkeypatch.setattr(place, name, call)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")], ids=["Ctrl-C", "EIO"])
def test_an_opening_that_fails_leaves_the_files_as_they_were(trained, monkeypatch, error):
    path, rows = trained
    fails_in(monkeypatch, Histories, "parsed", error, at=2)  # of the second file
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
        converted(te.File(path, keep=True))
    model, _ = converted(te.File(path, keep=True))
    assert same(rows_of(model), rows)
    close(model)


def test_a_damaged_history_that_was_refused_can_be_restored(trained):
    path, rows = trained
    file = path.parent / "user.rows.word"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(StorageFormatError, match="its checksum differs"):
        converted(te.File(path, keep=True))
    damaged = file.read_bytes()
    file.write_bytes(damaged[:-100] + whole[-100:-99] + damaged[-99:])
    model, _ = converted(te.File(path, keep=True))
    assert same(rows_of(model), rows)
    close(model)


def test_a_recovery_that_fails_can_be_tried_again(trained, monkeypatch):
    path, rows = trained
    model, _ = converted(te.File(path, keep=True))
    fails_in(monkeypatch, FileRows, "mark", KeyboardInterrupt(), at=2)
    with pytest.raises(KeyboardInterrupt):
        model["user"](torch.tensor([[1]]))
    left = contents(path)  # as after a kill: one file is marked, the other is not
    close(model)
    for name, data in left.items():
        (path.parent / name).write_bytes(data)
    with pytest.raises(UncleanFileError, match="recover=True"):
        converted(te.File(path, keep=True))
    fails_in(monkeypatch, Histories, "parsed", KeyboardInterrupt(), at=2)
    with pytest.raises(KeyboardInterrupt):
        converted(te.File(path, keep=True, recover=True))
    with pytest.raises(UncleanFileError, match="recover=True"):
        converted(te.File(path, keep=True))
    model, _ = converted(te.File(path, keep=True, recover=True))
    assert same(rows_of(model), rows)
    close(model)


def test_an_interrupt_of_the_first_use_hides_no_session(trained, monkeypatch):
    path, _ = trained
    model, _ = converted(te.File(path, keep=True))
    fails_in(monkeypatch, FileRows, "mark", KeyboardInterrupt(), at=2)
    with pytest.raises(KeyboardInterrupt):
        model["user"](torch.tensor([[1]]))
    model["user"](torch.tensor([[1]]))
    assert model["word"].row_files()["generation"] == 3
    close(model)
    model, _ = converted(te.File(path, keep=True))
    assert model["word"].row_files()["generation"] == 3
    close(model)


def test_a_cache_that_is_closed_before_others_are_used_opens_with_them(trained):
    path, _ = trained
    for expected in (3, 4):
        model, _ = converted(te.File(path, keep=True))
        model["word"].close()
        model["user"](torch.tensor([[1]]))
        assert model["user"].row_files()["generation"] == expected
        model["user"].close()
    model, _ = converted(te.File(path, keep=True))
    close(model)


def test_a_conversion_that_was_killed_before_all_files_were_written_begins_anew(path, monkeypatch):
    fails_in(monkeypatch, FileRows, "filled", KeyboardInterrupt(), at=2)
    with pytest.raises(KeyboardInterrupt):
        converted(te.File(path))
    model, _ = converted(te.File(path, keep=True), seed=1)
    plain = model_of(1)
    assert all(torch.equal(rows, plain[name].weight) for name, rows in rows_of(model).items())
    close(model)


# --- checkpoints of a part of a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "more", "said"),
    [
        ("word", {}, "key spaces width4 (tables 'user', 'item'), this model has width8 (tables 'weight')"),
        ("user", {"more": 4}, "(there width4 (tables 'user', 'item'), here width4 (tables 'user', 'item', 'more'))"),
    ],
)
def test_checkpoint_of_a_part_names_the_tables_of_both(tmp_path, module, more, said):
    saved = te.replace_embedding_bags(model_of().eval(), capacity=5)
    saved["user"].save_checkpoint(tmp_path / "part")
    model = model_of()
    model.update({name: nn.EmbeddingBag(10, width, mode="sum") for name, width in more.items()})
    te.replace_embedding_bags(model.eval(), capacity=5)
    with pytest.raises(CheckpointError) as refused:
        model[module].load_checkpoint(tmp_path / "part")
    assert said in str(refused.value)
