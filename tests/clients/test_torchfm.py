"""Models of torchfm, built and trained as its `examples/main.py` does."""

from __future__ import annotations

import importlib

import beside
import numpy as np
import pytest
import torch

beside.require("torchfm")

pytestmark = pytest.mark.usefixtures("one_thread")

FIELDS = np.array([50, 7, 300, 20, 1000])
SAMPLES, BATCH = 1024, 64
SIZES = {"embed_dim": 16, "mlp_dims": (16, 16), "dropout": 0.2}
MODELS = {
    "lr.LogisticRegressionModel": {},
    "fm.FactorizationMachineModel": {"embed_dim": 16},
    "ffm.FieldAwareFactorizationMachineModel": {"embed_dim": 4},
    "fnfm.FieldAwareNeuralFactorizationMachineModel": {"embed_dim": 4, "mlp_dims": (64,), "dropouts": (0.2, 0.2)},
    "fnn.FactorizationSupportedNeuralNetworkModel": SIZES,
    "wd.WideAndDeepModel": SIZES,
    "pnn.ProductNeuralNetworkModel": {**SIZES, "mlp_dims": (16,), "method": "inner"},
    "dcn.DeepCrossNetworkModel": {**SIZES, "num_layers": 3},
    "nfm.NeuralFactorizationMachineModel": {"embed_dim": 64, "mlp_dims": (64,), "dropouts": (0.2, 0.2)},
    "ncf.NeuralCollaborativeFiltering": {**SIZES, "user_field_idx": np.array([4]), "item_field_idx": np.array([2])},
    "dfm.DeepFactorizationMachineModel": SIZES,
    "xdfm.ExtremeDeepFactorizationMachineModel": {**SIZES, "cross_layer_sizes": (16, 16), "split_half": False},
    "afm.AttentionalFactorizationMachineModel": {"embed_dim": 16, "attn_size": 16, "dropouts": (0.2, 0.2)},
    "afi.AutomaticFeatureInteractionModel": {
        "embed_dim": 16, "atten_embed_dim": 64, "num_heads": 2, "num_layers": 3, "mlp_dims": (400, 400),
        "dropouts": (0, 0, 0),
    },
    "afn.AdaptiveFactorizationNetwork": {"embed_dim": 16, "LNN_dim": 150, "mlp_dims": (40, 40), "dropouts": (0, 0, 0)},
}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    fields = np.stack([beside.skewed(rng, rows, SAMPLES) for rows in FIELDS], 1)
    return torch.from_numpy(fields), torch.from_numpy((rng.random(SAMPLES) < 0.3).astype(np.float32))


def train(model, optimizer, data):
    """The `train` of torchfm's example, which returns the loss of every step."""
    model.train()
    criterion, losses = torch.nn.BCELoss(), []
    for fields, target in zip(*(each.split(BATCH) for each in data), strict=True):
        loss = criterion(model(fields), target)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def predict(model, data):
    model.eval()
    torch.manual_seed(2)  # the AFM drops out here, too
    with torch.no_grad():
        return model(data[0]).double().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_torchfm_model_trains_as_before(name, data):
    module, kind = name.split(".")
    make = getattr(importlib.import_module(f"torchfm.model.{module}"), kind)
    optimizers = {}

    def run(converted, move):
        torch.manual_seed(0)
        model = make(FIELDS, **MODELS[name])
        move(model)
        optimizers[model] = optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-3, weight_decay=1e-6)
        if converted:
            beside.convert(model, optimizer)
        torch.manual_seed(1)  # of dropout
        return beside.Trained(model, np.array(train(model, optimizer, data)), predict(model, data))

    plain, ours = beside.assert_trains_alike(run)
    beside.assert_state_dict_moves(
        plain, ours, lambda model: predict(model, data), lambda model: train(model, optimizers[model], data)
    )
