"""Scripts that are forks end, print and are talked to as others, also where the process that forks them is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import forks
import pytest


@pytest.mark.parametrize("base", [forks.WARMED, forks.TORCH])
def test_script_has_what_it_is_given_and_ends_as_it_says(tmp_path, base):
    code = """
        import os, sys
        print(sys.argv[1:], os.getcwd(), os.environ["MARK"], sys.dont_write_bytecode, "here" in sys.path)
        print(sum(name.startswith("tieredemb") for name in sys.modules) > 1, file=sys.stderr)
        sys.exit(3)
    """
    env = os.environ | {"MARK": "m", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "here"}
    done = forks.run(code, "a", 7, base=base, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (3, f"['a', '7'] {tmp_path} m True True\n")
    assert done.stderr == f"{base == forks.WARMED}\n"


def test_scripts_run_at_the_same_time_and_are_killed_in_the_end():
    code = "print('there', flush=True)\nprint(input(), flush=True)\ninput()"
    with forks.Script(code) as first, forks.Script(code) as second:
        for script, said in ((second, "to two"), (first, "to one")):
            assert script.readline() == "there\n"
            script.stdin.write(said + "\n")
            script.stdin.flush()
            assert script.readline() == said + "\n"
            assert script.poll() is None
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, -signal.SIGKILL)


def test_a_server_that_was_killed_is_started_anew(monkeypatch):
    monkeypatch.delenv(forks.PLACE)  # one of this test alone, which imports little
    assert forks.run("print(1)", base="json").stdout == "1\n"
    server = int(Path(os.environ[forks.PLACE], "json.pid").read_text())
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    assert forks.run("print(2)", base="json").stdout == "2\n"
