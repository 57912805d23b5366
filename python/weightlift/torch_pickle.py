"""The pickles in PyTorch's files, read by a machine that makes containers and descriptions of tensors, nothing else.

It knows the opcodes that `torch.load(weights_only=True)` knows, and of the names that it allows those that plain
tensors need. No name is imported, and what a file calls is one of the functions below. It is not torch's own unpickler,
because that one allocates by numbers that a file claims, and hashes what a file nests as deep as it likes.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import CheckpointError, printable

# Names of storages in a pickle -> dtype; quantised ones are left out.
_STORAGE_TYPES = {
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
# Younger dtypes have no storage type of their own; not all torch versions have them all.
_YOUNGER_DTYPES = (
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
# What is not a plain tensor, by the name that its pickle calls.
_OTHER_TENSORS = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
    "torch._utils._rebuild_parameter_with_state": "a parameter with attributes",
    "torch._tensor._rebuild_from_type_v2": "a tensor subclass, or a tensor with attributes",
}
PLAIN_TENSORS = (
    "load the file with the tool that wrote it and save a dictionary of plain tensors, best as safetensors: "
    "`safetensors.torch.save_file`"
)

_MAX_NAME_BYTES = 1024
_KEY_TYPES = (str, int, float, bool, type(None))  # whose hash is safe to take
_WORD = struct.Struct("<I")


@dataclass(slots=True, eq=False)
class SavedStorage:
    """Memory that tensors share. `offset` is of its first byte in the file, negative as long as it is not known."""

    dtype: torch.dtype
    nbytes: int
    offset: int = -1


@dataclass(slots=True, eq=False)
class SavedTensor:
    """What a pickle says of a tensor; whether it fits into its storage is not checked. `offset` is in elements."""

    storage: SavedStorage = field(repr=False)
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unsupported(Exception):
    """Well-formed, and not what a checkpoint of plain tensors holds."""


@dataclass(slots=True, eq=False)
class _Function:
    call: Callable[..., Any]


@dataclass(slots=True, eq=False)
class _StorageType:
    dtype: torch.dtype


def load(
    stream: io.BufferedIOBase,
    path: str,
    *,
    max_bytes: int,
    find_storage: Callable[[str, torch.dtype, int], SavedStorage] | None = None,
    id_tail: tuple[None, ...] = (),
) -> Any:
    """Reads one pickle, and leaves the stream behind its end.

    Args:
        path: for errors.
        max_bytes: no pickle is longer.
        find_storage: gives the storage of a key, which shall have that dtype and number of bytes; raises
            CheckpointError. None: a pickle without storages.
        id_tail: what follows in the persistent id of a storage after its five fields.

    Returns:
        dicts, lists, tuples, strings, numbers, None, and `SavedTensor`s.

    Raises:
        CheckpointError: the pickle is malformed, or holds what is none of these.
    """
    machine = _Machine(stream, max_bytes, find_storage, id_tail)
    try:
        return machine.run()
    except _Unsupported as error:
        raise CheckpointError(f"{error}; {PLAIN_TENSORS}", path=path, reason="UnsupportedPickle") from None
    except CheckpointError:
        raise
    except (EOFError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        text = printable(str(error)) or type(error).__name__
        raise CheckpointError(
            f"its pickle is malformed ({text}); the file is corrupt", path=path, reason="InvalidPickle"
        ) from None


class _Machine:
    def __init__(
        self,
        stream: io.BufferedIOBase,
        max_bytes: int,
        find_storage: Callable[[str, torch.dtype, int], SavedStorage] | None,
        id_tail: tuple[None, ...],
    ) -> None:
        self._stream = stream
        self._bytes_left = max_bytes
        self._find_storage = find_storage
        self._id_tail = id_tail

    def run(self) -> Any:
        read, read_word = self._read, self._read_word
        stack: list[Any] = []
        marked: list[list[Any]] = []  # the stacks below each mark
        memo: dict[int, Any] = {}
        while True:
            opcode = read(1)
            # The most frequent first.
            if opcode == pickle.BINPUT:
                memo[read(1)[0]] = stack[-1]
            elif opcode == pickle.LONG_BINPUT:
                memo[read_word()] = stack[-1]
            elif opcode == pickle.BINGET:
                stack.append(memo[read(1)[0]])
            elif opcode == pickle.LONG_BINGET:
                stack.append(memo[read_word()])
            elif opcode == pickle.BININT1:
                stack.append(read(1)[0])
            elif opcode == pickle.BININT2:
                stack.append(int.from_bytes(read(2), "little"))
            elif opcode == pickle.BININT:
                stack.append(int.from_bytes(read(4), "little", signed=True))
            elif opcode == pickle.LONG1:
                stack.append(int.from_bytes(read(read(1)[0]), "little", signed=True))
            elif opcode == pickle.BINUNICODE:
                stack.append(read(read_word()).decode())
            elif opcode == pickle.MARK:
                marked.append(stack)
                stack = []
            elif opcode == pickle.TUPLE:
                items, stack = stack, marked.pop()
                stack.append(tuple(items))
            elif opcode == pickle.REDUCE:
                args = stack.pop()
                stack[-1] = self._call(stack[-1], args)
            elif opcode == pickle.BINPERSID:
                stack[-1] = self._storage(stack[-1])
            elif opcode == pickle.EMPTY_TUPLE:
                stack.append(())
            elif opcode == pickle.TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == pickle.TUPLE2:
                stack[-2:] = [(stack[-2], stack[-1])]
            elif opcode == pickle.TUPLE3:
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif opcode == pickle.NEWFALSE:
                stack.append(False)
            elif opcode == pickle.NEWTRUE:
                stack.append(True)
            elif opcode == pickle.NONE:
                stack.append(None)
            elif opcode == pickle.GLOBAL:
                stack.append(self._find(f"{self._read_name()}.{self._read_name()}"))
            elif opcode == pickle.SETITEM:
                value, key = stack.pop(), stack.pop()
                self._set_items(stack[-1], [key, value])
            elif opcode == pickle.SETITEMS:
                items, stack = stack, marked.pop()
                self._set_items(stack[-1], items)
            elif opcode == pickle.EMPTY_DICT:
                stack.append({})
            elif opcode == pickle.EMPTY_LIST:
                stack.append([])
            elif opcode == pickle.APPEND:
                self._extend(stack[-2], [stack.pop()])
            elif opcode == pickle.APPENDS:
                items, stack = stack, marked.pop()
                self._extend(stack[-1], items)
            elif opcode == pickle.BINFLOAT:
                stack.append(struct.unpack(">d", read(8))[0])
            elif opcode == pickle.SHORT_BINSTRING:
                stack.append(read(read(1)[0]).decode())
            elif opcode == pickle.BUILD:
                self._build(stack[-2], stack.pop())
            elif opcode == pickle.PROTO:
                protocol = read(1)[0]
                if protocol != 2:
                    raise _Unsupported(f"expected a pickle of protocol 2, found protocol {protocol}")
            elif opcode == pickle.STOP:
                return stack.pop()
            else:
                raise ValueError(f"unexpected opcode {opcode!r}")

    # ---- reading

    def _read(self, num_bytes: int) -> bytes:
        if num_bytes > self._bytes_left:
            raise ValueError("it is too long")
        self._bytes_left -= num_bytes
        data = self._stream.read(num_bytes)
        if len(data) != num_bytes:
            raise EOFError("it ends too early")
        return data

    def _read_word(self) -> int:
        word: int = _WORD.unpack(self._read(4))[0]
        return word

    def _read_name(self) -> str:
        line = self._stream.readline(_MAX_NAME_BYTES)
        self._bytes_left -= len(line)
        if not line.endswith(b"\n"):
            raise ValueError("a name without an end")
        return line[:-1].decode()

    # ---- making

    def _find(self, name: str) -> Any:
        known = _GLOBALS.get(name)
        if known is not None:
            return known
        found = _OTHER_TENSORS.get(name) or f"a reference to {printable(name)}"
        raise _Unsupported(f"expected plain tensors only, found {found}")

    def _call(self, function: Any, args: Any) -> Any:
        if type(function) is not _Function or type(args) is not tuple:
            raise ValueError("a call of what is no function")
        return function.call(*args)

    def _storage(self, id: Any) -> SavedStorage:
        if self._find_storage is None or type(id) is not tuple or id[5:] != self._id_tail:
            raise ValueError("a persistent id that is not a storage's")
        kind, storage_type, key, location, num_elements = id[:5]
        if kind != "storage" or type(storage_type) is not _StorageType or type(key) is not str:
            raise ValueError("a persistent id that is not a storage's")
        if type(location) is not str or type(num_elements) is not int or num_elements < 0:
            raise ValueError("a persistent id that is not a storage's")
        if storage_type is _UNTYPED and self._id_tail:
            raise _Unsupported("an untyped storage in the older format, which torch cannot load either")
        dtype = storage_type.dtype
        nbytes = num_elements * dtype.itemsize
        storage = self._find_storage(key, dtype, nbytes)
        if (storage.dtype, storage.nbytes) != (dtype, nbytes):
            raise ValueError("two types or sizes for one storage")
        return storage

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise ValueError("items for what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEY_TYPES:
                raise ValueError(f"a {type(key).__name__} for a key")
            target[key] = value

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            raise ValueError("items for what is no list")
        target.extend(items)

    def _build(self, target: Any, state: Any) -> None:
        # The attributes of a state dict, `_metadata`, hold versions of modules.
        if type(target) is not OrderedDict or type(state) is not dict:
            raise ValueError("attributes for what is no OrderedDict")


# ---- what a pickle may call; what torch would refuse to make is a ValueError


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any, requires_grad: Any, hooks: Any, metadata: Any
) -> SavedTensor:
    if type(storage) is not SavedStorage:
        raise ValueError("a tensor without a storage")
    dtype = storage.dtype if dtype is None else dtype
    if type(dtype) is not torch.dtype or type(offset) is not int or offset < 0:
        raise ValueError("a tensor without a dtype, or with a negative offset")
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise ValueError("a tensor without a shape or strides")
    if any(type(size) is not int or size < 0 for size in (*shape, *strides)):
        raise ValueError("a tensor with a negative size or stride")
    _check_autograd(dtype, requires_grad, hooks)
    if metadata is not None and metadata != {}:
        raise _Unsupported("expected plain tensors only, found one that is conjugated or negated when it is read")
    return SavedTensor(storage, dtype, offset, shape, strides)


def _check_autograd(dtype: torch.dtype, requires_grad: Any, hooks: Any) -> None:
    if type(requires_grad) is not bool or (requires_grad and not (dtype.is_floating_point or dtype.is_complex)):
        raise ValueError(f"a gradient for {dtype}")
    if type(hooks) is not OrderedDict or hooks:
        raise ValueError("a tensor with hooks")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> SavedTensor:
    return _tensor(storage, offset, shape, strides, None, False, OrderedDict(), None)


def _rebuild_tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> SavedTensor:
    return _tensor(storage, offset, shape, strides, None, requires_grad, hooks, metadata)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> SavedTensor:
    if dtype is None:
        raise ValueError("a tensor without a dtype")
    return _tensor(storage, offset, shape, strides, dtype, requires_grad, hooks, metadata)


def _rebuild_parameter(data: Any, requires_grad: Any, hooks: Any) -> SavedTensor:
    if type(data) is not SavedTensor:
        raise ValueError("a parameter without a tensor")
    _check_autograd(data.dtype, requires_grad, hooks)
    return data


_UNTYPED = _StorageType(torch.uint8)
_GLOBALS: dict[str, Any] = {
    "collections.OrderedDict": _Function(lambda: OrderedDict()),
    "torch._utils._rebuild_tensor": _Function(_rebuild_tensor),
    "torch._utils._rebuild_tensor_v2": _Function(_rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _Function(_rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": _Function(_rebuild_parameter),
    **{name: _StorageType(dtype) for name, dtype in _STORAGE_TYPES.items()},
    "torch.storage.UntypedStorage": _UNTYPED,
    **{f"torch.{name}": getattr(torch, name) for name in _YOUNGER_DTYPES if hasattr(torch, name)},
}
