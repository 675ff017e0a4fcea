"""Histories as tieredemb 0.1.0 wrote them: archives of numpy (`numpy.savez`), which are only read.

They are parsed here, as a damaged or crafted archive must not take more memory than its size: members are not
compressed, and have the headers that numpy writes for arrays of numbers.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tieredemb.config import Array

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00.{2}\{'descr': '([<|][fiu][1248])', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n",
    re.DOTALL,
)
Fits = Callable[[tuple[int, ...], "np.dtype[Any]"], bool]


def is_archive(start: bytes) -> bool:
    """Whether data that begins so is such an archive."""
    return start == b"PK\x03\x04"


def parts_of(data: bytes, wanted: Mapping[str, Fits]) -> dict[str, Array]:
    """The arrays of an archive, which must contain exactly the names `wanted`. Raises `ValueError`."""
    found: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {each.filename: each for each in archive.infolist()}
            if len(members) != len(archive.infolist()) or members.keys() != {f"{name}.npy" for name in wanted}:
                raise ValueError("it is no archive of a history of steps")
            for name, fits in wanted.items():
                member = members[f"{name}.npy"]
                if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(data):
                    raise ValueError(f"its {name} are compressed, or larger than all of it")
                found[name] = _array(archive.read(member), name, fits)
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError, struct.error) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    return found


def _array(data: bytes, name: str, fits: Fits) -> Array:
    header = _HEADER.match(data)
    if header is None:
        raise ValueError(f"its {name} are no array of numbers")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(each) for each in header[2].decode().replace(" ", "").split(",") if each)
    size = dtype.itemsize
    for each in shape:
        size *= each
    if not fits(shape, dtype) or len(data) - header.end() != size:
        raise ValueError(f"its {name} are {dtype} of shape {shape}, and do not fit")
    return np.frombuffer(data, dtype, offset=header.end()).reshape(shape)
