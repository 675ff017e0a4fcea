"""The code of the documentation that needs other libraries runs; what it leaves to its reader is made here."""

from __future__ import annotations

import beside
import numpy as np
import pytest
import torch
from test_docs import DOCS, blocks

import tieredemb

for package in ("torchfm", "torch_rechub", "deepctr_torch", "torchkge"):
    beside.require(package)

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES = 256
FIELDS = {"user": 500, "item": 300}
BLOCKS = [(page, line, block) for page in DOCS for line, block in blocks(page, "py")]


def names_of_the_reader():
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.utils.data import DataGenerator

    rng = np.random.default_rng(0)
    x = {name: beside.skewed(rng, rows, SAMPLES) for name, rows in FIELDS.items()}
    x["age"], y = rng.random(SAMPLES).astype(np.float32), (rng.random(SAMPLES) < 0.3).astype(np.float32)
    train_loader, validation_loader, _ = DataGenerator(x, y).generate_dataloader(x, y, x, y, batch_size=64)
    return {
        "torch": torch,
        "tieredemb": tieredemb,
        "field_dims": np.array(list(FIELDS.values())),
        "columns": [*(SparseFeat(*each) for each in FIELDS.items()), DenseFeat("age")],
        "sparse": [SparseFeature(*each, embed_dim=8) for each in FIELDS.items()],
        "dense": [DenseFeature("age")],
        "train_loader": train_loader,
        "validation_loader": validation_loader,
        "x": x,
        "y": y,
    }


def test_guide_shows_every_library():
    text = "".join(block for _, _, block in BLOCKS)
    assert all(f"from {package}" in text for package in ("torchfm", "torch_rechub", "deepctr_torch", "torchkge"))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("page", "line", "block"), BLOCKS, ids=[f"{page}:{line}" for page, line, _ in BLOCKS])
def test_block_runs_without_a_warning(page, line, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = names_of_the_reader()
    exec(compile("\n" * (line - 1) + block, page, "exec"), namespace)  # errors name the page's line
    assert beside.tables_of(namespace["model"])
    assert not beside.embeddings_of(namespace["model"])
