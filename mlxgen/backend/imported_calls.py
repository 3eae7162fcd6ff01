"""Where a loaded shared library keeps the address of a function that it imports.

A call from one ELF library into another goes through a pointer in the caller's global offset
table. This module finds that pointer from the library's own relocation records, so that the call
can be given another destination. Linux, 64-bit, little-endian.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_LOADABLE, _DYNAMIC = 1, 2
_STRTAB, _SYMTAB, _RELA, _RELASZ, _JMPREL, _PLTRELSZ = 5, 6, 7, 8, 23, 2
_SYMBOL_BYTES = 24
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_POINTER_RELOCATIONS = {6, 7, 1025, 1026}
"""GLOB_DAT and JUMP_SLOT of x86-64 and of 64-bit Arm: a slot that holds a function's address."""


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/self/maps: addresses `start <= a < end`, file-backed."""

    start: int
    end: int
    is_writable: bool
    path: str


def mappings() -> list[Mapping]:
    """The file-backed memory of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found.append(Mapping(start, end, "w" in fields[1], fields[5]))
    return found


def import_slots(library: str, function: str) -> list[int]:
    """Addresses of writable pointers through which a loaded library calls a function.

    library: file name of a library that this process has loaded, such as `libmlx.so`. Empty when
    it is not loaded, does not import the function, or keeps the pointers in read-only memory.
    """
    loaded = mappings()
    own = [mapping for mapping in loaded if Path(mapping.path).name == library]
    if not own:
        return []
    base = min(mapping.start for mapping in own)
    offsets = _slot_offsets(Path(own[0].path).read_bytes(), function.encode())
    return [
        base + offset
        for offset in offsets
        if any(m.start <= base + offset < m.end and m.is_writable for m in loaded)
    ]


def redirect(slots: list[int], destination: int) -> list[int]:
    """Point the slots at another function; return what they pointed at."""
    pointers = [ctypes.c_uint64.from_address(slot) for slot in slots]
    before = [pointer.value for pointer in pointers]
    for pointer in pointers:
        pointer.value = destination
    return before


def _slot_offsets(data: bytes, function: bytes) -> list[int]:
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    header_offset = struct.unpack_from("<Q", data, 32)[0]
    header_bytes, header_count = struct.unpack_from("<HH", data, 54)
    segments = [
        struct.unpack_from("<IIQQQQQQ", data, header_offset + i * header_bytes)
        for i in range(header_count)
    ]

    def in_file(address: int) -> int:
        for kind, _, offset, start, _, size, _, _ in segments:
            if kind == _LOADABLE and start <= address < start + size:
                return int(offset + address - start)
        raise ValueError(f"address {address:#x} is in no segment")

    tags: dict[int, int] = {}
    for kind, _, offset, _, _, size, _, _ in segments:
        if kind == _DYNAMIC:
            tags.update(struct.iter_unpack("<qQ", data[offset : offset + size]))
    if not {_STRTAB, _SYMTAB} <= tags.keys():
        return []
    names, symbols = in_file(tags[_STRTAB]), in_file(tags[_SYMTAB])
    offsets = []
    for table, size_tag in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
        if table not in tags:
            continue
        count = tags[size_tag] // _RELOCATION.itemsize
        records = np.frombuffer(data, _RELOCATION, count, in_file(tags[table]))
        for record in records[np.isin(records["type"], list(_POINTER_RELOCATIONS))]:
            symbol = symbols + _SYMBOL_BYTES * int(record["symbol"])
            name = names + struct.unpack_from("<I", data, symbol)[0]
            if data[name : name + len(function) + 1] == function + b"\0":
                offsets.append(int(record["offset"]))
    return offsets
