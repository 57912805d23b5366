"""The safetensors format: a file's header, read without trust.

Headers are parsed strictly and taken for hostile: nothing here crashes, hangs or allocates by a number that a file
claims, and what is wrong with a file is one `CheckpointError`. Only headers are read, no tensor data.

What safetensors 0.8 refuses is refused here, and also:
- a header that does not start with `{` (the format demands it; safetensors passes whitespace);
- a tensor name or metadata key that occurs twice, fields beyond `dtype`, `shape` and `data_offsets`, a tensor written
  as an array, a dtype as an object: what they were meant to say is a guess;
- what torch cannot hold: dtypes that it lacks (`F6_E2M3`, `F6_E3M2`), F4 whose last dimension is odd or absent, shapes
  whose strides pass 2**63 - 1 (only empty tensors can). One such tensor refuses the whole file.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NoReturn

import torch

from .collector import collector_paused
from .entries import Shard, TensorEntry
from .errors import CheckpointError, printable
from .files import DOWNLOAD_AGAIN, open_regular, read_at

# The format's bound on a header (safetensors' MAX_HEADER_SIZE); an index is held to it too.
MAX_JSON_BYTES = 100_000_000
# Offsets and lengths go to C++ and to the operating system as int64.
MAX_INT64 = 2**63 - 1

# name in the header -> (name in torch, bits per element, first torch that has it)
_FORMAT_DTYPES = {
    "BOOL": ("bool", 8, "1.2"),
    "U8": ("uint8", 8, "1.0"),
    "I8": ("int8", 8, "1.0"),
    "F8_E4M3": ("float8_e4m3fn", 8, "2.1"),
    "F8_E5M2": ("float8_e5m2", 8, "2.1"),
    "F8_E8M0": ("float8_e8m0fnu", 8, "2.7"),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8, "2.2"),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8, "2.2"),
    "F4": ("float4_e2m1fn_x2", 4, "2.8"),
    "I16": ("int16", 16, "1.0"),
    "U16": ("uint16", 16, "2.3"),
    "F16": ("float16", 16, "1.0"),
    "BF16": ("bfloat16", 16, "1.2"),
    "I32": ("int32", 32, "1.0"),
    "U32": ("uint32", 32, "2.3"),
    "F32": ("float32", 32, "1.0"),
    "I64": ("int64", 64, "1.0"),
    "U64": ("uint64", 64, "2.3"),
    "F64": ("float64", 64, "1.0"),
    "C64": ("complex64", 64, "1.6"),
}
_DTYPES: dict[str, tuple[torch.dtype, int]] = {
    name: (getattr(torch, attribute), bits)
    for name, (attribute, bits, _) in _FORMAT_DTYPES.items()
    if hasattr(torch, attribute)
}
# What the format calls torch's dtypes.
FORMAT_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}

_METADATA = "__metadata__"
_TENSOR_FIELDS = frozenset({"dtype", "shape", "data_offsets"})

# A header length that is allowed ends in a zero byte; without this, one like 0x7b20 would pass for ` {`.
_NO_LENGTH = rb"(?=[^\0]{8})"
# First bytes of what is found in the place of a shard -> what it is, and the remedy.
CONVERT = (
    "load it with the tool that wrote it and save it as safetensors (in transformers: `model.save_pretrained(folder)`)"
)
IMPOSTORS: list[tuple[re.Pattern[bytes], str, str]] = [
    (re.compile(rb"version https://git-lfs"), "a git-lfs pointer", "fetch the file itself with `git lfs pull`"),
    (
        re.compile(_NO_LENGTH + rb"(\xef\xbb\xbf)?\s*<[!?A-Za-z]"),
        "an HTML or XML page, most likely a server's error message",
        f"check address and access rights and {DOWNLOAD_AGAIN}",
    ),
    (re.compile(rb"PK\x03\x04"), "a zip archive, such as `torch.save` writes", CONVERT),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle, such as `torch.save` writes", CONVERT),
    (re.compile(rb"\x1f\x8b"), "gzip-compressed", "unpack it with `gunzip`"),
    (re.compile(rb"GGUF"), "a GGUF file", "get the checkpoint that it was made from, in safetensors"),
    (
        re.compile(_NO_LENGTH + rb"\s*[{\[]"),
        "a JSON text without the length that starts a safetensors file",
        DOWNLOAD_AGAIN,
    ),
    (re.compile(rb"\0{8}"), "a file that starts with zeros, as an interrupted download leaves it", DOWNLOAD_AGAIN),
]
_IMPOSTOR_BYTES = 64
# Most headers are shorter: across a network, where an answer takes milliseconds, one read has to do.
_FIRST_BYTES = 128 << 10


def read_shard(path: str | os.PathLike[str]) -> Shard:
    """Reads and validates the header of one safetensors file.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointReadError: it cannot be opened or read, or it became shorter meanwhile.
        CheckpointError: it is not a regular file, or not a valid safetensors file; `reason` says why.
    """
    path = os.fsdecode(path)
    fd, status = open_regular(path)
    shard = Shard.of_file(path, status)
    try:
        # Reading ahead brings in tensors that are read past the page cache, and leaves marks on pages, upon which reads
        # by other descriptors read ahead too.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        _fill(shard, lambda offset, length: read_at(fd, path, offset, length))
    finally:
        os.close(fd)
    return shard


def shard_of_bytes(data: bytes) -> Shard:
    """Reads and validates the header of a safetensors file that is in memory. No file: its path is a name for errors.

    Raises:
        CheckpointError: as `read_shard`.
    """
    shard = Shard("<bytes>", len(data), device=0, inode=0, mtime_ns=0, data_offset=0, metadata=None, tensors=())
    _fill(shard, lambda offset, length: data[offset : offset + length])
    return shard


def _fill(shard: Shard, read: Callable[[int, int], bytes]) -> None:
    """Reads and parses the header of `shard`, of which only the file is known so far."""
    header = _read_header(read, shard.path, shard.size)
    shard.data_offset = 8 + len(header)
    with collector_paused():
        _parse_header(shard, header)


def _read_header(read: Callable[[int, int], bytes], path: str, size: int) -> bytes:
    """The JSON text of a file of `size` bytes; it starts with `{`."""
    first = read(0, min(size, _FIRST_BYTES))
    start = first[:_IMPOSTOR_BYTES]

    def fault(reason: str, problem: str) -> NoReturn:
        for pattern, kind, remedy in IMPOSTORS:
            if pattern.match(start):
                raise CheckpointError(
                    f"expected a safetensors file, found {kind} ({size} bytes); {remedy}",
                    path=path,
                    reason="NotSafetensors",
                )
        raise CheckpointError(problem, path=path, reason=reason)

    if size < 8:
        found = f"found {size} bytes" if size else "found an empty file"
        fault("HeaderTooSmall", f"expected a header length of 8 bytes, {found}; {DOWNLOAD_AGAIN}")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_JSON_BYTES:
        fault(
            "HeaderTooLarge",
            f"expected a header of {MAX_JSON_BYTES} bytes at most, found a header length of {length}; "
            "this is not a safetensors file, or it is corrupt",
        )
    if 8 + length > size:
        fault(
            "InvalidHeaderLength",
            f"the header ends at byte {8 + length}, beyond the file's {size} bytes; "
            f"the file is truncated, {DOWNLOAD_AGAIN}",
        )
    if length < 2:
        fault("InvalidHeaderDeserialization", f"expected a JSON header, found a header length of {length}")
    if start[8:9] != b"{":
        fault(
            "InvalidHeaderStart", f"expected a header that starts with '{{', found {start[8:9]!r}; the file is corrupt"
        )
    end = 8 + length
    return first[8:end] if end <= len(first) else first[8:] + read(len(first), end - len(first))


def _parse_header(shard: Shard, header: bytes) -> None:
    """Fills `shard.metadata` and `shard.tensors`."""
    members = parse_json(header, shard.path, "header", ("InvalidHeader", "InvalidHeaderDeserialization"))
    shard.metadata = _parse_metadata(members.pop(_METADATA, None), shard.path)
    metadata = shard.metadata or {}
    _check_unicode([*members, *metadata, *metadata.values()], shard.path)
    entries = [_parse_tensor(shard, name, info) for name, info in members.items()]
    entries.sort(key=attrgetter("offset", "nbytes"))
    _check_layout(shard, entries)
    shard.tensors = tuple(entries)


def parse_json(text: bytes, path: str, what: str, reasons: tuple[str, str]) -> dict[str, Any]:
    """The JSON object in `text`, without duplicate keys; `reasons` for bad UTF-8 and for all else."""
    not_utf8, reason = reasons
    try:
        members = json.loads(text.decode(), object_pairs_hook=_distinct, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        at = f"byte {error.start} of the {what} is {text[error.start : error.start + 1]!r}"
        raise CheckpointError(f"expected UTF-8, {at}; the file is corrupt", path=path, reason=not_utf8) from None
    except RecursionError:
        raise CheckpointError(
            f"the {what} is malformed: nested too deeply; the file is corrupt", path=path, reason=reason
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"the {what} is malformed: {error}; the file is corrupt", path=path, reason=reason
        ) from None
    if type(members) is not dict:
        raise CheckpointError(f"expected a JSON object, found {reprlib.repr(members)}", path=path, reason=reason)
    return members


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f'the key "{printable(twice)}" occurs twice')
    return members


def _parse_int(digits: str) -> int:
    # int() takes quadratic time (or raises, by version) for millions of digits; 20 and a sign reach beyond 64 bits.
    # "-0" is a float by safetensors' reading, and so not a size.
    if len(digits) > 21 or digits == "-0":
        raise ValueError(f"{printable(digits[:32])} is not a 64-bit integer")
    return int(digits)


def _parse_metadata(value: Any, path: str) -> dict[str, str] | None:
    if value is None:
        return None
    if type(value) is not dict:
        found = reprlib.repr(value)
    else:
        faults = (f"{reprlib.repr(v)} under {reprlib.repr(k)}" for k, v in value.items() if type(v) is not str)
        found = next(faults, "")
    if found:
        raise CheckpointError(
            f"expected strings only, found {found}", path=path, tensor=_METADATA, reason="InvalidHeaderDeserialization"
        )
    metadata: dict[str, str] = value
    return metadata


def _check_unicode(strings: Iterable[str], path: str) -> None:
    try:
        "\0".join(strings).encode()
    except UnicodeEncodeError:
        problem = "the header is malformed: half of a surrogate pair in a name or in the metadata"
        raise CheckpointError(problem, path=path, reason="InvalidHeaderDeserialization") from None


def _parse_tensor(shard: Shard, name: str, info: Any) -> TensorEntry:
    """Checks all that can be said of one tensor alone."""

    def fault(reason: str, problem: str) -> CheckpointError:
        return CheckpointError(problem, path=shard.path, tensor=name, reason=reason)

    if type(info) is not dict or info.keys() != _TENSOR_FIELDS:
        raise fault(
            "InvalidHeaderDeserialization",
            f"expected exactly dtype, shape and data_offsets, found {reprlib.repr(info)}",
        )
    dtype, dims, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if type(dtype) is not str or dtype not in _DTYPES:
        raise fault("UnsupportedDtype", _unsupported_dtype(dtype))
    torch_dtype, bits = _DTYPES[dtype]

    if type(dims) is not list:
        raise fault("TensorInvalidInfo", f"expected a shape, a list of sizes, found {reprlib.repr(dims)}")
    stride = 1  # what torch would compute for a dimension before the first: zeros count as one
    for size in dims:
        if type(size) is not int or size < 0:
            raise fault("TensorInvalidInfo", f"expected sizes of 0 or more, found shape {reprlib.repr(dims)}")
        stride *= size or 1
        if stride > MAX_INT64:
            raise fault("ValidationOverflow", f"the elements of shape {reprlib.repr(dims)} are more than 2**63 - 1")

    if type(offsets) is not list or [type(offset) for offset in offsets] != [int, int]:
        raise fault("TensorInvalidInfo", f"expected data_offsets [begin, end], found {reprlib.repr(offsets)}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise fault("InvalidOffset", f"expected 0 <= begin <= end, found data_offsets [{begin}, {end})")
    if end > MAX_INT64 - shard.data_offset:
        raise fault("ValidationOverflow", f"data_offsets [{begin}, {end}) pass 2**63 - 1")

    nbits = 0 if 0 in dims else stride * bits
    if bits == 4 and (not dims or dims[-1] % 2):
        raise fault("MisalignedSlice", f"two F4 share a byte: expected an even last dimension, found shape {dims}")
    if nbits != 8 * (end - begin):
        raise fault(
            "TensorInvalidInfo",
            f"{dtype} of shape {reprlib.repr(dims)} takes {nbits // 8} bytes, "
            f"data_offsets [{begin}, {end}) are {end - begin}; the file is corrupt",
        )
    shape = (*dims[:-1], dims[-1] // 2) if bits == 4 else tuple(dims)
    return TensorEntry(name, torch_dtype, shape, shard.data_offset + begin, end - begin, shard)


def _unsupported_dtype(dtype: Any) -> str:
    if type(dtype) is not str:
        return f"expected the name of a dtype, found {reprlib.repr(dtype)}"
    if dtype in _FORMAT_DTYPES:
        name, _, version = _FORMAT_DTYPES[dtype]
        return f"dtype {dtype} (torch.{name}) needs torch {version} or newer, found {torch.__version__}; update torch"
    return (
        f"dtype {printable(dtype)} is not supported, torch has none such; convert or remove the tensor, "
        f"a file that holds one cannot be opened (supported: {', '.join(_FORMAT_DTYPES)})"
    )


def _check_layout(shard: Shard, entries: list[TensorEntry]) -> None:
    """The data of `entries`, sorted, must fill the file from `data_offset` to its end, without holes and overlaps."""
    position = shard.data_offset
    for index, entry in enumerate(entries):
        if entry.offset != position:
            begin = entry.offset - shard.data_offset
            bounds = f"data_offsets [{begin}, {begin + entry.nbytes})"
            before = f'the end of "{printable(entries[index - 1].name)}"' if index else "the start of the data"
            kind = "overlap the tensor before" if entry.offset < position else "leave a hole"
            raise CheckpointError(
                f"{bounds} {kind}: expected to begin at {position - shard.data_offset}, {before}; the file is corrupt",
                path=shard.path,
                tensor=entry.name,
                reason="InvalidOffset",
            )
        position += entry.nbytes
    if position < shard.size:
        raise CheckpointError(
            f"trailing bytes: the tensors end at byte {position}, the file has {shard.size} bytes; "
            f"the file is corrupt, {DOWNLOAD_AGAIN}",
            path=shard.path,
            reason="MetadataIncompleteBuffer",
        )
    if position > shard.size:
        cut = next(entry for entry in entries if entry.offset + entry.nbytes > shard.size)
        begin = cut.offset - shard.data_offset
        raise CheckpointError(
            f"data_offsets [{begin}, {begin + cut.nbytes}) exceed the file's {shard.size} bytes, "
            f"the tensors need {position}; the file is truncated, {DOWNLOAD_AGAIN}",
            path=shard.path,
            tensor=cut.name,
            reason="MetadataIncompleteBuffer",
        )
