"""Command line: `python -m examples.dlrm train`, `generate` and `fit`, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from examples.dlrm import locality, report, synthetic
from examples.dlrm.comparison import against_torch
from examples.dlrm.config import DTYPES, CacheConfig, CheckpointConfig, ModelConfig, TrainConfig
from examples.dlrm.criteo import CriteoFile, Log, LogError
from examples.dlrm.optional import require
from examples.dlrm.processes import Processes, on_this_host, started
from examples.dlrm.profile import StepProfile
from examples.dlrm.trainer import Trainer
from tieredemb import LFU, LRU, File, HostMemory, Pmem, UnifiedMemory
from tieredemb.config import OptimizerConfig, parse_capacity
from tieredemb.errors import ConfigError, TieredEmbError
from tieredemb.kernels import check_device
from tieredemb.lookup.rounding import ROUNDINGS
from tieredemb.storage.base import Storage

_OPTIMIZERS = {name.lower(): kind for name, kind in OptimizerConfig.known().items()}
_TIERS = ("unified", "host", "file", "pmem")
_GENERATED_ROWS = 200_000  # under a minute of training on two cores


def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(width) for width in text.split(",") if width)


def _name(text: str) -> str:
    """An optimizer's name, with hyphens ("row-wise-adagrad") or without."""
    return text.replace("-", "").lower()


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is None or action.default is False
        return action.help if hidden else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.dlrm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a DLRM on a click log", formatter_class=_Help)
    _add_data(train.add_argument_group("data"))
    _add_model(train.add_argument_group("model"))
    _add_tables(train.add_argument_group("tables"))
    _add_run(train.add_argument_group("run"))
    generate = commands.add_parser("generate", help="write a generated click log", formatter_class=_Help)
    generate.add_argument("--rows", type=int, default=_GENERATED_ROWS, help="rows to write")
    generate.add_argument("--seed", type=int, default=0, help="seed of the rows")
    generate.add_argument("--out", type=Path, required=True, help="file: .tsv, .tsv.gz or .tsv.xz")
    fit = commands.add_parser("fit", help="fit the law of the generated ids to Meta's published statistics")
    fit.add_argument("path", type=Path, help="meta_locality_stats_2022.txt of facebookresearch/dlrm_datasets")
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", type=Path, help="log in Criteo's format (.tsv, .gz, .xz); without it one is generated")
    group.add_argument("--rows", type=int, help=f"rows to use (all), or to generate ({_GENERATED_ROWS})")
    group.add_argument("--test-share", type=float, default=0.2, help="part at the log's end that is held out")
    group.add_argument("--rows-per-table", type=int, default=100_000, help="rows that each column is hashed to")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--embedding-dim", type=int, default=16, help="width of the tables")
    group.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the tables' rows")
    group.add_argument("--rounding", choices=ROUNDINGS, default="nearest",
                       help="of rows of 16 bits: stochastic loses no small update")  # fmt: skip
    group.add_argument("--bottom", type=_widths, default="64", help="hidden widths of the bottom MLP: 512,256")
    group.add_argument("--top", type=_widths, default="64", help="hidden widths of the top MLP")
    group.add_argument("--batch-size", type=int, default=128, help="samples a batch")
    group.add_argument("--epochs", type=int, default=1, help="passes over the training rows")
    group.add_argument(
        "--optimizer", type=_name, choices=_OPTIMIZERS, default="adagrad", help="optimizer of the tables"
    )
    group.add_argument("--lr", type=float, default=0.02, help="learning rate of the tables")
    group.add_argument("--dense-lr", type=float, default=0.01, help="learning rate of the dense layers' Adagrad")
    group.add_argument("--reference", action="store_true", help="train plain nn.EmbeddingBag tables instead")


def _add_tables(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--capacity", type=parse_capacity, default="0.01", help="cache: rows, share or bytes (512MiB)")
    group.add_argument("--tier", choices=("auto", *_TIERS), default="auto",
                       help="where all rows live; auto: unified on a GPU, host on the CPU")  # fmt: skip
    group.add_argument("--tier-path", type=Path, help="file of the file tier, directory of the pmem tier")
    group.add_argument("--policy", choices=("lfu", "lru"), default="lfu", help="which rows stay in the cache")
    group.add_argument("--prefetch", type=int, default=0, help="batches whose rows are fetched while one computes")
    group.add_argument("--half-life", type=float, default=300.0, help="of a use's weight in LFU, in batches")


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if one can be used"
    )
    # at the default widths a second thread gains little, and loses much where another process wants its core
    group.add_argument("--threads", type=int, default=1, help="CPU threads; a resumed run needs the same number")
    group.add_argument("--seed", type=int, default=0, help="of initial weights and of a generated log")
    group.add_argument("--checkpoint", type=Path, help="directory of the run's checkpoint")
    group.add_argument("--checkpoint-every", type=int, default=1000, help="batches between checkpoints")
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint, bit for bit")
    group.add_argument("--graph", action="store_true", help="on a GPU: each step as one CUDA graph, same numbers")
    group.add_argument("--profile", type=Path, help="chrome trace of some steps to write (.json or .json.gz)")
    group.add_argument("--plot", type=Path, help="picture of loss and hit rate to write")
    group.add_argument(
        "--compare", type=int, default=8000, metavar="N", help="train plain torch on the first N samples too; 0: do not"
    )
    group.add_argument("--verbose", action="store_true", help="print what was moved, and every allocation")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _storage(tier: str, path: Path | None) -> Storage:
    """The cold tier. Its file is scratch: what a run keeps is in its checkpoint."""
    if tier in ("unified", "host"):
        return UnifiedMemory() if tier == "unified" else HostMemory()
    if path is None:
        what = "a file to create" if tier == "file" else "a directory on persistent memory"
        raise ConfigError(f"--tier {tier} needs --tier-path: {what}")
    return File(path, fresh=True) if tier == "file" else Pmem(path)


def _device(wanted: str) -> str:
    """The GPU if it is wanted and usable, of several processes one for each. One that `auto` cannot use is said; one
    asked for in vain is an error."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    number, processes = on_this_host()
    try:
        check_device(torch.device("cuda"))
        gpus = torch.cuda.device_count()
        if gpus < (processes if wanted == "auto" else number + 1):
            raise ConfigError(
                f"{processes} processes need a GPU each, and here are {gpus}; start as many as there are GPUs "
                f"(torchrun --nproc-per-node), or pass --device cpu"
            )
    except TieredEmbError as error:
        if wanted == "cuda":
            raise
        if number == 0:
            print(f"training on the CPU: {error}", file=sys.stderr)
        return "cpu"
    return "cuda"


def _train_config(options: argparse.Namespace, tier: str, device: str) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            rows_per_table=options.rows_per_table,
            embedding_dim=options.embedding_dim,
            dtype=options.dtype,
            rounding=options.rounding,
            bottom=options.bottom,
            top=options.top,
        ),
        cache=CacheConfig(
            capacity=options.capacity,
            policy=LFU(half_life_batches=options.half_life) if options.policy == "lfu" else LRU(),
            storage=_storage(tier, options.tier_path),
            prefetch=options.prefetch,
        ),
        optimizer=_OPTIMIZERS[options.optimizer](lr=options.lr),
        dense_lr=options.dense_lr,
        batch_size=options.batch_size,
        epochs=options.epochs,
        test_share=options.test_share,
        device=device,
        seed=options.seed,
        graph=options.graph,
        reference=options.reference,
    )


def _saving(options: argparse.Namespace) -> CheckpointConfig | None:
    if options.checkpoint is None:
        if options.resume:
            raise ConfigError("--resume needs --checkpoint: the directory of the run to go on with")
        return None
    return CheckpointConfig(directory=options.checkpoint, every=options.checkpoint_every, resume=options.resume)


def train(options: argparse.Namespace) -> None:
    """Trains, then prints the summary and writes the plot."""
    if options.plot is not None:
        require("matplotlib", "matplotlib", "--plot")  # said now, not after an hour of training
    require("sklearn", "scikit-learn", "measuring AUC")
    torch.set_num_threads(options.threads)
    device = _device(options.device)
    with started(device) as processes:
        _train(options, device, processes)


def _train(options: argparse.Namespace, device: str, processes: Processes) -> None:
    """One process of the training. The first one talks."""
    say = print if processes.is_first else _nothing
    tier = options.tier if options.tier != "auto" else "unified" if device == "cuda" else "host"
    config, saving = _train_config(options, tier, device), _saving(options)
    with ExitStack() as around:
        bar = None
        if processes.is_first and not options.quiet:
            bar = around.enter_context(closing(report.Bar()))
        log, name = _log(options)
        capacity, place = report.capacity_text(config.cache.capacity), report.device_text(device)
        trainer = around.enter_context(Trainer(config, log, saving, processes))
        several = f" in {processes.size} processes" if processes.size > 1 else ""
        say(
            f"{name}: {trainer.train_rows:,} rows to train, {len(log) - trainer.train_rows:,} to test; "
            f"on {place}{several}, tier {tier}, capacity {capacity}{', a CUDA graph a step' if config.captures else ''}"
        )
        if config.graph and not config.captures:
            say("--graph: on the CPU there is nothing to capture, and steps run as without it")
        profile = _trained(options, trainer, processes, bar)
        predicted = trainer.predict()
        if not processes.is_first:
            return
        scores = report.score(*predicted)
        memory = {} if config.reference else trainer.collection.memory_report()
        if processes.size > 1:
            memory = {"of the first process": memory}
        apart = ""
        if options.compare and not config.reference:
            apart = against_torch(config, log, trainer.progress.points, options.compare, processes)
        run = report.Run(
            progress=trainer.progress,
            scores=scores,
            tier=tier,
            memory=memory,
            device=place,
            samples_per_second=trainer.samples_per_second,
            against_torch=apart,
        )
        if profile is not None:
            print(profile.summary())
        if options.plot is not None:
            report.plot(
                options.plot, trainer.progress, scores, f"DLRM on {name}, trained on {place}, capacity {capacity}"
            )
            print(f"plot written to {options.plot}")
        print(report.summary(run, verbose=options.verbose))


def _trained(
    options: argparse.Namespace, trainer: Trainer, processes: Processes, bar: report.Bar | None
) -> StepProfile | None:
    """Trains to the end; returns the profile of some steps, where one is wanted."""
    with ExitStack() as around:
        profile = None
        if options.profile is not None and processes.is_first:
            config = trainer.config
            profile = around.enter_context(StepProfile(options.profile, config.device, replays=config.captures))
        on_step = (lambda: None) if profile is None else profile.step
        if bar is None:
            trainer.run(on_step=on_step)
        else:
            bar.begin(trainer.total_samples, trainer.progress.samples)
            trainer.run(bar, on_step)
            bar.close()
    return profile


def _log(options: argparse.Namespace) -> tuple[Log, str]:
    """The log, and its name."""
    if options.data is not None:
        return CriteoFile(options.data, rows=options.rows), options.data.name
    return _generated(options), "generated log"


def _nothing(_: str) -> None:
    pass


def _generated(options: argparse.Namespace) -> Log:
    rows = _GENERATED_ROWS if options.rows is None else options.rows
    return synthetic.GeneratedLog(rows=rows, seed=options.seed)


def generate(options: argparse.Namespace) -> None:
    """Writes a generated log."""
    log = synthetic.GeneratedLog(rows=options.rows, seed=options.seed)
    bar = require("tqdm", "tqdm", "the progress bar").tqdm(total=len(log), unit=" rows", unit_scale=True)
    with bar:
        size_bytes = synthetic.write_log(options.out, log, bar.update)
    print(f"{options.out}: {len(log):,} rows, {size_bytes:,} bytes of text")


def fit(options: argparse.Namespace) -> None:
    """Fits the law and prints target, fitted and measured statistics."""
    target = locality.read_published(options.path)
    law = locality.rounded(locality.fit(target, synthetic.CARDINALITIES))
    print(law)
    sample = next(synthetic.GeneratedLog(rows=locality.WINDOW).batches(0, locality.WINDOW, locality.WINDOW))
    print(locality.comparison(target, law, synthetic.CARDINALITIES, locality.measured(sample.categories.T)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 1 after an error in one line, or 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        {"train": train, "generate": generate, "fit": fit}[options.command](options)
    except (LogError, TieredEmbError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint, if any, can be resumed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
