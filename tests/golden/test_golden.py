"""Golden programs have the bits that were recorded: a sample of them, or with `--golden` all."""

from __future__ import annotations

import pytest

from golden import command, programs, run, several

EVERY = 14  # of the programs is in the sample
KEPT = command.load(command.CPU_FILE)["programs"]
ALL = programs.load()


def pytest_generate_tests(metafunc):
    if "program" in metafunc.fixturenames:
        chosen = ALL if metafunc.config.getoption("golden") else ALL[::EVERY]
        metafunc.parametrize("program", chosen, ids=[str(each.number) for each in chosen])


def test_a_program_has_the_bits_that_were_recorded(program, worlds, tmp_path):
    found = command.differs(KEPT[program.number], run.run(program, tmp_path, worlds))
    assert not found, f"{found}: {program}; run it alone by: python -m tests.golden run {program.number}"


@pytest.mark.parametrize("number", [each.number for each in ALL if each.face == "ranks"][::8])
def test_four_ranks_have_the_bits_of_one_process(number, worlds, tmp_path):
    assert several.differences(4, ALL[number], tmp_path, worlds) == {}


def test_programs_cover_every_value():
    for name, values in programs.LEVELS.items():
        assert {getattr(program, name) for program in ALL} == set(values)


def test_programs_keep_the_rules():
    for program in ALL:
        assert [name for name, rule in programs.RULES.items() if not rule(program)] == []


def test_programs_are_as_they_were_drawn(pytestconfig):
    if not pytestconfig.getoption("golden"):
        pytest.skip("takes half a minute; pytest --golden runs it")
    drawn = programs.draw()
    assert drawn == ALL
    assert command.COVERAGE_FILE.read_text() == programs.coverage(drawn)


def test_a_difference_is_named():
    before = {"rows": "1", "scores": "2"}
    assert command.differs(before, dict(before)) == ""
    assert command.differs(before, {"rows": "1", "scores": "3"}) == "differs in scores"
    assert command.differs(before, {"rows": "1"}) == "differs in scores"
    assert command.differs(None, before) == "was not recorded"
    assert command.differs(before, {command.RAISED: "ValueError: 3"}) == "raised ValueError: 3"


def test_programs_after_one_that_raises_are_recorded(monkeypatch, tmp_path, capsys):
    def raises_once(program, directory, world):
        if program.number == 1:
            raise ValueError("of program 1")
        return {"rows": "0"}

    monkeypatch.setattr(run, "run", raises_once)
    assert command.record(tmp_path / "bits.json", ALL[:3], "cpu") == 1
    assert "raised ValueError: of program 1" in capsys.readouterr().out
    assert command.load(tmp_path / "bits.json")["programs"] == {0: {"rows": "0"}, 2: {"rows": "0"}}
