"""A toy encoding of rows, float32 stored with a scale a row, of which the package knows nothing: the row's largest
power of two is kept once, and its weights divided by it. That is exact, so all numbers must be those of float32 rows.

As a script it trains such tables beside plain ones, in a process of its own.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import torch

from tieredemb.kernels.cpu import bits_float, float_bits
from tieredemb.kernels.row_format import Encoding

# a word of scale, then D words of weights
SCALED = Encoding(name="scaled", dtype=torch.float32, carrier=np.dtype(np.uint32), head=1, codec="scaled_rows")
F = np.float32


def load(array, row, column):
    scale = bits_float(array[np.uint64(row), np.uint64(0)])
    return bits_float(array[np.uint64(row), np.uint64(column + 1)]) * scale


def row_store(array, row, values):
    largest = F(0.0)
    for d in range(values.shape[1]):
        largest = max(largest, abs(values[0, d]))
    power = float_bits(largest) & np.uint32(0x7F800000)
    if power == np.uint32(0) or power == np.uint32(0x7F800000):
        power = np.uint32(0x3F800000)
    scale = bits_float(power)
    array[row, 0] = power
    for d in range(values.shape[1]):
        array[row, d + 1] = float_bits(values[0, d] / scale)


def main(directory: Path) -> None:
    from devices import assert_same_bits
    from training import NAMES, OPTIMIZERS, bits, table_configs, train

    import tieredemb as te

    tables = table_configs(modes=("sum", "mean", "max"), widths=(4, 5), rows=(1, 3, 17, 40, 25))

    def made(dtype, **changed):
        given = {"capacity": 3, "optimizer": OPTIMIZERS[3], "dtype": dtype} | changed
        return te.TieredEmbeddingBagCollection(tables, **given)

    for optimizer in (OPTIMIZERS[NAMES.index(name)] for name in ("SGD", "AdamW weight_decay")):
        runs = []
        for dtype, capacity in ((torch.float32, 1.0), (SCALED, 1.0), (SCALED, 3)):
            model = made(dtype, capacity=capacity, optimizer=optimizer)
            runs.append([*train(model, tables, 5), *bits(model)])
        assert runs[1][0].dtype == torch.float32
        for run in runs[1:]:
            assert_same_bits(run, runs[0])
    cold = model.tables.groups[1].cache.cold
    assert cold.weight.dtype == np.uint32
    assert cold.weight.shape[1] == 1 + 5
    scales = cold.weight[cold.state[:, -1] > 0, 0].view(np.float32)
    assert len(np.unique(scales)) > 1  # scaled they are

    # weighted sums, whose weights get a gradient, and rows that are held down to a norm
    runs = []
    for dtype in (torch.float32, SCALED):
        bag = te.TieredEmbeddingBag(
            40, 6, mode="sum", max_norm=1.5, padding_idx=2, capacity=4, optimizer=te.SGD(lr=0.1), dtype=dtype
        )
        seen = []
        for seed in range(4):
            random = torch.Generator().manual_seed(seed)
            shares = torch.randn(20, generator=random).requires_grad_()
            ids = torch.randint(40, (20,), generator=random)
            out = bag(ids, torch.arange(0, 20, 5), shares)
            out.backward(torch.randn(4, 6, generator=random))
            seen += [out.detach(), shares.grad]
        runs.append([*seen, bag.state_dict()["weight"]])
    assert_same_bits(*runs)

    # saving, loading, copying, files
    plain, scaled = made(torch.float32), made(SCALED, storage=te.File(str(directory / "rows")))
    for model in (plain, scaled):
        train(model, tables, 3)
        model.save_checkpoint(directory / f"checkpoint-{model is scaled}")
    assert_same_bits(bits(scaled), bits(plain))
    loaded, copied = made(SCALED, capacity=1.0), made(SCALED)
    loaded.load_checkpoint(directory / "checkpoint-True")
    copied.load_state_dict(plain.state_dict())
    copied.fused_optimizer.load_state_dict(plain.fused_optimizer.state_dict())
    expected = [*train(plain, tables, 3), *bits(plain)]
    for model in (loaded, copied, copy.deepcopy(copied)):
        if model is not copied:
            assert_same_bits([*train(model, tables, 3), *bits(model)], expected)
    scaled.close()
    reopened = made(SCALED, storage=te.File(str(directory / "rows")))
    assert_same_bits([*train(reopened, tables, 3), *bits(reopened)], expected)
    reopened.close()
    for what in (lambda: made(torch.float32, storage=te.File(str(directory / "rows"))), lambda: made(SCALED).half()):
        try:
            what()
        except te.TieredEmbError as error:
            print(error)
        else:
            raise AssertionError("rows of one encoding were taken for those of another")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
