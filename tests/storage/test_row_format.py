"""The format of a row: sizes, what kernels are told of it, outputs of another dtype, and encodings from outside."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import assert_same_bits
from scaled_rows import SCALED
from training import OPTIMIZERS, bits, random_batch, table_configs, train

import tieredemb as te
from tieredemb.errors import ConfigError, UnsupportedError
from tieredemb.kernels import row_format
from tieredemb.kernels.row_format import Encoding, RowFormat, encoding_of, encodings, register
from tieredemb.modules.base import TieredModule
from tieredemb.step.engine import Engine
from tieredemb.storage.base import RowLayout
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.table_set import TableSet

FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
PACKAGE = Path(te.__file__).parent


@pytest.fixture(autouse=True)
def _encodings_of_tests_end_with_them(monkeypatch):
    """Kernels are compiled anew where there is another encoding."""
    monkeypatch.setattr(row_format, "_ENCODINGS", encodings())


@pytest.mark.parametrize(
    ("dtype", "width", "vector", "lanes"),
    [
        (FLOAT, 128, 4, 32),
        (FLOAT, 6, 2, 4),
        (FLOAT, 1, 1, 1),
        (FLOAT, 300, 4, 32),
        (HALF, 64, 8, 8),
        (BFLOAT16, 100, 4, 32),
    ],
)
def test_format_knows_how_a_gpu_reads_a_row(dtype, width, vector, lanes):
    row = RowFormat(width=width, dtype=dtype, state_width=3)
    assert (row.vector, row.lanes) == (vector, lanes)
    flag = {FLOAT: "-DROW_FLOAT", HALF: "-DROW_HALF", BFLOAT16: "-DROW_BFLOAT16"}[dtype]
    assert row.flags == (flag, f"-DWIDTH={width}", "-DSTATE=3")


def test_format_knows_what_a_row_takes():
    row = RowFormat(width=6, dtype=HALF, state_width=2)
    assert (row.columns, row.hot_bytes, row.row_bytes) == (6, 12 + 8, 12 + 8 + 4)
    scaled = RowFormat(width=6, dtype=SCALED, state_width=2)
    assert (scaled.columns, scaled.hot_bytes, scaled.row_bytes) == (7, 28 + 8, 28 + 8 + 4)


def test_a_layout_is_a_number_of_rows_of_a_format():
    layout = RowLayout(rows=10, width=6, dtype=SCALED, state_width=2)
    assert layout.format == RowFormat(width=6, dtype=SCALED, state_width=2)
    assert (layout.weight_bytes, layout.state_bytes) == (10 * 28, 10 * 12)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.format.width = 7


@pytest.mark.parametrize("sizes", [{"width": -1}, {"width": 1, "state_width": -1}, {"width": 1, "dtype": torch.int8}])
def test_format_that_is_none_is_refused(sizes):
    with pytest.raises(ConfigError):
        RowFormat(**sizes)


def test_a_dtype_and_its_encoding_are_one_format():
    assert RowFormat(width=3, dtype=encoding_of(HALF)) == RowFormat(width=3, dtype=HALF)


def test_encodings_share_neither_name_nor_carrier():
    assert register(SCALED) is register(dataclasses.replace(SCALED))
    assert encodings()["scaled"] == SCALED
    for changed in ({"name": "other"}, {"carrier": np.dtype(np.int64)}, {"name": "float32", "carrier": np.dtype("u8")}):
        with pytest.raises(ConfigError, match="share a name or a carrier"):
            register(dataclasses.replace(SCALED, **changed))


def test_rows_without_cuda_kernels_are_refused_on_a_gpu():
    for ask in (lambda row: row.flags, lambda row: row.device_dtype, lambda row: row.vector):
        with pytest.raises(UnsupportedError, match="rows of scaled have no CUDA kernels; use device='cpu'"):
            ask(RowFormat(width=4, dtype=SCALED))


def test_rows_of_an_encoding_from_outside_train_like_plain_ones(tmp_path):
    """One file, and it is no file of the package."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(PACKAGE.parent)])}
    script = [sys.executable, str(tests / "scaled_rows.py"), str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "dtype is 'scaled' in the file and 'float32' in this model" in done.stdout
    assert not [path for path in PACKAGE.rglob("*.[pc][yu]*") if "scaled_rows" in path.read_text(errors="ignore")]


# --- outputs ----------------------------------------------------------------------------------------------------------


def collection(tables, dtype, outputs, **changed):
    """A collection whose outputs have a dtype of their own."""
    made = te.TieredEmbeddingBagCollection(tables, dtype=dtype, capacity=3, optimizer=OPTIMIZERS[1], **changed)
    tables = TableSet(dataclasses.replace(made.tables.config, outputs=outputs))
    TieredModule.__init__(made, Engine(tables), made.options)
    return made


@pytest.mark.parametrize("outputs", [FLOAT, HALF, BFLOAT16])
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT16])
def test_outputs_are_rounded_once_into_their_own_dtype(dtype, outputs):
    tables = table_configs(modes=("sum", "mean", "max"), widths=(4, 5))
    ids, offsets, *_ = random_batch(tables, 7, 3)
    whole = te.TieredEmbeddingBagCollection(tables, dtype=dtype, device="cpu")
    exact = [weight.float() for weight in whole.state_dict().values()]
    model = collection(tables, dtype, outputs, device="cpu")
    with torch.no_grad():
        out = model(ids, offsets)
    assert out.dtype == outputs
    column = 0
    for t, table in enumerate(tables):
        edges = offsets[t * 7 : t * 7 + 8]
        for sample in range(7):
            rows = exact[t][ids[edges[sample] : edges[sample + 1]]]
            if table.padding_idx is not None:
                rows = rows[ids[edges[sample] : edges[sample + 1]] != table.padding_idx]
            total = torch.zeros(table.embedding_dim)
            for row in rows:
                total = total + row
            if len(rows) and table.mode == "mean":
                total = total / len(rows)
            if len(rows) and table.mode == "max":
                total = rows.max(0).values
            assert_same_bits([out[sample, column : column + table.embedding_dim]], [total.to(outputs)])
        column += table.embedding_dim


def test_rows_learn_the_same_from_outputs_of_another_dtype():
    """Gradients that both dtypes hold leave the same rows."""
    tables = table_configs(widths=(4, 5))
    runs = []
    for outputs in (FLOAT, BFLOAT16):
        model = collection(tables, BFLOAT16, outputs, device="cpu")
        train(model, tables, 4, integer=True)
        runs.append(bits(model))
    assert_same_bits(*runs)


def test_outputs_have_the_dtype_of_the_rows_unless_told():
    config = te.TieredEmbeddingBag(4, 2, dtype=HALF, device="cpu").tables.config
    assert isinstance(config, TableSetConfig)
    assert config.output_dtype == HALF
    assert dataclasses.replace(config, outputs=FLOAT).output_dtype == FLOAT
    assert dataclasses.replace(config, dtype=SCALED).output_dtype == FLOAT


def test_an_encoding_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SCALED.head = 2
    assert isinstance(SCALED, Encoding)
