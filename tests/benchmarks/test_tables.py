"""The tables of README and docs: in step with the results, short, and without a figure lost."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no part of the installed package

from benchmarks import charts, tables
from benchmarks.headlines import HEADLINES, ON_CPU, ON_GPU, Miss, headlines, misses
from benchmarks.notes import SHORTER, brief
from benchmarks.reasons import by_reason, reason_of
from benchmarks.record import RESULTS, Record, load, load_each, save

NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")
RUNS = {name: load(RESULTS, name) for name in (*ON_CPU, *ON_GPU) if (RESULTS / f"{name}.json").exists()}


def test_pages_are_in_step_with_the_results(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_page_out_of_step_is_refused_and_mended(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmarks:slot-map -->\nan old figure\n<!-- /benchmarks -->\nafter\n")
    assert tables.main(["--check", str(page)]) == 1
    assert "page.md is out of step" in capsys.readouterr().err
    assert tables.main([str(page)]) == 0
    assert tables.main(["--check", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- benchmarks:slot-map -->\n")
    assert text.endswith("<!-- /benchmarks -->\nafter\n")
    assert "an old figure" not in text


@pytest.mark.parametrize("name", RUNS)
def test_short_notes_keep_every_figure(name):
    before = RUNS[name]["records"]
    after, _ = brief(before)
    for record, short in zip(before, after, strict=True):
        lost = set(NUMBER.findall(record.note)) ^ set(NUMBER.findall(short.note))
        assert lost <= {"50", "99"}  # p50, p99
        assert replace(short, note=record.note, peer=record.peer) == record


def test_every_short_word_is_used_and_explained_once():
    explained = [meaning for run in RUNS.values() for meaning in brief(run["records"])[1]]
    assert {shorter.legend for shorter in SHORTER} <= set(explained)
    for run in RUNS.values():
        meanings = brief(run["records"])[1]
        assert len(set(meanings)) == len(meanings)


def test_peers_of_two_origins_keep_them():
    some = Record(op="a", provider="tieredemb", median=1, p20=1, p80=1, rounds=1, peer="2 ms (earlier)")
    assert [record.peer for record in brief([some, some])[0]] == ["2 ms", "2 ms"]
    both = [some, replace(some, peer="3 ms (this run)")]
    assert brief(both) == (both, [])


def test_headlines_are_all_found():
    sentences = [sentence for sentence, _ in headlines(RESULTS)]
    assert len(sentences) == len(HEADLINES)
    assert not any("{" in sentence for sentence in sentences)


def test_every_missed_target_is_told():
    told = {(miss.what, miss.record.provider) for miss in misses(RESULTS)}
    runs = [run for name in RUNS for run in load_each(RESULTS, name)]
    missed = [record for run in runs for record in run["records"] if record.met is False]
    assert {(", ".join(filter(None, (record.op, record.config))), record.provider) for record in missed} <= told
    page = (tables.APPENDIX / "targets.md").read_text()
    assert page.count("**missed**") == len(missed)


def test_every_miss_has_one_reason():
    found = list(misses(RESULTS))
    assert sum(len(some) for _, some in by_reason(found)) == len(found)
    unknown = Record(op="a new one", provider="tieredemb", median=1, p20=1, p80=1, rounds=1, bar="≤ 0.5 ms", met=False)
    with pytest.raises(ValueError, match="has 0 reasons"):
        reason_of(Miss("cuda-step", unknown))


@pytest.mark.parametrize(
    ("fields", "beyond"),
    [
        ({"median": 3.0, "bar": "≤ 2 ms", "met": False}, 0.5),
        ({"median": 3.0, "ratio": 1.5, "bar": "≤ 1.2×", "met": False}, 0.25),
        ({"median": 40.0, "bar": "≥ 50 GB/s", "met": False}, 0.25),
        ({"median": 3.0, "ratio": 1.5, "ratio_label": "× torch"}, 0.5),
    ],
)
def test_misses_say_how_far_they_are_from_their_target(fields, beyond):
    miss = Miss("cuda-step", Record(op="a", provider="tieredemb", p20=1, p80=1, rounds=1, **fields))
    assert miss.beyond == pytest.approx(beyond)


def test_every_benchmark_stands_on_one_page():
    names = [match[2] for page in tables.PAGES for match in tables.BLOCK.finditer(page.read_text())]
    assert sorted(names) == sorted({*ON_CPU, *ON_GPU, *tables.OF_ALL})


def test_every_picture_is_shown():
    pages = "".join(page.read_text() for page in tables.PAGES)
    for path, _, in_step in charts.pictures(RESULTS):
        assert in_step, f"{path.name} is out of step; run python -m benchmarks.tables"
        assert f"benchmarks/{path.name})" in pages


def test_picture_out_of_step_is_drawn_anew(tmp_path):
    chart = charts.Lines("a size", "rows", "ms", (("torch", ((10.0, 1.0), (100.0, 20.0))),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "CHARTS", {"one": lambda _: chart})
        [(path, _, in_step)] = charts.pictures(RESULTS, tmp_path)
        assert not in_step
        charts.write(RESULTS, tmp_path)
        assert [in_step for _, _, in_step in charts.pictures(RESULTS, tmp_path)] == [True]
        assert path.read_text().startswith("<?xml")
        patch.setattr(charts, "CHARTS", {"one": lambda _: replace(chart, y="s")})
        assert [in_step for _, _, in_step in charts.pictures(RESULTS, tmp_path)] == [False]


def test_each_machine_has_a_table(tmp_path, monkeypatch):
    page = "<!-- benchmarks:state -->\n<!-- /benchmarks -->"
    for cores, median, met in ((16, 3.0, False), (2, 5.0, True)):
        monkeypatch.setattr("benchmarks.machine.cores", lambda cores=cores: cores)
        record = Record(op="open", provider="tieredemb", median=median, p20=1, p80=1, rounds=1, bar="≤ 4 s", met=met)
        save(tmp_path, "state", f"by {cores} cores", [record])
    text = tables.rewrite(page, tmp_path)
    assert text.index("by 2 cores") < text.index("| open | tieredemb | 5") < text.index("by 16 cores")
    assert text.index("by 16 cores") < text.index("| open | tieredemb | 3")
    assert [miss.record.median for miss in misses(tmp_path)] == [3.0]


def test_slower_than_a_peer_is_told_without_a_bar(tmp_path):
    slow = Record(
        op="step", provider="tieredemb", median=2, p20=2, p80=2, rounds=1, ratio=2.0, ratio_label="× FBGEMM", unit="ms"
    )
    fast, theirs = replace(slow, config="fast", ratio=0.5), replace(slow, provider="FBGEMM")
    save(tmp_path, "cuda-step", "a workload", [slow, fast, theirs])
    assert [miss.record for miss in misses(tmp_path)] == [slow]
    assert "| step | 2 ms | 2.00× FBGEMM |  |" in tables.rewrite(
        "<!-- benchmarks:missed -->\n<!-- /benchmarks -->", tmp_path
    )
