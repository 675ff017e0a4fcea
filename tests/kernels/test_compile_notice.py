"""What a user sees of compiling: once the line, and on a terminal the kernel at work, which goes again."""

from __future__ import annotations

import io
from types import SimpleNamespace

from tieredemb.kernels.compile_notice import SAYING, CompileNotice


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def on(monkeypatch, is_terminal):
    stream = Stream(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def compiling(name, module="tieredemb.cache.plan_cpu"):
    return SimpleNamespace(
        data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__name__=name, __module__=module))}
    )


def compile_two_kernels(notice):
    """The first with a device function, and numba's own amid it."""
    kernel, part, other = compiling("keys_number"), compiling("first_cell"), compiling("impl", "numba.np.arrayobj")
    for started in (kernel, part, other):
        notice.on_start(started)
    for ended in (other, part, kernel):
        notice.on_end(ended)
    notice.on_start(compiling("rows_read"))
    notice.on_end(compiling("rows_read"))


def test_notice_is_one_line_where_stderr_is_no_terminal(monkeypatch):
    stream = on(monkeypatch, is_terminal=False)
    compile_two_kernels(CompileNotice())
    assert stream.getvalue() == SAYING + "\n"


def test_notice_shows_each_kernel_on_a_terminal_and_takes_it_away(monkeypatch):
    stream = on(monkeypatch, is_terminal=True)
    compile_two_kernels(CompileNotice())
    said, _, shown = stream.getvalue().partition("\n")
    assert said == SAYING
    lines = shown.split("\r")
    assert lines[0].endswith("kernel 1: keys_number")
    assert lines[2].endswith("kernel 2: rows_read")
    assert [line.strip() for line in lines[1::2]] == ["", ""]
    assert [len(line) for line in lines] == [len(lines[0])] * 2 + [len(lines[2])] * 2 + [0]


def test_notice_says_nothing_of_kernels_of_others(monkeypatch):
    stream = on(monkeypatch, is_terminal=True)
    notice = CompileNotice()
    for name, module in (("theirs", "__main__"), ("impl", None)):
        notice.on_start(compiling(name, module))
        notice.on_end(compiling(name, module))
    assert stream.getvalue() == ""
