"""R is not needed: the streams are built here by the rules of R Internals, and read back."""

import gzip
import struct
import zlib

import pytest

from unspoken.data.rds import read_lazy_data, read_rds
from unspoken.errors import UnspokenError

HEADER_2 = b"X\n" + struct.pack(">3i", 2, 0x040000, 0x020300)
HEADER_3 = b"X\n" + struct.pack(">4i", 3, 0x040000, 0x030500, 5) + b"UTF-8"
NULL = struct.pack(">i", 254)


def text(value: str | None) -> bytes:
    if value is None:
        return struct.pack(">2i", 9, -1)
    return struct.pack(">2i", 0x00040009, len(value.encode())) + value.encode()


def strings(*values: str | None) -> bytes:
    return struct.pack(">2i", 16, len(values)) + b"".join(map(text, values))


def integers(*values: int) -> bytes:
    return struct.pack(f">2i{len(values)}i", 13, len(values), *values)


def named_list(**values: bytes) -> bytes:
    """A list with a `names` attribute: a pairlist cell with a tag, whose symbol is written out."""
    names = struct.pack(">i", 0x402) + struct.pack(">i", 1) + text("names") + strings(*values) + NULL
    return struct.pack(">2i", 0x200 | 19, len(values)) + b"".join(values.values()) + names


@pytest.mark.parametrize("header", [HEADER_2, HEADER_3])
def test_vectors_are_read(header):
    assert read_rds(header + strings("It is", "", "naïve", None)) == ["It is", "", "naïve", None]
    assert read_rds(header + integers(1, -2)) == [1, -2]
    assert read_rds(header + struct.pack(">2i2d", 14, 2, 0.5, -1.0)) == [0.5, -1.0]
    assert read_rds(header + NULL) is None


def test_named_lists_nest_and_symbols_are_referred_to():
    inner = named_list(offset=integers(3))
    referring = inner.replace(struct.pack(">i", 1) + text("names"), struct.pack(">i", 0x1FF))
    assert read_rds(HEADER_3 + named_list(a=inner, b=strings("x"))) == {"a": {"offset": [3]}, "b": ["x"]}
    assert referring != inner
    assert read_rds(HEADER_3 + struct.pack(">2i", 19, 2) + inner + referring) == [{"offset": [3]}, {"offset": [3]}]


@pytest.mark.parametrize("compress", [zlib.compress, gzip.compress])
def test_the_data_base_of_a_package_is_read(compress):
    streams = {"emma": HEADER_3 + strings("EMMA", "by"), "persuasion": HEADER_3 + strings("Persuasion")}
    rdb, variables = b"", {}
    for name, stream in streams.items():
        chunk = struct.pack(">i", len(stream)) + zlib.compress(stream)
        variables[name] = integers(len(rdb), len(chunk))
        rdb += chunk
    rdx = compress(HEADER_3 + named_list(variables=named_list(**variables), compressed=integers(1)))
    assert read_lazy_data(rdb, rdx) == {"emma": ["EMMA", "by"], "persuasion": ["Persuasion"]}


def test_what_is_not_understood_is_refused():
    with pytest.raises(UnspokenError, match="not an RDS stream"):
        read_rds(b"RDX3")
    with pytest.raises(UnspokenError, match="R type 3 is not one"):
        read_rds(HEADER_3 + struct.pack(">i", 3))
    with pytest.raises(UnspokenError, match="ends too early"):
        read_rds(HEADER_3 + strings("a", "b")[:-1])
