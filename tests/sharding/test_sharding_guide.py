"""The script that the guide shows runs as it is, in two processes of torchrun, and what it saves loads in one."""

from __future__ import annotations

import forks
import torch
from test_docs import blocks

import tieredemb as te

PAGE = "docs/guides/sharding.md"


def test_the_script_of_the_guide_runs(tmp_path):
    ((_, script),) = blocks(PAGE, "python train.py")
    ((_, command),) = blocks(PAGE, "sh")
    (tmp_path / "train.py").write_text(script)
    torchrun, *options = command.split()
    assert torchrun == "torchrun"
    done = forks.torchrun(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ((_, printed),) = blocks(PAGE, "text")
    assert done.stdout.strip() == printed.strip()

    tables = [
        te.TableConfig(name="user", num_embeddings=1_000_000, embedding_dim=16),
        te.TableConfig(name="country", num_embeddings=200, embedding_dim=16),
    ]
    alone = te.TieredEmbeddingBagCollection(tables, capacity=0.01, optimizer=te.Adagrad(lr=0.02))
    new = alone.state_dict()["tables.user.weight"]
    model = torch.nn.ModuleDict({"tables": alone, "top": torch.nn.Linear(32, 1)})
    te.load_checkpoint(model, tmp_path / "run.ckpt", optimizer=torch.optim.Adam(model["top"].parameters()))
    moved = (alone.state_dict()["tables.user.weight"] != new).any(1).sum()
    assert 2000 < moved <= 2 * 20 * 64  # of two processes' batches
    assert torch.isfinite(alone.state_dict()["tables.user.weight"]).all()
