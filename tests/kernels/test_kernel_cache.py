"""Compiled kernels on the disk: that none outlives an edit of what it is made of, where they lie, and what becomes of
those that are damaged or old. Most in processes of their own, which run a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from source_imports import modules_of, own_imports

import tieredemb
from tieredemb.kernels import cache_files, source_digest

PACKAGE = Path(tieredemb.__file__).parent

PROLOGUE = """
    import json, os, sys, warnings
    from pathlib import Path
    import torch
    from numba.core import event
    import tieredemb as te

    compiled = []

    class Listener(event.Listener):
        def on_start(self, each):
            compiled.append(each.data["dispatcher"].py_func.__name__)
        def on_end(self, each): pass

    event.register("numba:compile", Listener())

    def made():
        return te.TieredEmbeddingBag(40, 4, mode="sum", capacity=10, seed=1, device="cpu", optimizer=te.SGD(lr=0.1))

    def weights(bag):
        return bag.state_dict()["weight"].flatten().tolist()
"""
INITIAL = "print(json.dumps([weights(made()), compiled]))"  # needs one kernel
TRAINED = """
    bag = made()
    bag(torch.arange(8).view(2, 4)).sum().backward()
    print(json.dumps([weights(bag), compiled]))
"""


class Checkout:
    """A copy of the package, a home for its kernels, and processes that run it."""

    def __init__(self, root):
        self.root, self.home = root, root / "home"
        self.kernels = self.home / "tieredemb" / "kernels"
        shutil.copytree(PACKAGE, root / "tieredemb", ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, script, **environment):
        inherited = {name: each for name, each in os.environ.items() if not name.startswith(("NUMBA_", "PYTHON"))}
        fixed = {"PYTHONPATH": str(self.root), "XDG_CACHE_HOME": str(self.home), "TIEREDEMB_COMPILE_BESIDE": "0"}
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(script)],
            cwd=self.root, env=inherited | fixed | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, script, **environment):
        """The last line that a script prints, as JSON, and what it writes to stderr."""
        return self.end(self.start(script, **environment))

    @staticmethod
    def end(process):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1]), err

    def edit(self, file, old, new, *, keep_time=False):
        """Edits a file; returns what undoes it."""
        path = self.root / "tieredemb" / file
        text, times = path.read_text(), path.stat()
        assert old in text
        path.write_text(text.replace(old, new))
        if keep_time:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

        def undo():
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

        return undo

    def compiled_by_python(self, file):
        path = self.root / "tieredemb" / file
        return path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """One whose kernels are all cached, and what it computes."""
    made = Checkout(tmp_path_factory.mktemp("checkout"))
    (made.trained, compiled), _ = made.run(TRAINED, PYTHONDONTWRITEBYTECODE="1")
    assert "segments_update" in compiled
    (made.initial, compiled), printed = made.run(INITIAL)
    assert (compiled, printed) == ([], "")
    return made


@pytest.fixture
def edit(checkout):
    """Edits of the checkout, which end with the test."""
    undo = []
    yield lambda *given, **how: undo.append(checkout.edit(*given, **how))
    for each in undo:
        each()


def copied(checkout, tmp_path):
    """The environment of a process that has its own copy of the cached kernels."""
    shutil.copytree(checkout.home, tmp_path / "home")
    return tmp_path / "home", {"XDG_CACHE_HOME": str(tmp_path / "home")}


# --- sources ----------------------------------------------------------------------------------------------------------


def test_second_process_compiles_nothing_and_the_package_holds_no_kernels(checkout):
    found, printed = checkout.run(TRAINED)
    assert found == [checkout.trained, []]
    assert printed == ""
    assert not [*(checkout.root / "tieredemb").rglob("*.nb?")]


def test_update_follows_a_device_function_of_another_file(checkout, edit):
    edit("lookup/optimizer_cpu.py", "acc[d] += load(grad, row, first + d)\n\n", "acc[d] += F(2.0)\n\n")
    (weights, compiled), _ = checkout.run(TRAINED)
    assert "segments_update" in compiled
    assert "bags_pool" not in compiled  # of files that the edit leaves as they were
    steps = [before - after for before, after in zip(checkout.initial, weights, strict=True)]
    assert steps[:32] == pytest.approx([0.2] * 32, rel=1e-4)


def test_kernel_follows_a_constant_whose_edit_keeps_size_and_time(checkout, edit):
    """The numbers of two distributions are exchanged: an old kernel would draw from the other one. A process that runs
    what Python has compiled of the file before, as it does for such an edit, leaves nothing wrong to others."""
    constants = checkout.compiled_by_python("kernels/constants.py")
    edit("kernels/constants.py", "NORMAL, UNIFORM = 0, 1", "NORMAL, UNIFORM = 1, 0", keep_time=True)
    assert constants.is_file()
    (weights, _), _ = checkout.run(INITIAL)
    assert weights == checkout.initial
    constants.unlink()
    try:
        (weights, compiled), _ = checkout.run(INITIAL)
        assert weights == checkout.initial
        assert "rows_generate" in compiled
    finally:
        constants.unlink()


def test_kernel_follows_a_codec_of_rows_from_outside(checkout, tmp_path):
    script = """
        import numpy as np
        from tieredemb.kernels.row_format import Encoding
        rows = Encoding(name="toy", dtype=torch.float32, carrier=np.dtype(np.float64), codec="toy")
        bag = te.TieredEmbeddingBag(40, 4, mode="sum", capacity=10, seed=1, device="cpu", dtype=rows)
        print(json.dumps([weights(bag), compiled]))
    """
    found = []
    for factor in (1.0, 4.0):
        (tmp_path / "toy.py").write_text(
            "import numpy as np\n"
            "def load(array, row, column):\n"
            "    return np.float32(array[row, column])\n"
            "def row_store(array, row, values):\n"
            "    for d in range(values.shape[1]):\n"
            f"        array[row, d] = {factor} * values[0, d]\n"
        )
        path = os.pathsep.join([str(checkout.root), str(tmp_path)])
        environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "home")}
        (weights, _), _ = checkout.run(script, **environment)
        found.append(weights)
    assert any(found[0])
    assert found[1] == [4.0 * weight for weight in found[0]]


def test_process_that_runs_older_files_leaves_no_kernel(checkout, tmp_path, edit):
    home, environment = copied(checkout, tmp_path)
    script = f"""
        path = Path({str(checkout.root)!r}, "tieredemb", "kernels", "philox_cpu.py")
        before = path.read_text()
        bag = te.TieredEmbeddingBag  # loads nothing of what is compiled
        path.write_text(before.replace("range(10)", "range(11)"))
        {INITIAL}
        path.write_text(before)
    """
    (_, compiled), printed = checkout.run(script, **environment)
    assert "rows_generate" in compiled
    assert printed.count("files of tieredemb were changed after this process imported tieredemb") == 1
    assert sorted(each.name for each in home.rglob("*.nbc")) == sorted(
        each.name for each in checkout.home.rglob("*.nbc")
    )


def test_digest_is_of_all_that_modules_import():
    modules = modules_of(PACKAGE)
    kernels = [name for name in modules if name.endswith("_cpu")]
    reached = source_digest._reached(kernels, only_run=False)
    assert len(reached) > len(kernels)
    for name in reached:
        imports = source_digest._read(name).imports
        assert imports.keys() == own_imports(name, modules), name
        at_once = {other for other, has_run in imports.items() if has_run}
        assert at_once <= own_imports(name, modules, type_checking=False), name


# --- files ------------------------------------------------------------------------------------------------------------


def test_processes_that_compile_one_kernel_at_once_leave_one_file(checkout, tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    for (weights, compiled), _ in map(checkout.end, [checkout.start(INITIAL, **environment) for _ in range(2)]):
        assert weights == checkout.initial
        assert "rows_generate" in compiled
    files = [each.name for each in tmp_path.rglob("*.nbc")]
    assert len(files) == len({name.partition("-")[0] for name in files}) > 1
    assert len([*tmp_path.rglob("*.*")]) == 2 * len(files)  # a directory for each


def test_file_that_a_crash_has_cut_is_compiled_again(checkout, tmp_path):
    home, environment = copied(checkout, tmp_path)
    whole = [*home.rglob("initial_cpu.*.nbc")]
    sizes = {path: path.stat().st_size for path in whole}
    for path in whole:
        os.truncate(path, sizes[path] // 2)
    (weights, compiled), _ = checkout.run(INITIAL, **environment)
    assert weights == checkout.initial
    assert "rows_generate" in compiled
    assert any(path.stat().st_size > sizes[path] // 2 for path in whole)


def test_kernels_of_others_keys_are_removed_but_for_the_last_used(tmp_path):
    now, day = time.time(), 86400
    ages = {f"tieredemb.a_cpu-{number:032x}": number for number in range(12)}
    ages |= {f"tieredemb.b_cpu-{number:032x}": 40 * number for number in range(4)} | {"somebody_elses": 400}
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        for file, time_of_file in (("kernel.nbc", now - age * day), ("kernel.nbc.x.tmp", now - day), ("new.tmp", now)):
            (tmp_path / name / file).write_text("")
            os.utime(tmp_path / name / file, (time_of_file, time_of_file))
        os.utime(tmp_path / name, (now - age * day, now - age * day))
    cache_files.prune(str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert {ages[name] for name in left if "a_cpu" in name} == set(range(8))
    assert {ages[name] for name in left if "b_cpu" in name} == {0, 40, 80}
    assert "somebody_elses" in left
    assert {path.name for path in (tmp_path / f"tieredemb.a_cpu-{1:032x}").iterdir()} == {"kernel.nbc", "new.tmp"}


def test_kernel_that_cannot_be_written_runs_all_the_same(checkout, tmp_path):
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n" + INITIAL  # as a full disk
    (weights, _), printed = checkout.run(script, XDG_CACHE_HOME=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert weights == checkout.initial
    assert printed.count("kernels cannot be cached in") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# --- directories ------------------------------------------------------------------------------------------------------


def test_numba_cache_dir_that_others_can_write_to_is_not_used(checkout, tmp_path):
    tmp_path.chmod(0o777)
    found, printed = checkout.run(TRAINED, NUMBA_CACHE_DIR=str(tmp_path))
    assert found == [checkout.trained, []]  # from the user's own
    assert printed.count(f"NUMBA_CACHE_DIR={tmp_path} is not used: other users can write to {tmp_path}") == 1
    assert not [*tmp_path.iterdir()]


def test_numba_cache_dir_of_the_user_is_used(checkout, tmp_path):
    shutil.copytree(checkout.home, tmp_path / "chosen")
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "chosen"), "XDG_CACHE_HOME": str(tmp_path / "empty")}
    found, printed = checkout.run(TRAINED, **environment)
    assert (found, printed) == ([checkout.trained, []], "")


def test_without_a_directory_kernels_are_compiled_for_the_process(checkout, tmp_path):
    tmp_path.chmod(0o777)
    (weights, compiled), printed = checkout.run(INITIAL, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path))
    assert weights == checkout.initial
    assert "rows_generate" in compiled
    assert printed.count("in each process anew, as there is no directory to cache them in") == 1
    assert not [*tmp_path.iterdir()]


def test_table_without_a_compiler_is_refused(checkout):
    script = """
        try:
            made()
        except te.errors.UnsupportedError as error:
            print(json.dumps(str(error)))
    """
    message, _ = checkout.run(script, NUMBA_DISABLE_JIT="1")
    assert message.startswith("NUMBA_DISABLE_JIT is set")
    assert "unset" in message
