"""`python -m tieredemb cache-hit` from end to end: tables, files, and what it refuses before it runs."""

from __future__ import annotations

import csv
import math
import re
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest

from tieredemb.__main__ import main
from tieredemb.cache_hit import cli
from tieredemb.cache_hit.options import capacity_rows, parse_policy, words
from tieredemb.config import LFU, LRU, Policy
from tieredemb.errors import ConfigError

ZIPF = ["cache-hit", "--zipf", "1.0", "--rows", "2000", "--accesses", "20000", "--quiet"]


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_cache_hit_writes_table_csv_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "rates.csv", tmp_path / "rates.png"
    options = ["--capacity", "1%,5%", "400", "--policy", "lrfu:50", "lfu", "--batch-size", "100", "200"]
    assert main([*ZIPF, *options, "--csv", str(table), "--plot", str(picture), "--lock-window", "1"]) == 0
    printed = capsys.readouterr().out
    assert "zipf 1: 20,000 accesses to 2,000 rows in batches of 100, lock window 1" in printed
    assert "last 10,000 accesses" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = _lines(table)
    points = {(int(line["batch_size"]), int(line["capacity_rows"]), line["policy"]) for line in lines}
    names = ["lrfu:50", "lfu", "lru", "lfu-forget", "static", "belady"]
    assert points == {(size, rows, name) for size in (100, 200) for rows in (20, 100, 400) for name in names}
    assert len(lines) == len(points)
    for line in lines:
        assert int(line["lookups"]) == 10_000
        assert float(line["hit_rate"]) == int(line["hits"]) / 10_000
        assert line["reference"] == str(int(line["policy"] not in ("lrfu:50", "lfu")))
        assert f"{float(line['hit_rate']):.3f}" in printed


def test_cache_hit_orders_what_must_be_ordered(tmp_path: Path) -> None:
    """No cache fetches less than Belady, and a larger one hits more."""
    table = tmp_path / "rates.csv"
    main([*ZIPF, "--capacity", "50", "200", "800", "--policy", "lrfu:50", "--batch-size", "50", "--csv", str(table)])
    lines = _lines(table)
    rates = {(line["policy"], int(line["capacity_rows"])): float(line["hit_rate"]) for line in lines}
    fetched = {(line["policy"], int(line["capacity_rows"])): line["fetched_rows"] for line in lines}
    for name in ("lrfu:50", "lru", "lfu-forget", "belady", "static"):
        assert rates[name, 50] < rates[name, 200] < rates[name, 800]
    for name in ("lrfu:50", "lru", "lfu-forget"):
        for capacity in (50, 200, 800):
            assert int(fetched[name, capacity]) > int(fetched["belady", capacity])


def test_cache_hit_says_why_static_can_beat_belady(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ZIPF, "--capacity", "2000"]) == 0
    printed = capsys.readouterr().out
    rates = dict(
        zip(*([cell.strip(" *|") for cell in line.split("|")] for line in printed.splitlines()[3:6:2]), strict=True)
    )
    assert float(rates["static"]) == 1.0 > float(rates["belady"])
    assert "static, which never fetches its rows, can\n  have the higher hit rate" in printed


def test_cache_hit_reads_a_file_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "round.lis", tmp_path / "rates.csv"
    path.write_text("0 10 0 0\n" * 20)  # 0 … 9 in a circle: an LRU of all ten hits always, one of five never
    options = ["--batch-size", "1", "--capacity", "5", "10", "--policy", "lru", "--no-references", "--quiet"]
    assert main(["cache-hit", str(path), *options, "--csv", str(table)]) == 0
    assert [line["hit_rate"] for line in _lines(table)] == ["0.000000", "1.000000"]
    assert [line["trace"] for line in _lines(table)] == ["round", "round"]
    assert "belady" not in capsys.readouterr().out


def test_cache_hit_tells_the_capacity_of_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "round.lis"
    path.write_text("0 100 0 0\n" * 10)
    options = ["--batch-size", "1", "--capacity", "50", "--policy", "lru", "--quiet", "--target"]
    assert main(["cache-hit", str(path), *options, "1.0"]) == 0
    target = capsys.readouterr().out.split("hit rate 1")[1]
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in target.splitlines()[2:]}
    assert rows == {"lru": "100", "lfu-forget": "100", "static": "100", "belady": "100"}
    np.save(tmp_path / "once.npy", np.arange(100))
    assert main(["cache-hit", str(tmp_path / "once.npy"), *options, "0.5", "--no-references"]) == 0
    assert "not reached" in capsys.readouterr().out


def test_cache_hit_drift_and_seed_reach_the_generator(tmp_path: Path) -> None:
    rates = {}
    for name, options in {
        "still": [],
        "again": [],
        "drifting": ["--drift", "0.5", "--drift-every", "1000"],
        "other": ["--seed", "1"],
    }.items():
        table = tmp_path / f"{name}.csv"
        main([*ZIPF, "--capacity", "10%", "--no-references", *options, "--csv", str(table)])
        rates[name] = float(_lines(table)[0]["hit_rate"])
    assert rates["still"] == rates["again"] != rates["other"]
    assert rates["drifting"] < rates["still"] - 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.be64"], "'none.be64' does not exist"),
        (["empty.be64"], "is empty"),
        (["short.be64"], "12 bytes, no multiple of 8"),
        (["bad.lis"], "line 2 of trace file 'bad.lis'"),
        (["bad.trace"], "cannot be told from its name; pass --format"),
        (["good.be64", "--zipf", "1.0"], "either a trace file"),
        ([], "either a trace file"),
        (["good.be64", "--seed", "1"], "--seed is for generated traces"),
        (["--zipf", "1.0", "--limit", "5"], "--limit and --format are for trace files"),
        (["--zipf", "-1"], "exponent"),
        (["good.be64", "--limit", "-1"], "limit must be an access count of at least 1, got -1"),
        (["good.be64", "--batch-size", "11"], "batch size 11 is not possible"),
        (["good.be64", "--batch-size", "-4"], "batch size .-4. is not possible"),
        (["good.be64", "--batch-size", "0"], "batch size '0' is not possible"),
        (["good.be64", "--batch-size", "2", "--capacity", "11"], "capacity '11' is not possible: .* 1 … 10 rows"),
        (["good.be64", "--batch-size", "2", "--capacity", "0"], "capacity '0' is not possible"),
        (["good.be64", "--batch-size", "2", "--capacity", "150%"], "capacity '150%' is not possible"),
        (["good.be64", "--batch-size", "2", "--capacity", "many"], "capacity 'many' is not understood"),
        (["good.be64", "--policy", "fifo"], "policy 'fifo' is not known; write one of"),
        (["good.be64", "--policy", "lrfu:0"], "policy 'lrfu:0' needs a half-life"),
        (["good.be64", "--batch-size", "2", "--lock-window", "-1"], "lock window must be at least 0"),
        (["good.be64", "--batch-size", "2", "--warm-up", "1"], "warm-up"),
        (["good.be64", "--target", "1.5"], "target is a hit rate"),
        (["good.be64", "--csv", "nowhere/rates.csv"], "--csv 'nowhere/rates.csv' is not a file in an existing"),
        (["good.be64", "--plot", "rates.bmp"], "ends in .png, .svg, .pdf"),
    ],
)
def test_cache_hit_refuses_bad_input_with_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.be64").write_bytes(np.arange(10).astype(">u8").tobytes())
    Path("empty.be64").write_bytes(b"")
    Path("short.be64").write_bytes(b"\0" * 12)
    Path("bad.lis").write_text("1 1 0 0\nnonsense\n")
    Path("bad.trace").write_bytes(b"\0" * 8)
    monkeypatch.setattr(cli, "sweep", _never)
    try:
        code: Any = main(["cache-hit", *options])
    except SystemExit as refused:  # argparse's own refusals
        code = refused.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


def _never(*args: object) -> None:
    raise AssertionError("the run began")


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [("matplotlib.figure", "plots", ["--plot", "rates.png"])],
)
def test_cache_hit_names_a_missing_extra_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    module: str,
    extra: str,
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(cli, "generate", _never)
    assert main([*ZIPF, *options]) == 2
    assert f"run: pip install 'tieredemb[{extra}]'" in capsys.readouterr().err


def test_cache_hit_runs_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main([*ZIPF[:-1], "--capacity", "10%", "--no-references"]) == 0
    assert "10.00%" in capsys.readouterr().out


def test_command_exits_without_a_traceback() -> None:
    done = forks.run(forks.run_module("tieredemb"), "cache-hit", "none.be64")
    assert done.returncode == 2
    assert done.stderr.startswith("tieredemb: error: trace file 'none.be64' does not exist")
    assert "Traceback" not in done.stderr


def test_command_line_loads_neither_numba_nor_matplotlib() -> None:
    code = "import sys, tieredemb.__main__; print({'numba', 'matplotlib'} & set(sys.modules))"
    assert forks.run(code, base=forks.TORCH).stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("word", "policy"),
    [
        ("lru", LRU()),
        ("LFU", LFU(half_life_batches=math.inf)),
        ("lfu-forget", LFU(half_life_batches=math.inf, remember_evicted=False)),
        ("lrfu", LFU()),
        ("lrfu:300", LFU(half_life_batches=300)),
        ("lrfu:inf", LFU(half_life_batches=math.inf)),
        ("lrfu-forget:2.5", LFU(half_life_batches=2.5, remember_evicted=False)),
    ],
)
def test_policy_words(word: str, policy: Policy) -> None:
    assert parse_policy(word) == policy


@pytest.mark.parametrize("word", ["", "lru:3", "lfu:3", "lrfu:", "lrfu:x", "lrfu:nan", "lrfu:-1", "lrfu-forget:0.5"])
def test_policy_words_without_meaning_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=repr(word)):
        parse_policy(word)


@pytest.mark.parametrize(
    ("word", "rows"),
    [("1", 1), ("2583", 2583), ("2_583", 2583), ("10000", 10_000), ("0.01", 100), ("1%", 100), ("1.0", 10_000)],
)
def test_capacity_words(word: str, rows: int) -> None:
    assert capacity_rows(word, 10_000) == rows


@pytest.mark.parametrize("word", ["", "0", "-5", "10001", "0.0", "-1%", "101%", "1.5", "nan", "5MiB", "%"])
def test_capacity_words_without_meaning_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"capacity {word!r} is not"):
        capacity_rows(word, 10_000)


def test_words_are_split_at_commas_and_taken_once() -> None:
    assert words(["1%,5%", "1%", "20,"]) == ["1%", "5%", "20"]


def test_command_without_memory_exits_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*args: object) -> None:
        raise MemoryError("Unable to allocate 8.00 GiB")

    monkeypatch.setattr(cli, "generate", too_large)
    assert main(ZIPF) == 2
    assert "not enough memory for this input (Unable to allocate 8.00 GiB)" in capsys.readouterr().err
