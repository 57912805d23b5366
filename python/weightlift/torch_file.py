"""PyTorch's formats: where in a file of `torch.save` each tensor lies, told without trust and without reading data.

Both of them: the zip archive (since torch 1.6), whose members hold one storage each, uncompressed; and the one before,
a row of pickles with the storages behind them. What `torch.load(weights_only=True)` refuses is refused here, and also:
- what is not a dictionary from names to plain tensors. Numbers, optimizer states and weights nested under a key
  are named, not guessed at; quantised and sparse tensors and subclasses have no elements in rows that a copy can take;
- archives that are compressed (no part of them can be read alone), have overlapping members, or the other byte order;
- storages shorter than their tensors, which torch reads beyond.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import torch

from . import torch_pickle
from .entries import Shard, TensorEntry
from .errors import CheckpointError, listed, printable
from .files import DOWNLOAD_AGAIN, open_regular, read_at, refused
from .safetensors_file import IMPOSTORS, MAX_INT64, MAX_JSON_BYTES
from .tensor import contiguous_strides
from .torch_pickle import PLAIN_TENSORS, SavedStorage, SavedTensor

# No pickle and no zip directory is longer: the bound on the header of a safetensors file.
_MAX_HEADER_BYTES = MAX_JSON_BYTES
# torch's own bound in most operations.
_MAX_DIMS = 64

# What a file of the older format starts with: a pickle of torch's magic number.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LEGACY_START = b"\x80\x02\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little") + b"."
_ZIP_START = b"PK\x03\x04"
_START_BYTES = 64

# Records of a zip archive (APPNOTE.TXT, 4.3), without the fields that say nothing here.
_END = struct.Struct("<4s4H2LH")  # signature, two disks, twice entries, bytes and offset of directory, bytes of comment
_LOCATOR64 = struct.Struct("<4s4xQ4x")  # signature, offset of the record:
_END64 = struct.Struct("<4s12x2L4Q")  # signature, two disks, twice entries, bytes and offset of directory
_END_BYTES = _END64.size + _LOCATOR64.size + _END.size
# signature, flags, method, packed size, size, bytes of name, extra fields and comment, disk, attributes, offset of
# local header
_ENTRY = struct.Struct("<4s4x2H8x2L4H2x2L")
_LOCAL = struct.Struct("<4s22x2H")  # signature, bytes of name and extra fields
_ZIP64_EXTRA = 1
_IS_FOLDER = 0x10  # MS-DOS attributes: torch then reads nothing, and hands out what was in memory
_PLAIN_FLAGS = 0x808  # sizes also behind the content; names in UTF-8: no encryption, no patches
_MAX_UINT32 = 0xFFFFFFFF
# The versions of the archive's layout that torch reads.
_ARCHIVE_VERSIONS = {str(version).encode() for version in range(1, 11)}


def read_torch_shard(path: str | os.PathLike[str]) -> Shard:
    """Reads where the tensors of a file of `torch.save` lie.

    Tensors keep the strides that they were saved with. Those that share a storage become entries that overlap. In the
    older format up to a buffer (8 KiB) of data behind the pickles is read along.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointReadError: it cannot be opened or read, or it became shorter meanwhile.
        CheckpointError: it is not a regular file, not a valid file of `torch.save`, or holds something other than a
            dictionary of plain tensors; `reason` says why.
    """
    path = os.fsdecode(path)
    fd, status = open_regular(path)
    try:
        # What is read lies apart: reading ahead would bring in the data between.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        start = read_at(fd, path, 0, min(status.st_size, _START_BYTES))
        if start.startswith(_ZIP_START):
            content = _read_archive(fd, path, status.st_size)
        elif start.startswith(_LEGACY_START):
            content = _read_legacy(fd, path, status.st_size)
        else:
            _refuse_other_format(path, start, status.st_size)
    finally:
        os.close(fd)
    shard = Shard.of_file(path, status)
    shard.metadata = {}
    tensors = _state_dict(content, path)
    entries = sorted((_entry(shard, *item) for item in tensors.items()), key=attrgetter("offset", "nbytes"))
    shard.data_offset = min((entry.offset for entry in entries), default=status.st_size)
    shard.tensors = tuple(entries)
    return shard


def _refuse_other_format(path: str, start: bytes, size: int) -> NoReturn:
    found, remedy = f"a file that starts with {start[:8]!r}", DOWNLOAD_AGAIN
    for pattern, kind, advice in IMPOSTORS:
        if pattern.match(start):
            found, remedy = kind, advice
    if start[8:9] == b"{":
        found, remedy = "what may be a safetensors file", "name it *.safetensors"
    if not size:
        found = "an empty file"
    raise CheckpointError(
        f"expected a file of `torch.save`, found {found} ({size} bytes); {remedy}", path=path, reason="NotTorchFile"
    )


# ---- the zip archive


@dataclass(slots=True)
class _Member:
    name: bytes
    header: int  # offset of the local header
    size: int
    is_stored: bool
    limit: int = 0  # where the next member or the directory begins


class _Archive:
    """The directory of a zip archive in a file. Members are known by their names below the archive's one folder."""

    def __init__(self, fd: int, path: str, size: int) -> None:
        self._fd = fd
        self._path = path
        start, num_bytes, num_members = self._find_directory(size)
        try:
            members = _parse_directory(read_at(fd, path, start, num_bytes), num_members)
            folder, slash, _ = members[0].name.partition(b"/")
            self.members = {member.name.removeprefix(folder + slash).decode(): member for member in members}
        except (struct.error, IndexError, ValueError):
            self._fault("the directory of its zip archive is malformed")
        if not slash or not all(member.name.startswith(folder + slash) for member in members):
            self._fault("the members of its zip archive are not in one folder")
        # torch looks names up without regard to case.
        if len({name.lower() for name in self.members}) != len(members):
            self._fault("two members of its zip archive have one name")
        members.sort(key=attrgetter("header"))
        for member, following in itertools.pairwise(members):
            member.limit = following.header
        members[-1].limit = start

    def _fault(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{problem}; the file is corrupt, {DOWNLOAD_AGAIN}", path=self._path, reason="InvalidArchive"
        )

    def _find_directory(self, size: int) -> tuple[int, int, int]:
        """Where the directory begins, its bytes and entries. torch writes no comment behind it."""
        num_bytes = min(size, _END_BYTES)
        tail = read_at(self._fd, self._path, size - num_bytes, num_bytes).rjust(_END_BYTES)
        end = size - _END.size
        signature, disk, first_disk, num_here, num_members, num_bytes, start, comment = _END.unpack(tail[-_END.size :])
        if signature != b"PK\x05\x06" or comment:
            self._fault(f"expected the end of a zip archive in its last {_END.size} bytes")
        signature, end64 = _LOCATOR64.unpack_from(tail, _END64.size)
        if signature == b"PK\x06\x07":
            end = size - len(tail)
            signature, disk, first_disk, num_here, num_members, num_bytes, start = _END64.unpack_from(tail)
            if signature != b"PK\x06\x06" or end64 != end:
                self._fault("the zip64 record is not where its zip archive says")
        if disk or first_disk or num_here != num_members:
            self._fault("its zip archive claims several disks")
        if start + num_bytes != end or num_bytes > _MAX_HEADER_BYTES:
            self._fault(f"its zip archive claims a directory of {num_bytes} bytes at byte {start}, which does not fit")
        return start, num_bytes, num_members

    def find(self, name: str) -> tuple[int, int]:
        """Offset in the file and bytes of a member's content, which is inside of it and overlaps nothing."""
        member = self.members.get(name)
        if member is None:
            self._fault(f"its zip archive has no member {printable(name)}")
        if not member.is_stored:
            raise CheckpointError(
                f"{printable(name)} is compressed or encrypted in its zip archive, and has to be read whole; "
                "save the file again: `torch.save(torch.load(path, weights_only=True), path)`",
                path=self._path,
                reason="CompressedArchive",
            )
        num_bytes = _LOCAL.size + len(member.name)
        if member.header + num_bytes > member.limit:
            self._fault(f"{printable(name)} overlaps the next member of its zip archive")
        header = read_at(self._fd, self._path, member.header, num_bytes)
        # The directory does not tell where the content begins: the local header has fields of its own for padding.
        signature, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
        if signature != _ZIP_START or name_bytes != len(member.name) or header[_LOCAL.size :] != member.name:
            self._fault(f"{printable(name)} is not where its zip archive says")
        offset = member.header + num_bytes + extra_bytes
        if offset + member.size > member.limit:
            self._fault(f"{printable(name)} overlaps the next member of its zip archive")
        return offset, member.size

    def read(self, name: str) -> bytes:
        offset, num_bytes = self.find(name)
        if num_bytes > _MAX_HEADER_BYTES:
            self._fault(f"{name} has {num_bytes} bytes, expected {_MAX_HEADER_BYTES} at most")
        return read_at(self._fd, self._path, offset, num_bytes)


def _parse_directory(directory: bytes, num_members: int) -> list[_Member]:
    members = []
    position = 0
    while position < len(directory):
        signature, flags, method, packed, size, *lengths, disk, attributes, header = _ENTRY.unpack_from(
            directory, position
        )
        name_bytes, extra_bytes, comment_bytes = lengths
        position += _ENTRY.size
        name = directory[position : position + name_bytes]
        extra = directory[position + name_bytes : position + name_bytes + extra_bytes]
        position += name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\x01\x02" or disk or attributes & _IS_FOLDER or position > len(directory):
            raise ValueError
        wide = _zip64_sizes(extra)
        size, packed, header = (wide.pop(0) if value == _MAX_UINT32 else value for value in (size, packed, header))
        is_stored = method == 0 and packed == size and not flags & ~_PLAIN_FLAGS
        members.append(_Member(name, header, size, is_stored))
    if len(members) != num_members:
        raise ValueError
    return members


def _zip64_sizes(extra: bytes) -> list[int]:
    """Those of size, packed size and offset that have no room in 32 bits, in this order."""
    position = 0
    while position < len(extra):
        kind, num_bytes = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == _ZIP64_EXTRA:
            return [*struct.unpack_from(f"<{num_bytes // 8}Q", extra, position)]
        position += num_bytes
    return []


def _read_archive(fd: int, path: str, size: int) -> Any:
    archive = _Archive(fd, path, size)
    if "constants.pkl" in archive.members:
        raise CheckpointError(
            "expected a file of `torch.save`, found a TorchScript archive; "
            "save its weights: `torch.save(torch.jit.load(path).state_dict(), other)`",
            path=path,
            reason="TorchScript",
        )
    for name in archive.members:
        if not name.startswith("data/"):
            archive.find(name)  # torch opens them too
    version = archive.read("version").strip()
    if version not in _ARCHIVE_VERSIONS:
        raise CheckpointError(
            f"expected an archive of version 1 to {len(_ARCHIVE_VERSIONS)}, found {version[:20]!r}; update weightlift",
            path=path,
            reason="UnsupportedVersion",
        )
    order = archive.read("byteorder") if "byteorder" in archive.members else b"little"
    if order != sys.byteorder.encode():
        raise CheckpointError(
            f"expected {sys.byteorder}-endian tensors, found byte order {order[:20]!r}; "
            "load it by `torch.load` and save it again on this machine",
            path=path,
            reason="UnsupportedByteOrder",
        )
    storages: dict[str, SavedStorage] = {}

    def find_storage(key: str, dtype: torch.dtype, nbytes: int) -> SavedStorage:
        storage = storages.get(key)
        if storage is None:
            offset, num_bytes = archive.find(f"data/{key}")
            if not 0 <= num_bytes - nbytes < dtype.itemsize:
                raise ValueError(f"a storage of {nbytes} bytes in a member of {num_bytes}")
            storage = storages[key] = SavedStorage(dtype, nbytes, offset)
        return storage

    pickled = io.BytesIO(archive.read("data.pkl"))
    return torch_pickle.load(pickled, path, max_bytes=_MAX_HEADER_BYTES, find_storage=find_storage)


# ---- the older format


def _read_legacy(fd: int, path: str, size: int) -> Any:
    storages: dict[str, SavedStorage] = {}

    def find_storage(key: str, dtype: torch.dtype, nbytes: int) -> SavedStorage:
        return storages.setdefault(key, SavedStorage(dtype, nbytes))

    def fault(problem: str) -> CheckpointError:
        return CheckpointError(f"{problem}; the file is corrupt, {DOWNLOAD_AGAIN}", path=path, reason="InvalidStorages")

    def load(**kwargs: Any) -> Any:
        return torch_pickle.load(stream, path, max_bytes=_MAX_HEADER_BYTES, **kwargs)

    try:
        with io.BufferedReader(io.FileIO(fd, closefd=False)) as stream:
            load()  # the magic number
            if load() != _LEGACY_PROTOCOL:
                raise fault(f"expected protocol {_LEGACY_PROTOCOL}")
            load()  # sizes of C's types, which torch does not look at
            content = load(find_storage=find_storage, id_tail=(None,))
            keys = load()
            position = stream.tell()
    except OSError as error:
        raise refused("read", path, error) from error
    if type(keys) is not list or any(type(key) is not str for key in keys) or {*keys} != {*storages}:
        raise fault("the storages of its tensors and those of its data are not the same")
    for key in keys:
        storage = storages[key]
        if position + 8 > size:
            raise fault(f"expected the size of a storage at byte {position}, the file has {size}; it is truncated")
        num_elements = int.from_bytes(read_at(fd, path, position, 8), "little", signed=True)
        if num_elements * storage.dtype.itemsize != storage.nbytes:
            raise fault(
                f"expected a storage of {storage.nbytes} bytes at byte {position}, found {num_elements} elements"
            )
        storage.offset = position + 8
        position = storage.offset + storage.nbytes
    if position > size:
        raise fault(f"its storages end at byte {position}, the file has {size}; it is truncated")
    return content


# ---- from what was saved to entries


def _state_dict(content: Any, path: str) -> dict[str, SavedTensor]:
    if not isinstance(content, dict):
        raise CheckpointError(
            f"expected a dictionary from names to tensors, found {_described(content)}; {PLAIN_TENSORS}",
            path=path,
            reason="NotStateDict",
        )
    for name in content:
        if type(name) is not str:
            raise CheckpointError(
                f"expected the names of tensors, found the key {name!r}; {PLAIN_TENSORS}",
                path=path,
                reason="NotStateDict",
            )
    others = {name: value for name, value in content.items() if type(value) is not SavedTensor}
    if others:
        nested = [name for name, value in others.items() if _is_state_dict(value)]
        remedy = PLAIN_TENSORS
        if nested:
            remedy = (
                f'if the weights are those under "{printable(nested[0])}", save them alone: '
                f"`torch.save(torch.load(path, weights_only=True)[{ascii(nested[0])[:100]}], other)`"
            )
        raise CheckpointError(
            f"expected tensors only, found {listed(f'{name} ({_described(value)})' for name, value in others.items())}"
            f"; {remedy}",
            path=path,
            reason="NotStateDict",
        )
    return content


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(type(item) is SavedTensor for item in value.values())


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dictionary with {len(value)} {'tensors' if _is_state_dict(value) else 'keys'}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return {SavedTensor: "a tensor", type(None): "None"}.get(type(value), type(value).__name__)


def _entry(shard: Shard, name: str, tensor: SavedTensor) -> TensorEntry:
    def fault(problem: str) -> CheckpointError:
        return CheckpointError(f"{problem}; the file is corrupt", path=shard.path, tensor=name, reason="InvalidTensor")

    shape, strides, storage = tensor.shape, tensor.strides, tensor.storage
    if len(shape) > _MAX_DIMS:
        raise fault(f"expected {_MAX_DIMS} dimensions at most, found {len(shape)}")
    itemsize = tensor.dtype.itemsize
    # Zeros count as one: torch computes with such products.
    if math.prod(size or 1 for size in shape) * itemsize > MAX_INT64 or max(strides, default=0) > MAX_INT64:
        raise fault(f"the elements of shape {_shortened(shape)} with strides {_shortened(strides)} pass 2**63 - 1")
    span = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    begin, end = tensor.offset * itemsize, (tensor.offset + span) * itemsize
    if span and end > storage.nbytes:
        raise fault(
            f"shape {_shortened(shape)} with strides {_shortened(strides)} from element {tensor.offset} on ends at "
            f"byte {end} of its storage, which has {storage.nbytes}"
        )
    return TensorEntry(
        name,
        tensor.dtype,
        shape,
        storage.offset + (begin if span else 0),
        span * itemsize,
        shard,
        None if strides == contiguous_strides(shape) else strides,
    )


def _shortened(sizes: Iterable[int]) -> str:
    sizes = [*sizes]
    return f"{tuple(sizes[:8])}" if len(sizes) <= 8 else f"{tuple(sizes[:8])} and {len(sizes) - 8} more"
