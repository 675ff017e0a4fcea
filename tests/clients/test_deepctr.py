"""Models of deepctr-torch, compiled and fitted by its own methods, with the regularisers that it has by default.

Its L2 terms are part of the loss. The converted model has them as they are, or is built without them, and the param
group of what they are of has the weight decay with the same gradient.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from inspect import signature

import beside
import numpy as np
import pytest
import torch

beside.require("deepctr_torch")  # before it is imported
# ruff: noqa: E402
from deepctr_torch import models
from deepctr_torch.callbacks import EarlyStopping, ModelCheckpoint
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat, get_feature_names

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, BATCH, WIDTH = 1024, 64, 4
FIELDS = {"user": 500, "item": 300, "genre": 20, "city": 7}
SPARSE = [SparseFeat(name, rows, WIDTH) for name, rows in FIELDS.items()]
DENSE = [DenseFeat("age"), DenseFeat("price")]
HISTORY = VarLenSparseFeat(SparseFeat("history", 300, WIDTH), maxlen=5)
SHARED = VarLenSparseFeat(SparseFeat("history", 300, WIDTH, embedding_name="item"), maxlen=5)
SMALL = {"dnn_hidden_units": (16, 16)}
TERMS, L2 = ("l2_reg_embedding", "l2_reg_linear"), 1e-5  # and deepctr's default

TARGET = [
    *SPARSE, *DENSE,
    VarLenSparseFeat(SparseFeat("hist_item", 300, WIDTH, embedding_name="item"), maxlen=5, length_name="seen"),
]  # fmt: skip

# each with the columns that it takes: a history that shares a table breaks AutoInt and xDeepFM themselves
MODELS = {
    "DeepFM": ([*SPARSE, *DENSE, SHARED], SMALL),
    "WDL": ([*SPARSE, *DENSE, SHARED], SMALL),
    "NFM": ([*SPARSE, *DENSE, SHARED], SMALL),
    "xDeepFM": ([*SPARSE, *DENSE, HISTORY], {**SMALL, "cin_layer_size": (8, 4)}),
    "AutoInt": ([*SPARSE, *DENSE, HISTORY], {**SMALL, "att_layer_num": 2}),
    "FiBiNET": ([*SPARSE, *DENSE], SMALL),
    "AFN": ([*SPARSE, *DENSE], {"ltl_hidden_size": 16, "afn_dnn_hidden_units": (16, 16)}),
    "AFM": (SPARSE, {}),
    "IFM": ([*SPARSE, *DENSE], SMALL),
    "DIFM": ([*SPARSE, *DENSE], SMALL),
    "ONN": ([*SPARSE, *DENSE], SMALL),
    "PNN": ([*SPARSE, *DENSE], SMALL),
    "DIN": (TARGET, {**SMALL, "history_feature_list": ["item"]}),
    "DCN": ([*SPARSE, *DENSE], SMALL),
    "DCNMix": ([*SPARSE, *DENSE], SMALL),
}
CANNOT_SWITCH_OFF = ("DCN", "DCNMix")  # they take l2_reg_linear, and do not pass it on to their linear model


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = {name: beside.skewed(rng, rows, SAMPLES) for name, rows in FIELDS.items()}
    x |= {"age": rng.random(SAMPLES), "price": rng.random(SAMPLES)}
    x["history"] = x["hist_item"] = beside.skewed(rng, 300, (SAMPLES, 5))
    x["seen"] = rng.integers(1, 6, SAMPLES)
    return x, (rng.random((SAMPLES, 1)) < 0.3).astype(np.float32)


def build(name, **options):
    columns, settings = MODELS[name]
    both = (columns,) if name in ("PNN", "DIN") else (columns, columns)
    return getattr(models, name)(*both, **settings, **options)


def inputs(name, data):
    return {feature: data[0][feature] for feature in get_feature_names(MODELS[name][0])}


def fit(model, name, data, **options):
    """One epoch, if nothing else is said; returns the loss of every step, without regularisers."""
    torch.manual_seed(1)  # of the order of the samples
    model.loss_func = recorder = beside.Recorder(model.loss_func)
    model.fit(inputs(name, data), data[1], batch_size=BATCH, verbose=0, **options)
    return np.array(recorder.losses)


def optimizer_of(model, kind, *, decayed, weight_decay):
    """As `compile` makes it, but with weight decay for parameters whose names begin with one of `decayed`."""
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if name.startswith(decayed)], "weight_decay": weight_decay},
        {"params": [param for name, param in named if not name.startswith(decayed)]},
    ]
    return {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[kind](groups)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in CANNOT_SWITCH_OFF])
def test_deepctr_model_trains_as_before(name, optimizer, data):
    terms = {key: each.default for key, each in signature(getattr(models, name)).parameters.items() if key in TERMS}
    decayed = ("embedding_dict.", "second_order_embedding_dict.", *["linear_model."] * ("l2_reg_linear" in terms))
    assert set(terms.values()) == {1e-6 if name == "DIN" else L2}

    def run(converted, move):
        model = build(name, **(dict.fromkeys(terms, 0) if converted else {}))
        move(model)
        if converted:
            made = optimizer_of(model, optimizer, decayed=decayed, weight_decay=2 * terms["l2_reg_embedding"])
            model.compile(made, "binary_crossentropy")
            beside.convert(model, model.optim)
        else:
            model.compile(optimizer, "binary_crossentropy")
        return beside.Trained(model, fit(model, name, data), model.predict(inputs(name, data)))

    plain, ours = beside.assert_trains_alike(run)
    beside.assert_state_dict_moves(
        plain, ours, lambda model: model.predict(inputs(name, data)), lambda model: fit(model, name, data)
    )


@pytest.mark.parametrize("name", ["DeepFM", *CANNOT_SWITCH_OFF])
def test_deepctr_regularisers_reach_the_tables(name, data):
    """As they are: the lists of weights that the model made of them have the tables."""

    def run(converted, move):
        model = build(name)
        move(model)
        model.compile("adam", "binary_crossentropy")
        if converted:
            beside.convert(model, model.optim)
        return beside.Trained(model, fit(model, name, data), model.predict(inputs(name, data)))

    beside.assert_trains_alike(run)


def test_deepctr_fit_validates_stops_early_and_saves(data, tmp_path):
    fitted = {}
    for converted in (False, True):
        model = build("DeepFM", l2_reg_embedding=0, l2_reg_linear=0)
        model.compile("adam", "binary_crossentropy", metrics=["binary_crossentropy", "auc"])
        if converted:
            beside.convert(model, model.optim)
        monitor, best, whole = "val_binary_crossentropy", str(tmp_path / "best"), str(tmp_path / "whole")
        callbacks = [
            EarlyStopping(monitor, patience=2, restore_best_weights=True),
            ModelCheckpoint(best, monitor, save_best_only=True, save_weights_only=True),
            ModelCheckpoint(whole, monitor, save_best_only=True),
        ]
        fit(model, "DeepFM", data, epochs=30, validation_split=0.25, callbacks=callbacks)
        fitted[converted] = model
        predicted = model.predict(inputs("DeepFM", data))
        with redirect_stdout(io.StringIO()):  # hashing is not supported, it says of every feature
            loaded = torch.load(whole, weights_only=False)
        assert np.array_equal(loaded.predict(inputs("DeepFM", data)), predicted)
        assert beside.equal(torch.load(best), model.state_dict())
    plain, ours = (fitted[converted].history.history for converted in (False, True))
    assert 3 <= len(plain["loss"]) < 30, "the labels are noise: it must get worse"
    for name in plain:
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5)
    assert fitted[True].evaluate(inputs("DeepFM", data), data[1]) == pytest.approx(
        fitted[False].evaluate(inputs("DeepFM", data), data[1]), rel=1e-5
    )
