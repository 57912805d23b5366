"""Builds safetensors files by hand, the bad ones above all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tensor(dtype: str, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def encode(header: bytes | Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file's bytes; `length` overrides the true length of the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path: Path, header: bytes | Any, data: bytes = b"", *, length: int | None = None) -> Path:
    path.write_bytes(encode(header, data, length=length))
    return path


def write_tensors(path: Path, *names: str, fill: int = 0) -> Path:
    """A valid file of 4-byte U8 tensors."""
    header = {name: tensor("U8", [4], [4 * i, 4 * i + 4]) for i, name in enumerate(names)}
    return write(path, header, bytes([fill]) * (4 * len(names)))


def write_index(path: Path, weight_map: Any) -> Path:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def one(dtype: str = '"U8"', shape: str = "[1]", offsets: str = "[0, 1]", extra: str = "", name: str = "w") -> bytes:
    """A header of one tensor, each part as JSON text."""
    return f'{{"{name}": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}{extra}}}}}'.encode()


_U8 = tensor("U8", [4], [0, 4])

# What both parsers accept: case -> file.
ACCEPTED: dict[str, bytes] = {
    "no tensors": encode({}),
    "padded with spaces": encode(b"{}      "),
    "padded with newlines": encode(b"{}\n\t\r "),
    "unaligned data": encode({"w": tensor("F32", [1], [0, 4])}, b"abcd"),
    "scalar": encode({"w": tensor("F32", [], [0, 4])}, b"abcd"),
    "empty tensor": encode({"w": tensor("F32", [0, 7], [0, 0])}),
    "empty tensors between others": encode(
        {"c": tensor("U8", [1], [4, 5]), "z": tensor("U8", [0], [4, 4]), "y": tensor("U8", [0], [0, 0]), "b": _U8},
        b"abcde",
    ),
    "entries out of order": encode({"b": tensor("U8", [4], [4, 8]), "a": _U8}, b"abcdefgh"),
    "null metadata": encode({"__metadata__": None}),
    "metadata": encode({"__metadata__": {"format": "pt"}, "w": _U8}, b"abcd"),
    "empty name": encode({"": _U8}, b"abcd"),
    "escaped name": encode(b'{"\\u00e9\\ud83d\\ude00": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
    "F4": encode({"w": tensor("F4", [3, 2], [0, 3])}, b"abc"),
    "C64": encode({"w": tensor("C64", [1], [0, 8])}, b"abcdefgh"),
}

# What both parsers refuse: case -> (file, reason, part of the text).
REFUSED: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "HeaderTooSmall", "found an empty file"),
    "less than a length": (b"\x02\0\0", "HeaderTooSmall", "found 3 bytes"),
    "length over the bound": (encode(b"{}", length=100_000_001), "HeaderTooLarge", "100000001"),
    "length of all ones": (encode(b"{}", length=2**64 - 1), "HeaderTooLarge", str(2**64 - 1)),
    "length beyond the file": (encode(b"{}", length=3), "InvalidHeaderLength", "byte 11, beyond the file's 10 bytes"),
    "length zero": (encode(b"", b"abcd", length=0), "NotSafetensors", ""),
    "length one": (encode(b"{", b"abcd"), "InvalidHeaderDeserialization", "length of 1"),
    "array": (encode(b"[]"), "InvalidHeaderStart", "b'['"),
    "byte order mark": (encode(b"\xef\xbb\xbf{}"), "InvalidHeaderStart", "xef"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "InvalidHeader", r"byte 2 of the header is b'\xff'"),
    "not JSON": (encode(b'{"w": '), "InvalidHeaderDeserialization", "malformed: Expecting value"),
    "padded with NUL": (encode(b"{}\0\0"), "InvalidHeaderDeserialization", "Extra data"),
    "text after the object": (encode(b"{} {}"), "InvalidHeaderDeserialization", "Extra data"),
    "control character": (encode(one(name="a\nb"), b"x"), "InvalidHeaderDeserialization", "control character"),
    "half a surrogate pair": (encode(one(name="\\ud800"), b"x"), "InvalidHeaderDeserialization", "surrogate"),
    "deep nesting": (encode(b'{"w":' * 200_000), "InvalidHeaderDeserialization", "nested too deeply"),
    "deep arrays": (encode(b'{"w":' + b"[" * 200_000), "InvalidHeaderDeserialization", "nested too deeply"),
    "duplicate name": (
        encode(
            one(offsets="[0, 1]")[:-1] + b", " + one(offsets="[1, 2]")[1:],
            b"xx",
        ),
        "InvalidHeaderDeserialization",
        'the key "w" occurs twice',
    ),
    "duplicate field": (
        encode(one(extra=', "dtype": "I8"'), b"x"),
        "InvalidHeaderDeserialization",
        'the key "dtype" occurs twice',
    ),
    "duplicate metadata": (
        encode(b'{"__metadata__": {}, "__metadata__": {}}'),
        "InvalidHeaderDeserialization",
        '"__metadata__" occurs twice',
    ),
    "metadata not strings": (
        encode({"__metadata__": {"a": 1}}),
        "InvalidHeaderDeserialization",
        "__metadata__: expected strings only, found 1",
    ),
    "metadata a list": (encode({"__metadata__": []}), "InvalidHeaderDeserialization", "found []"),
    "tensor null": (encode({"w": None}), "InvalidHeaderDeserialization", "found None"),
    "tensor a number": (encode({"w": 1}), "InvalidHeaderDeserialization", "found 1"),
    "dtype missing": (
        encode({"w": {"shape": [1], "data_offsets": [0, 1]}}, b"x"),
        "InvalidHeaderDeserialization",
        "dtype, shape and data_offsets",
    ),
    "dtype unknown": (encode({"w": tensor("F9", [1], [0, 1])}, b"x"), "UnsupportedDtype", "dtype F9 is not supported"),
    "dtype a number": (encode(one(dtype="8"), b"x"), "UnsupportedDtype", "found 8"),
    "dtype in lower case": (encode(one(dtype='"u8"'), b"x"), "UnsupportedDtype", "dtype u8 is not supported"),
    "shape missing": (encode(one(shape="null"), b"x"), "TensorInvalidInfo", "found None"),
    "shape a number": (encode(one(shape="1"), b"x"), "TensorInvalidInfo", "found 1"),
    "size a bool": (encode(one(shape="[true]"), b"x"), "TensorInvalidInfo", "[True]"),
    "size a float": (encode(one(shape="[1.0]"), b"x"), "TensorInvalidInfo", "[1.0]"),
    "size NaN": (encode(one(shape="[NaN]"), b"x"), "TensorInvalidInfo", "[nan]"),
    "size Infinity": (encode(one(shape="[Infinity]"), b"x"), "TensorInvalidInfo", "[inf]"),
    "size a string": (encode(one(shape='["1"]'), b"x"), "TensorInvalidInfo", "['1']"),
    "size negative": (encode(one(shape="[-1]"), b"x"), "TensorInvalidInfo", "[-1]"),
    "sizes negative": (encode(one(shape="[-1, -1]"), b"x"), "TensorInvalidInfo", "[-1, -1]"),
    "size minus zero": (encode(one(shape="[-0]", offsets="[0, 0]")), "InvalidHeaderDeserialization", "-0"),
    "size over 64 bits": (encode(one(shape="[18446744073709551616]"), b"x"), "ValidationOverflow", "2**63 - 1"),
    "size of a million digits": (
        encode(one(shape=f"[{'9' * 1_000_000}]"), b"x"),
        "InvalidHeaderDeserialization",
        "not a 64-bit integer",
    ),
    "product over 64 bits": (encode(one(shape="[4294967296, 4294967297]"), b"x"), "ValidationOverflow", "2**63 - 1"),
    "product of a million sizes": (
        encode(one(shape=json.dumps([2**62] * 1_000_000)), b"x"),
        "ValidationOverflow",
        "2**63 - 1",
    ),
    "overflow before a zero": (
        encode(one(shape="[1099511627776, 1099511627776, 0]", offsets="[0, 0]")),
        "ValidationOverflow",
        "",
    ),
    "offsets missing": (encode(one(offsets="null"), b"x"), "TensorInvalidInfo", "found None"),
    "offsets three": (encode(one(offsets="[0, 1, 2]"), b"x"), "TensorInvalidInfo", "[0, 1, 2]"),
    "offsets bool": (encode(one(offsets="[false, true]"), b"x"), "TensorInvalidInfo", "[False, True]"),
    "offsets float": (encode(one(offsets="[0, 1e0]"), b"x"), "TensorInvalidInfo", "[0, 1.0]"),
    "offsets negative": (encode(one(offsets="[-1, 0]"), b"x"), "InvalidOffset", "[-1, 0)"),
    "offsets reversed": (encode(one(offsets="[1, 0]"), b"x"), "InvalidOffset", "[1, 0)"),
    "offsets over 63 bits": (
        encode(one(offsets="[9223372036854775807, 9223372036854775808]"), b"x"),
        "ValidationOverflow",
        "2**63 - 1",
    ),
    "offsets that overflow with the header": (
        encode(one(offsets="[9223372036854775806, 9223372036854775807]"), b"x"),
        "ValidationOverflow",
        "2**63 - 1",
    ),
    "offsets do not match the shape": (
        encode({"w": tensor("F32", [2], [0, 4])}, b"abcd"),
        "TensorInvalidInfo",
        "takes 8 bytes, data_offsets [0, 4) are 4",
    ),
    "F4 with half a byte": (encode({"w": tensor("F4", [3], [0, 1])}, b"x"), "MisalignedSlice", "even last dimension"),
    "F4 scalar": (encode({"w": tensor("F4", [], [0, 1])}, b"x"), "MisalignedSlice", "even last dimension"),
    "hole at the start": (
        encode({"w": tensor("U8", [1], [1, 2])}, b"xx"),
        "InvalidOffset",
        "leave a hole: expected to begin at 0",
    ),
    "hole": (
        encode({"a": _U8, "b": tensor("U8", [1], [5, 6])}, b"abcdef"),
        "InvalidOffset",
        "leave a hole: expected to begin at 4",
    ),
    "same bytes twice": (encode({"a": _U8, "b": _U8}, b"abcd"), "InvalidOffset", "b: data_offsets [0, 4) overlap"),
    "overlap": (encode({"a": _U8, "b": tensor("U8", [4], [3, 7])}, b"abcdefg"), "InvalidOffset", "[3, 7) overlap"),
    "empty tensor inside another": (
        encode({"a": _U8, "z": tensor("U8", [0], [2, 2])}, b"abcd"),
        "InvalidOffset",
        "z: data_offsets [2, 2) overlap",
    ),
    "trailing bytes": (encode({"w": _U8}, b"abcdef"), "MetadataIncompleteBuffer", "trailing bytes"),
    "trailing bytes without tensors": (
        encode({}, b"x"),
        "MetadataIncompleteBuffer",
        "end at byte 10, the file has 11 bytes",
    ),
    "truncated inside a tensor": (encode({"w": _U8}, b"abc"), "MetadataIncompleteBuffer", "the file is truncated"),
    "truncated between tensors": (
        encode({"a": _U8, "b": tensor("U8", [4], [4, 8])}, b"abcd"),
        "MetadataIncompleteBuffer",
        "b: data_offsets [4, 8) exceed",
    ),
}

# What safetensors accepts and weightlift refuses (checkpoint.py says why): case -> (file, reason, part of the text).
STRICTER: dict[str, tuple[bytes, str, str]] = {
    "leading space": (encode(b" {}"), "InvalidHeaderStart", "b' '"),
    "same tensor twice": (
        encode(
            one()[:-1] + b", " + one()[1:],
            b"x",
        ),
        "InvalidHeaderDeserialization",
        'the key "w" occurs twice',
    ),
    "metadata key twice": (
        encode(b'{"__metadata__": {"a": "b", "a": "c"}}'),
        "InvalidHeaderDeserialization",
        'the key "a" occurs twice',
    ),
    "unknown field": (encode(one(extra=', "codec": "zstd"'), b"x"), "InvalidHeaderDeserialization", "codec"),
    "tensor an array": (encode(b'{"w": ["U8", [1], [0, 1]]}', b"x"), "InvalidHeaderDeserialization", "exactly dtype"),
    "dtype an object": (encode(one(dtype='{"U8": null}'), b"x"), "UnsupportedDtype", "{'U8': None}"),
    "F6_E2M3": (encode({"w": tensor("F6_E2M3", [4], [0, 3])}, b"abc"), "UnsupportedDtype", "dtype F6_E2M3"),
    "F6_E3M2": (encode({"w": tensor("F6_E3M2", [4], [0, 3])}, b"abc"), "UnsupportedDtype", "dtype F6_E3M2"),
    "F4 with an odd last dimension": (
        encode({"w": tensor("F4", [2, 3], [0, 3])}, b"abc"),
        "MisalignedSlice",
        "found shape [2, 3]",
    ),
    "empty, beyond torch": (
        encode(one(shape="[0, 1099511627776, 1099511627776]", offsets="[0, 0]")),
        "ValidationOverflow",
        "2**63 - 1",
    ),
    "empty, size over 63 bits": (
        encode(one(shape="[0, 18446744073709551615]", offsets="[0, 0]")),
        "ValidationOverflow",
        "2**63 - 1",
    ),
}
