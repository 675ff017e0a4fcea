"""NVRTC from its wheel, called directly: it needs no GPU, no driver and no toolkit."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

from tieredemb.kernels.source import text


@functools.cache
def nvrtc() -> ctypes.CDLL:
    package = pytest.importorskip("nvidia", reason="NVRTC's wheel is missing: pip install 'tieredemb[dev]'")
    found = sorted(path for root in package.__path__ for path in Path(root).rglob("libnvrtc.so.*"))
    if not found:
        pytest.skip("NVRTC's wheel is missing: pip install 'tieredemb[dev]'")
    for builtins in found[-1].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))  # NVRTC opens it by name alone, which its own folder does not answer to
    return ctypes.CDLL(str(found[-1]))


def compiled(file: str, architecture: str, flags: tuple[str, ...], more: str = "") -> tuple[str, str]:
    """The compiler's log, empty where it had nothing to say, and PTX of a `.cu` file of the package, and `more` behind
    it. Fails the test on an error."""
    library, program = nvrtc(), ctypes.c_void_p()
    code = (text(file) + more).encode()
    library.nvrtcCreateProgram(ctypes.byref(program), code, file.encode(), 0, None, None)
    given = [flag.encode() for flag in (*flags, f"--gpu-architecture={architecture}")]
    result = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    log, ptx = (text_of(program, what) for what in ("ProgramLog", "PTX"))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0, log
    return log, ptx


def text_of(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc(), f"nvrtcGet{what}")(program, text)
    return text.value.decode()
