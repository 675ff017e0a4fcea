"""Manifests with a right checksum and a wrong content: refused as `CheckpointError` before anything changes."""

from __future__ import annotations

import copy
import json
import os
import zlib
from dataclasses import replace

import pytest
import torch
from devices import equal
from nasty_json import DEEP, changed, text_of, wrong_values

import tieredemb as te
from tieredemb.errors import CheckpointError, ConfigError, TieredEmbError
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.checkpoint import directory as checkpoint
from tieredemb.storage.checkpoint.manifest import Manifest, read_manifest, write_manifest
from tieredemb.storage.host import HostMemory

TABLES = [
    te.TableConfig(name="a", num_embeddings=9, embedding_dim=2),
    te.TableConfig(name="b", num_embeddings=7, embedding_dim=2),
    te.TableConfig(name="c", num_embeddings=8, embedding_dim=3),
]
OPTIMIZERS = [
    te.SGD(lr=0.1),
    te.Adagrad(lr=0.1),
    te.RowWiseAdagrad(lr=0.1),
    te.SparseAdam(lr=0.1),
    te.SparseLion(lr=0.1),
]


def make(optimizer=OPTIMIZERS[3], **keywords):
    keywords = {"capacity": 6, "optimizer": optimizer, "device": "cpu"} | keywords
    return te.TieredEmbeddingBagCollection(TABLES, **keywords)


def step(model, *ids):
    edges = [0, len(ids), 2 * len(ids), 3 * len(ids)]
    model(torch.tensor(ids * 3), torch.tensor(edges)).sum().backward()


def everything(model):
    """All that a load could change, comparable."""
    kept = [model.stats(), model.engine.optimizer and copy.deepcopy(model.engine.optimizer.options())]
    for group in model.tables.groups:
        cold, hot = group.cache.cold, group.cache.hot
        arrays = (cold.weight, cold.state, hot.weight, hot.state, hot.score, hot.dirty, hot.key)
        kept += [[array.tobytes() for array in arrays], copy.deepcopy(cold.metadata), list(group.steps)]
    return kept


def rows(model):
    return [array.tobytes() for group in model.tables.groups for array in (group.cache.cold.weight,)]


def seal(directory, body_text):
    """Writes a manifest of the body `body_text` whose checksum is right."""
    try:
        canonical = text_of(json.loads(body_text))
    except (RecursionError, ValueError):  # the reader gets no further than to parse it
        canonical = body_text
    head = {"format": "tieredemb checkpoint", "version": 1, "crc32": zlib.crc32(canonical.encode())}
    (directory / "manifest.json").write_text(f'{json.dumps(head)[:-1]},"body":{body_text}}}')


def body_of(directory):
    return json.loads((directory / "manifest.json").read_text())["body"]


@pytest.fixture
def saved(tmp_path):
    """A directory with a checkpoint of a model that was trained."""
    model = make()
    step(model, 1, 2)
    step(model, 2, 6)
    model.save_checkpoint(tmp_path, extra={"epoch": 3})
    return tmp_path


@pytest.fixture
def trained():
    """A model with rows of its own in its cache."""
    model = make()
    for ids in ((3, 4), (5, 6), (0, 1)):
        step(model, *ids)
    return model


def assert_refused(model, directory, match=None):
    before = everything(model)
    with pytest.raises(CheckpointError, match=match):
        model.load_checkpoint(directory)
    assert everything(model) == before


# --- a right checksum over a wrong content ------------------------------------------------------------------------


def is_free(path):
    """Whether a save may have written another value there, so that some values must load."""
    if path[0] == "extra":
        return len(path) > 1
    return len(path) > 3 and path[2] == "metadata"


def assert_goes_on(model, directory):
    """The model holds what a model may hold: it trains, saves, and what it saves loads."""
    for group in model.tables.groups:
        metadata = group.cache.cold.metadata
        assert len(metadata.steps) == len(group.space)
        for number in (metadata.batch, *metadata.steps):
            assert type(number) is int
            assert 0 <= number <= 2**62
    step(model, 1, 5)
    model.save_checkpoint(directory)
    make().load_checkpoint(directory)


def test_manifest_wrong_in_any_place_is_refused_before_anything_changes(saved, trained, tmp_path_factory):
    body, reference = body_of(saved), make()
    reference.load_checkpoint(saved)
    again, before = tmp_path_factory.mktemp("again"), everything(trained)
    loaded, count = set(), 0
    for path, new, wrong in wrong_values(body):
        count += 1
        seal(saved, text_of(wrong))
        try:
            trained.load_checkpoint(saved)
        except CheckpointError:
            assert everything(trained) == before, (path, new)
            continue
        assert is_free(path), (path, new)
        loaded.add(path)
        assert rows(trained) == rows(reference), (path, new)
        assert_goes_on(trained, again)
        trained = make()
        step(trained, 3, 4)
        before = everything(trained)
    assert count > 2000
    width2 = ("spaces", "width2", "metadata")
    assert {(*width2, "batch"), (*width2, "steps", 0), ("extra", "param_group", "lr"), ("extra", "extra")} <= loaded


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (("spaces", "width2", "file"), "../rows-0123456789abcdef-0.bin", "must be the name of a row file"),
        (("spaces", "width2", "file"), "rows-0123456789abcdef-0.bin\n", "must be the name of a row file"),
        (("spaces", "width2", "file"), "rows-0123456789abcdef-٣.bin", "must be the name of a row file"),
        (("spaces", "width2", "metadata", "batch"), -1, r"metadata\.batch is -1 and must be an integer from 0"),
        (("spaces", "width2", "metadata", "batch"), True, r"metadata\.batch is True"),
        (("spaces", "width2", "metadata", "steps"), [1, -1], r"metadata\.steps\[1\] is -1"),
        (("spaces", "width2", "metadata", "steps"), [], r"steps has 0 numbers in the checkpoint and this model 2"),
        (("spaces", "width2", "metadata", "steps"), [1, 2, 3], "steps has 3 numbers"),
        (("spaces", "width2", "metadata", "policy"), "Aged 300", "must be a policy's name"),
        (("spaces", "width2", "layout", "rows"), 2**49, "too many for one key space"),
        (("spaces", "width2", "layout", "dtype"), "float64", "must be one of float32, float16, bfloat16"),
        (("spaces", "width2", "chunks", 0, 0), 8, "an offset of .* is 8 and must be an integer from 0 to 0"),
        (("spaces", "width2", "chunks", 0, 1), 0, "a number of rows of .* is 0"),
        (("spaces", "width2", "chunks", 0, 1), 17, "a number of rows of .* is 17"),
        (("spaces", "width2", "chunks", 0, 2), 2**32, "a checksum of"),
        (("extra", "param_group"), None, "param_group is None and must be an object"),
        (("extra", "param_group", "lr"), float("nan"), "lr must be a finite number of at least 0 that float32 holds"),
        (("extra", "param_group", "betas"), [0.9, "x"], "betas must be a number"),
        (("extra", "param_group", "betas"), [0.9], "betas must be a pair"),
        (("extra", "param_group"), {"lr": 0.1}, "lacks betas, eps; it needs lr, betas, eps"),
        (("broken",), 3, "broken is 3 and must be a string"),
        (("unknown",), 3, "body has 'unknown', which this library does not know"),
    ],
)
def test_refusal_names_what_is_wrong(saved, trained, path, new, message):
    seal(saved, text_of(changed(body_of(saved), path, new)))
    assert_refused(trained, saved, message)


@pytest.mark.parametrize("optimizer", [te.Adam(lr=0.1), te.SGD(lr=0.1), te.Adagrad(lr=0.1)], ids=str)
def test_an_option_that_came_after_the_checkpoint_stays_as_it_is(tmp_path, optimizer):
    model = make(optimizer)
    step(model, 1, 2)
    model.save_checkpoint(tmp_path)
    body = body_of(tmp_path)
    del body["extra"]["param_group"]["weight_decay_on_use"]
    seal(tmp_path, text_of(body))
    loaded = make(replace(optimizer, weight_decay_on_use=0.25))
    loaded.load_checkpoint(tmp_path)
    assert rows(loaded) == rows(model)
    assert loaded.fused_optimizer.param_groups[0]["weight_decay_on_use"] == 0.25


def test_row_file_outside_of_the_directory_is_not_read(saved, trained, tmp_path_factory):
    body, outside = body_of(saved), tmp_path_factory.mktemp("outside")
    name = body["spaces"]["width2"]["file"]
    os.rename(saved / name, outside / name)
    for path in (f"../{outside.name}/{name}", str(outside / name)):
        assert (saved / path).exists()
        seal(saved, text_of(changed(body, ("spaces", "width2", "file"), path)))
        assert_refused(trained, saved, "must be the name of a row file")


def test_two_spaces_of_one_row_file_are_refused(tmp_path):
    layout = {name: RowLayout(rows=5, width=2) for name in ("one", "two")}
    spaces = {name: HostMemory().open(each, name=name, identity={}) for name, each in layout.items()}
    checkpoint.save(tmp_path, spaces)
    body = body_of(tmp_path)
    seal(tmp_path, text_of(changed(body, ("spaces", "one", "file"), body["spaces"]["two"]["file"])))
    with (
        pytest.raises(CheckpointError, match="two key spaces name one row file"),
        checkpoint.opened(tmp_path, spaces),
    ):
        pass


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "files names none and must name one or more"),
        (["rows-0123456789abcdef-0.bin", "../rows-0123456789abcdef-1.bin"], "must be the name of a row file"),
        (["rows-0123456789abcdef-0.bin"] * 2, "or one names it twice"),
        (["rows-0123456789abcdef-0.bin", 3], "must be a string"),
        ("rows-0123456789abcdef-0.bin", "must be an array"),
        (["rows-0123456789abcdef-0.bin", "rows-0123456789abcdef-1.bin"], "is missing from the checkpoint"),
    ],
)
def test_wrong_row_files_of_a_large_space_are_refused(saved, trained, files, message):
    body = body_of(saved)
    del body["spaces"]["width2"]["file"]
    seal(saved, text_of(changed(body, ("spaces", "width2"), body["spaces"]["width2"] | {"files": files})))
    assert_refused(trained, saved, message)


def test_one_row_file_and_several_at_once_are_refused(saved, trained):
    body = body_of(saved)
    space = body["spaces"]["width2"]
    seal(saved, text_of(changed(body, ("spaces", "width2"), space | {"files": [space["file"]]})))
    assert_refused(trained, saved, "has 'file', which this library does not know")


def test_chunk_of_a_size_that_is_never_written_is_refused_unread(tmp_path):
    rows, file = 2**36, "rows-0123456789abcdef-0.bin"
    space = {
        "file": file,
        "identity": {},
        "metadata": {"batch": 0, "steps": [], "policy": ""},
        "layout": {"rows": rows, "width": 0, "state_width": 0, "dtype": "float32", "byteorder": "little"},
        "chunks": [[0, rows, 0]],
    }
    seal(tmp_path, text_of({"spaces": {"": space}, "extra": {}}))
    (tmp_path / file).touch()
    os.truncate(tmp_path / file, 12 * rows)  # of holes
    cold = te.File(tmp_path / "rows.bin").open(RowLayout(rows=rows, width=0), name="", identity={})
    with (
        pytest.raises(CheckpointError, match="has a chunk of 824633720832 bytes"),
        checkpoint.opened(tmp_path, {"": cold}),
    ):
        pass
    cold.seal()
    cold.close()


# --- what is no JSON that a save writes ---------------------------------------------------------------------------


def test_key_that_occurs_twice_is_refused(saved, trained):
    body = body_of(saved)
    text = text_of(body)
    for old, new in (
        ('{"extra"', '{"extra":{},"extra"'),
        ('"epoch":3', '"epoch":3,"epoch":3'),
        ('"batch"', '"batch":7,"batch"'),
    ):
        assert text.count(old) >= 1
        seal(saved, text.replace(old, new, 1))
        assert_refused(trained, saved, "occurs twice in an object")


@pytest.mark.parametrize("depth", [101, 900, 10**4, 10**6])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_manifest_nested_too_deeply_is_refused(saved, trained, depth, kind):
    nested = "[" * depth + "]" * depth if kind == "list" else '{"":' * depth + "0" + "}" * depth
    text = text_of(body_of(saved))
    seal(saved, text.replace('"epoch":3', f'"epoch":{nested}'))
    assert_refused(trained, saved, "nested more than 100 deep")
    (saved / "manifest.json").write_text(nested)
    assert_refused(trained, saved, "nested more than 100 deep")


def test_manifest_of_other_bytes_is_refused(saved, trained):
    path, whole = saved / "manifest.json", (saved / "manifest.json").read_bytes()
    for data in (
        b"",
        b"\0" * 100,
        b"null",
        b'"tieredemb checkpoint"',
        b"\xff\xfe" + whole,
        b"\xef\xbb\xbf" + whole,
        whole.decode().encode("utf-16"),
        whole.replace(b'"epoch":3', b'"epoch":"\xff"'),
        whole.replace(b'"epoch":3', b'"epoch":' + b"9" * 5000),
        whole.replace(b'"epoch":3', b'"epoch":Infinite'),
        whole + whole,
        whole.replace(b'"version":1', b'"version":true'),
        whole.replace(b'"version":1', b'"version":0'),
        whole.replace(b'"version":1', b'"version":1e400'),
        whole.replace(b'"version":1', b'"version":1,"more":1'),
        whole.replace(b'"crc32":', b'"crc32":1e400,"was":'),
    ):
        assert data != whole
        path.write_bytes(data)
        assert_refused(trained, saved, "is damaged|no manifest")
    path.write_bytes(whole)
    trained.load_checkpoint(saved)


@pytest.mark.timeout(60)
def test_manifest_or_row_file_that_is_no_file_is_refused(saved, trained):
    path, rows = saved / "manifest.json", saved / body_of(saved)["spaces"]["width2"]["file"]
    for each, make_other in ((path, os.mkdir), (path, os.mkfifo), (rows, os.mkdir), (rows, os.mkfifo)):
        os.rename(each, saved / "aside")
        make_other(each)
        assert_refused(trained, saved, "is no regular file")
        (os.rmdir if make_other is os.mkdir else os.unlink)(each)
        os.rename(saved / "aside", each)
    trained.load_checkpoint(saved)


# --- what a save writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["", "a write back failed: no space"])
def test_manifest_says_why_a_cache_was_broken_where_it_was(tmp_path, broken):
    write_manifest(str(tmp_path / "manifest.json"), Manifest(spaces={}, extra={}, broken=broken))
    assert read_manifest(str(tmp_path)).broken == broken
    assert ("broken" in body_of(tmp_path)) == bool(broken)


def test_save_writes_nothing_that_a_load_refuses(tmp_path):
    cold = {"": HostMemory().open(RowLayout(rows=5, width=2), name="", identity={})}
    checkpoint.save(tmp_path, cold)
    names = sorted(os.listdir(tmp_path))
    for metadata in (Metadata(batch=-1), Metadata(steps=[-1]), Metadata(policy="No policy")):
        cold[""].metadata = metadata
        with pytest.raises(CheckpointError, match="metadata"):
            checkpoint.save(tmp_path, cold)
    assert sorted(os.listdir(tmp_path)) == names
    with checkpoint.opened(tmp_path, cold) as found:
        found.restore()


@pytest.mark.parametrize("extra", [{"best": float("inf"), "loss": float("nan")}, {}, {"a": [{"b": [1, "é", None]}]}])
def test_extra_of_a_user_comes_back(saved, trained, extra):
    trained.save_checkpoint(saved, extra=extra)
    assert repr(make().load_checkpoint(saved)) == repr(extra)


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("extra", [[1], 3, "x", {"a": nested(100)}, {"a": nested(10**5)}, {"a": 10**5000}], ids=type)
def test_extra_that_no_load_would_take_is_refused_by_the_save(saved, trained, extra):
    with pytest.raises(ConfigError, match="extra"):
        trained.save_checkpoint(saved, extra=extra)
    assert make().load_checkpoint(saved) == {"epoch": 3}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda config: type(config).__name__)
def test_param_group_wrong_in_any_place_is_refused(device, tmp_path, optimizer):
    model, other = make(optimizer, device=device), make(optimizer, device=device)
    step(model, 1, 2)
    step(other, 3)
    model.save_checkpoint(tmp_path)
    body, before = body_of(tmp_path), other.fused_optimizer.state_dict()
    group = body["extra"]["param_group"]
    weights = [weight.clone() for weight in other.state_dict().values()]
    for name in group:
        for new in (None, True, "0.1", float("nan"), float("inf"), -1, 2**200, [], {}, DEEP, [0.9, 1.0], [0.9, None]):
            seal(tmp_path, text_of(changed(body, ("extra", "param_group", name), new)))
            with pytest.raises(CheckpointError):
                other.load_checkpoint(tmp_path)
    after = other.fused_optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(equal(a, b) for a, b in zip(other.state_dict().values(), weights, strict=True))
    for table, entry in before["state"].items():
        assert all(equal(after["state"][table][name], value) for name, value in entry.items())


def test_param_group_of_a_model_without_optimizer_is_none(tmp_path):
    model = make(None)
    model.save_checkpoint(tmp_path)
    make(None).load_checkpoint(tmp_path)
    seal(tmp_path, text_of(changed(body_of(tmp_path), ("extra", "param_group"), {"lr": 0.1})))
    with pytest.raises(CheckpointError, match="this model has no optimizer"):
        model.load_checkpoint(tmp_path)


def test_param_group_that_a_scheduler_added_to_loads_everywhere(tmp_path):
    model, other = make(), make()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(model.fused_optimizer, 0.5, total_steps=10)
    step(model, 1, 2)
    model.fused_optimizer.step()
    scheduler.step()
    model.save_checkpoint(tmp_path)
    assert {"initial_lr", "max_lr"} <= set(body_of(tmp_path)["extra"]["param_group"])
    other.load_checkpoint(tmp_path)
    assert other.fused_optimizer.param_groups[0]["lr"] == model.fused_optimizer.param_groups[0]["lr"]
    assert other.fused_optimizer.param_groups[0]["betas"] == model.fused_optimizer.param_groups[0]["betas"]
    body = body_of(tmp_path)
    for name, wrong, loader in (
        ("max_lr", "much", model),
        ("initial_lr", "much", make()),
        ("initial_lr", float("nan"), model),
        ("initial_lr", -1.0, model),
    ):
        seal(tmp_path, text_of(changed(body, ("extra", "param_group", name), wrong)))
        with pytest.raises(CheckpointError, match=name):
            loader.load_checkpoint(tmp_path)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1.0])
def test_save_refuses_a_learning_rate_that_no_load_would_take(saved, trained, lr):
    trained.fused_optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ConfigError, match="lr must be a finite number"):
        trained.save_checkpoint(saved)
    make().load_checkpoint(saved)


def test_file_of_other_tables_steps_is_refused_and_left_as_it_was(tmp_path):
    model = make(storage=te.File(tmp_path / "rows"))
    step(model, 1, 2)
    model.tables.groups[0].cache.cold.metadata.steps = [1, 1, 1]
    model.close()
    for _ in range(2):  # it is still clean
        with pytest.raises(TieredEmbError, match="counts the steps of 3 tables and this model has 2"):
            make(storage=te.File(tmp_path / "rows"))
