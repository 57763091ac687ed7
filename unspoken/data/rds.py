"""Reading R data files (RDS, and the .rdb/.rdx pair of an R package) as far as text needs: vectors and names.

Format: R Internals, section 1.8 "Serialization Formats" (XDR, versions 2 and 3).
"""

import gzip
import struct
import zlib
from typing import Any

from unspoken.errors import UnspokenError

_NULL, _SYMBOL, _PAIRLIST, _CHARSXP, _LOGICAL, _INTEGER, _REAL = 254, 1, 2, 9, 10, 13, 14
_STRINGS, _LIST, _REFERENCE = 16, 19, 255
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400
_ENCODED_VERSION = 3


def read_rds(data: bytes) -> Any:
    """Return the R value of an uncompressed RDS stream.

    Vectors become lists, a named list a dict, NULL None, a missing string None. Other types are refused.
    """
    return _Reader(data).value()


def read_lazy_data(rdb: bytes, rdx: bytes) -> dict[str, Any]:
    """Return the objects of an R package's data base by name, from its .rdb and .rdx files."""
    index = read_rds(gzip.decompress(rdx) if rdx[:2] == b"\x1f\x8b" else zlib.decompress(rdx))
    found = {}
    for name, (offset, length) in index["variables"].items():
        chunk = rdb[offset : offset + length]
        found[name] = read_rds(zlib.decompress(chunk[4:]))  # 4 bytes: the length when unpacked
    return found


class _Reader:
    def __init__(self, data: bytes) -> None:
        if data[:2] != b"X\n":
            raise UnspokenError("not an RDS stream in XDR form")
        self.data, self.place = data, 2
        self.references: list[Any] = []
        version = self.integers(3)[0]
        if version == _ENCODED_VERSION:
            self.take(self.integers(1)[0])

    def take(self, size: int) -> bytes:
        if size < 0 or self.place + size > len(self.data):
            raise UnspokenError("the RDS stream ends too early")
        self.place += size
        return self.data[self.place - size : self.place]

    def integers(self, count: int) -> list[int]:
        return list(struct.unpack(f">{count}i", self.take(4 * count)))

    def value(self) -> Any:
        flags = self.integers(1)[0]
        kind = flags & 0xFF
        if kind == _NULL:
            return None
        if kind == _SYMBOL:
            self.references.append(self.value())
            return self.references[-1]
        if kind == _REFERENCE:
            return self.references[(flags >> 8 or self.integers(1)[0]) - 1]
        if kind == _PAIRLIST:
            return self.pairlist(flags)
        if kind == _CHARSXP:
            size = self.integers(1)[0]
            return None if size < 0 else self.take(size).decode("utf-8", errors="replace")
        return self.vector(kind, flags)

    def pairlist(self, flags: int) -> dict[str, Any]:
        if flags & _HAS_ATTRIBUTES:
            self.value()
        tag = self.value() if flags & _HAS_TAG else ""
        head = self.value()
        return {tag: head} | (self.value() or {})

    def vector(self, kind: int, flags: int) -> Any:
        if kind not in (_LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST):
            raise UnspokenError(f"R type {kind} is not one this reader knows")
        size = self.integers(1)[0]
        if kind in (_LOGICAL, _INTEGER):
            items: list[Any] = self.integers(size)
        elif kind == _REAL:
            items = list(struct.unpack(f">{size}d", self.take(8 * size)))
        else:
            items = [self.value() for _ in range(size)]
        attributes = self.value() if flags & _HAS_ATTRIBUTES else {}
        names = attributes.get("names") if kind == _LIST else None
        return dict(zip(names, items, strict=True)) if names else items
