"""Trace files as streams of bytes, plain or compressed: what is not read is not decoded.

A few kilobytes can decode to terabytes. So a compressed file is fed to its decoder piece by piece, and only while its
reader reads on. `lzma.open` and zstandard's own reader would do so too, but the one ignores what follows a
damaged header, and the other takes a truncated frame for the end of the file: both would shorten a trace silently.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tieredemb.errors import InvalidInputError, MissingDependencyError

COMPRESSIONS = (".xz", ".zst", ".gz")
_BUFFER_BYTES = 1 << 16
# What a decoder is fed at once. Repeats expand 1,032-fold in gzip, 6,800-fold in xz (measured), 32,768-fold in zstd:
# no such piece becomes more than 8 MiB.
_GZIP_PIECE, _XZ_PIECE, _ZST_PIECE = 4096, 1024, 256


@dataclass(frozen=True, kw_only=True)
class _Codec:
    """`new_decoder`: makes the decoder of a frame. `piece_bytes`: how much it is fed at once. `damage`: what it raises.
    `padding`: bytes allowed after frames."""

    new_decoder: Callable[[], Any]
    piece_bytes: int
    damage: type[Exception]
    padding: bytes


def _codec(suffix: str) -> _Codec | None:
    """The codec of a file's suffix; None for a plain file."""
    if suffix == ".xz":
        return _Codec(new_decoder=_new_xz_decoder, piece_bytes=_XZ_PIECE, damage=lzma.LZMAError, padding=b"\0")
    if suffix == ".gz":
        return _Codec(new_decoder=_new_gzip_decoder, piece_bytes=_GZIP_PIECE, damage=zlib.error, padding=b"\0")
    if suffix != ".zst":
        return None
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "reading a .zst trace needs zstandard, which is not installed; run: pip install 'tieredemb[bench]'"
        ) from None
    return _Codec(
        new_decoder=lambda: zstandard.ZstdDecompressor().decompressobj(),
        piece_bytes=_ZST_PIECE,
        damage=zstandard.ZstdError,
        padding=b"",
    )


def _new_xz_decoder() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ)


def _new_gzip_decoder() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: with gzip's header and checksum


class _Frames(io.RawIOBase):
    """The content of all frames (xz: streams, gzip: members) of `file`, one after another. Raises `EOFError` where the
    file ends within a frame."""

    def __init__(self, file: BinaryIO, codec: _Codec) -> None:
        super().__init__()
        self._file, self._codec = file, codec
        self._decoder: Any = None  # None between frames
        self._unused = b""  # what was read beyond the last frame
        self._decoded = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decoded:
            piece = self._unused or self._file.read(self._codec.piece_bytes)
            if not piece:
                if self._decoder is None:
                    return 0
                raise EOFError("the file ends within its compressed content")
            self._decoded = memoryview(self._decode(piece))
        taken = min(len(buffer), len(self._decoded))
        buffer[:taken] = self._decoded[:taken]
        self._decoded = self._decoded[taken:]
        return taken

    def _decode(self, piece: bytes) -> bytes:
        self._unused = b""
        if self._decoder is None:
            piece = piece.lstrip(self._codec.padding)
            if not piece:
                return b""
            self._decoder = self._codec.new_decoder()
        decoded: bytes = self._decoder.decompress(piece)
        if self._decoder.eof:
            self._unused = self._decoder.unused_data
            self._decoder = None
        return decoded


@contextlib.contextmanager
def open_trace(path: Path) -> Iterator[io.BufferedReader]:
    """The content of a trace file, decompressed as it is read if `path` ends in one of `COMPRESSIONS`. Raises
    `InvalidInputError`, also while it is read, for a file that is damaged or cannot be read."""
    codec = _codec(path.suffix)
    damage = (EOFError,) if codec is None else (EOFError, codec.damage)
    try:
        with path.open("rb") as file:
            yield file if codec is None else io.BufferedReader(_Frames(file, codec), _BUFFER_BYTES)
    except damage as error:
        raise InvalidInputError(
            f"trace file {str(path)!r} is no intact {path.suffix} file ({error}); fetch it again, or "
            f"rename it if it is not compressed"
        ) from error
    except OSError as error:
        raise InvalidInputError(f"trace file {str(path)!r} cannot be read: {error}") from error
