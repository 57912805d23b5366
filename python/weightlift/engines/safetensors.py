"""safetensors' own API (0.8), reading through weightlift, and `patch_safetensors` for libraries that call that one.

What differs, on purpose:
- tensors own their memory and are contiguous; nothing is mapped: a file that is cut short is an error, not a SIGBUS;
- the file is opened again when it is read: one that was removed or replaced meanwhile is an error;
- F4 can be sliced (in torch's shape), and so can an empty tensor in numpy; `load` knows F4 and F8_E8M0; numpy gets F8
  where ml_dtypes brings it;
- a header is refused that `weightlift.safetensors_file` calls malformed.
"""

from __future__ import annotations

import collections
import itertools
import operator
import os
import re
import sys
import threading
import weakref
from collections.abc import Container, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..config import LoadConfig, MiB, ResolvedConfig
from ..entries import CheckpointFiles, Shard, TensorEntry
from ..errors import CheckpointError, CheckpointMismatchError, CheckpointReadError, printable
from ..loading import Checkpoint, read_all
from ..memory import allocate
from ..program import Program
from ..safetensors_file import FORMAT_NAMES, read_shard, shard_of_bytes
from ..tensor import CheckpointTensor, contiguous_strides
from ..values import SMALL_BYTES

if TYPE_CHECKING:
    import numpy

    Array = torch.Tensor | numpy.ndarray[Any, Any]

# safetensors is not needed to run; where it is installed, it opens files for other frameworks than torch and numpy.
try:
    from safetensors import safe_open as _original
except ImportError:
    _original = None  # type: ignore[assignment, misc]

_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "numpy", "numpy": "numpy"}
_DEVICE = re.compile(r"(cuda|npu|xpu|xla|mlu|musa|hpu|mps)(:[^:]*)?")
_MAX_USIZE = 2**64 - 1

# Of each open file: what is read before it is asked for takes no more memory than this.
_AHEAD_BYTES = 64 * MiB
# From several threads, calls come in an order that is only nearly that of the file: by so many tensors.
_DISORDER = 8
# So many files keep threads and staging memory between reads: libraries hold all shards of a checkpoint open.
_MAX_ACTIVE = 4


class _OpenFile:
    """A file that is open: what a handle and its slices share. Any thread may read, and so may a forked child.

    Small tensors that lie together come out of runs that the program reads and keeps. The others, singles, are read one
    by one; and ahead, when they are asked for in the order of the file.
    """

    def __init__(self, shard: Shard, config: ResolvedConfig) -> None:
        self.files = CheckpointFiles((shard,), {entry.name: entry for entry in shard.tensors})
        self.config = config
        self.lock = threading.RLock()
        self._singles: list[TensorEntry] = []
        for is_small, group in itertools.groupby(shard.tensors, lambda entry: entry.nbytes <= SMALL_BYTES):
            entries = list(group)
            if not is_small or sum(entry.nbytes for entry in entries) <= SMALL_BYTES:
                self._singles += entries
        self._position = {entry.name: position for position, entry in enumerate(self._singles)}
        self.start_anew()
        _open_files.add(self)

    def start_anew(self) -> None:
        """As if nothing had been read yet. Whoever calls it ends the old program, where that can be done."""
        ended = getattr(self, "program", None)
        self.program = Program(self.files, self.config)
        if ended is not None:  # what a strategy reads whole, it does not read again
            self.program._read_ahead = ended._read_ahead
        self.program.start_recording(hold_seconds=0.0)
        # What is being read ahead: name -> the number by which the program waits for its run, and the tensor.
        self._ahead: dict[str, tuple[int, torch.Tensor]] = {}
        self._ahead_bytes = 0
        self._newest_run = -1
        self._next = 0  # of the singles, the one that would be next in order
        self._frontier = 0  # and the first that no run has come to
        self._ordered_bytes = 0  # asked for in order so far

    def release(self, *, wait: bool = True) -> None:
        """Ends threads and lets go of memory, once the reads of other threads are over; or not, if not to `wait`."""
        if self.lock.acquire(blocking=wait):
            try:
                self.program.close()
                self.start_anew()
            finally:
                self.lock.release()

    def __del__(self) -> None:
        self.program.close()

    def read(self, entry: TensorEntry, index: Any) -> torch.Tensor:
        """`tensor[index]`, in memory of its own. Raises what torch raises for an index."""
        _make_active(self)
        with self.lock:
            view = self.program.tensor(entry.name)
            if index is not Ellipsis:
                view = view[index]  # type: ignore[assignment]
            if not isinstance(view, CheckpointTensor):
                return view  # indexed by lists or tensors: torch did it, on all the values
            is_whole = (
                view._file_offset == entry.offset
                and view.numel() * view._file_dtype.itemsize == entry.nbytes
                and view._file_strides == contiguous_strides(view._shape)
            )
            if not is_whole or entry.name not in self._position:
                return self.program.read(view)
            try:
                return self._read_single(entry).view(view._shape)
            except CheckpointReadError:
                self.program.close()
                self.start_anew()
            # What was read ahead may be at fault: this one alone.
            return self.program.read(self.program.tensor(entry.name)).view(view._shape)

    def _read_single(self, entry: TensorEntry) -> torch.Tensor:
        position = self._position[entry.name]
        if abs(position - self._next) <= _DISORDER:
            self._ordered_bytes += entry.nbytes
            self._next = max(self._next, position + 1)
        else:
            self._ordered_bytes = 0
            self._next = self._frontier = position + 1
        self._frontier = max(self._frontier, self._next)
        if entry.name in self._ahead:
            run, tensor = self._ahead.pop(entry.name)
            self._ahead_bytes -= entry.nbytes
        else:
            run, (tensor,) = self._start_run([entry])
        if run == self._newest_run:
            self._read_ahead()
        self.program.finish(run)
        return tensor

    def _read_ahead(self) -> None:
        # At most a quarter of what was asked for in order: so little is read in vain where the order ends.
        limit = min(self._ordered_bytes // 4, _AHEAD_BYTES // 2)
        entries: list[TensorEntry] = []
        num_bytes = 0
        for entry in itertools.islice(self._singles, self._frontier, None):
            if num_bytes + entry.nbytes > limit:
                break
            self._frontier += 1
            if entry.name not in self._ahead:
                entries.append(entry)
                num_bytes += entry.nbytes
        if not entries:
            return
        while self._ahead_bytes + num_bytes > _AHEAD_BYTES:  # the oldest were left behind
            oldest = next(iter(self._ahead))
            del self._ahead[oldest]
            self._ahead_bytes -= self.files.tensors[oldest].nbytes
        run, tensors = self._start_run(entries)
        for entry, tensor in zip(entries, tensors, strict=True):
            self._ahead[entry.name] = run, tensor
        self._ahead_bytes += num_bytes

    def _start_run(self, entries: Iterable[TensorEntry]) -> tuple[int, list[torch.Tensor]]:
        tensors = []
        for entry in entries:
            tensors.append(allocate(entry, torch.device("cpu")))
            self.program.record(tensors[-1], self.program.tensor(entry.name))
        self._newest_run = self.program.start()
        return self._newest_run, tensors


_open_files: weakref.WeakSet[_OpenFile] = weakref.WeakSet()
_active: collections.OrderedDict[int, weakref.ref[_OpenFile]] = collections.OrderedDict()  # that was read last is last


def _make_active(file: _OpenFile) -> None:
    _active.pop(id(file), None)  # other threads may take it out, too
    _active[id(file)] = weakref.ref(file)
    while len(_active) > _MAX_ACTIVE:
        _, reference = _active.popitem(last=False)
        idle = reference()
        if idle is not None and idle is not file:
            idle.release(wait=False)


def _start_anew_in_child() -> None:
    """What another thread of the parent was reading does not arrive in a forked child."""
    for file in _open_files:
        file.lock = threading.RLock()
        file.start_anew()


os.register_at_fork(after_in_child=_start_anew_in_child)


class _SafeOpenType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        """What safetensors itself has opened is a `safe_open` too: for other frameworks, or before a patch."""
        if cls not in (safe_open, _Patched) or _original is None:
            return super().__instancecheck__(instance)
        return isinstance(instance, _original) or type.__instancecheck__(safe_open, instance)


class safe_open(metaclass=_SafeOpenType):
    """Opens a safetensors file for reading tensors one by one; `safetensors.safe_open`.

    Args:
        filename: one file.
        framework: "pt" (also "torch", "pytorch") or "np" ("numpy"). Any other goes to safetensors, if it is installed.
        device: where tensors go: a name, or the number of an accelerator. numpy: "cpu" only.
        backend: "pread" makes slices for torch as strict as those for numpy; see PySafeSlice. It decides nothing else.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened, or is not a regular file.
        SafetensorError: it is not a valid safetensors file; or a framework, device or backend that does not exist.
        TypeError: an argument of the wrong type.

    Threads may share a handle and its slices, and a forked child may go on with them. They can't be pickled.

    Example:
        >>> with safe_open("model.safetensors", framework="pt") as file:
        ...     rows = file.get_slice("lm_head.weight")[:16]
    """

    _file: _OpenFile | None

    def __new__(
        cls,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> Any:
        if isinstance(framework, str) and framework not in _FRAMEWORKS and _original is not None:
            return _original(filename, framework, device, backend=backend)
        return super().__new__(cls)

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        path = os.fspath(filename)
        for argument, value in (("filename", path), ("framework", framework), ("backend", backend)):
            if not isinstance(value, str):
                raise TypeError(f"{argument}: expected a str, found {type(value).__name__}")
        if framework not in _FRAMEWORKS:
            raise _invalid("framework", framework, "pt or np; safetensors knows others, but is not installed")
        self._framework = _FRAMEWORKS[framework]
        self._device = _parse_device(device)
        if backend not in ("mmap", "pread"):
            raise _invalid("backend", backend, '"mmap" or "pread"')
        self._is_strict = self._framework == "numpy" or backend == "pread"
        shard = read_shard(path)
        if self._framework == "numpy" and self._device != "cpu":
            raise _invalid("device", device, '"cpu", as the framework is numpy')
        self._shard = shard
        self._file = _OpenFile(shard, LoadConfig().resolve())

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        _exc_type: type[BaseException] | None,
        _exc_value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Closes the handle. Slices that were taken from it can still be read."""
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._opened().files.tensors)

    def offset_keys(self) -> list[str]:
        """Names of the tensors, in the order of their data."""
        return list(self._opened().files.tensors)

    def metadata(self) -> dict[str, str] | None:
        """The header's `__metadata__`; None: it has none."""
        self._opened()
        return None if self._shard.metadata is None else dict(self._shard.metadata)

    def get_tensor(self, name: str) -> Array:
        """The tensor of that name; it is the caller's.

        Raises:
            SafetensorError: there is no such tensor, or the handle is closed.
            CheckpointReadError: storage failed, or the file has changed.
        """
        file = self._opened()
        entry = self._entry(name)
        return self._deliver(entry, file.read(entry, ...))

    def get_tensors(self) -> dict[str, Array]:
        """Every tensor, by name, in the order of their data; as `weightlift.load_file` returns them."""
        file = self._opened()
        program = Program(file.files, file.config)
        with Checkpoint(file.files, program, watch=False, header_seconds=0.0) as checkpoint:
            tensors = read_all(checkpoint, torch.device(self._device))
        if self._framework == "pt":
            return tensors  # type: ignore[return-value]
        return {name: self._deliver(file.files.tensors[name], tensor) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> PySafeSlice:
        """The tensor of that name, to be indexed; nothing is read yet. Raises SafetensorError as `get_tensor`."""
        return PySafeSlice(self, self._opened(), self._entry(name))

    def _opened(self) -> _OpenFile:
        file = self._file
        if file is None:
            raise CheckpointError(
                "the file is closed; read inside of `with`, or take a slice there",
                path=self._shard.path,
                reason="Closed",
            )
        return file

    def _entry(self, name: str) -> TensorEntry:
        if not isinstance(name, str):
            raise TypeError(f"name: expected a str, found {type(name).__name__}")
        entry = self._opened().files.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                "no such tensor in this file; keys() names those that are",
                path=self._shard.path,
                tensor=name,
                reason="TensorNotFound",
            )
        return entry

    def _deliver(self, entry: TensorEntry, tensor: torch.Tensor) -> Array:
        if self._framework == "pt":
            return tensor if self._device == "cpu" else tensor.to(self._device)
        return _to_numpy(entry, tensor)

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy a safe_open: open the file again, where it is needed")


class PySafeSlice:
    """A tensor of a file, to be indexed: only what is asked for is read. Made by `safe_open.get_slice`.

    For torch, an index means what it means to a torch tensor; by lists and tensors, all of it is read. For numpy, and
    with the backend "pread", an index is made of integers, slices that lie inside of the tensor, and one Ellipsis.
    """

    def __init__(self, handle: safe_open, file: _OpenFile, entry: TensorEntry) -> None:
        self._handle = handle
        self._file = file  # the handle lets go of it when it is closed
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Sizes as in the header: those of F4 count values, of which torch has two in an element."""
        *others, last = self._entry.shape or (None,)
        if last is None:
            return []
        return [*others, 2 * last if FORMAT_NAMES[self._entry.dtype] == "F4" else last]

    def get_dtype(self) -> str:
        """The format's name of it, as `BF16`."""
        return FORMAT_NAMES[self._entry.dtype]

    def __getitem__(self, index: Any) -> Array:
        """The values there.

        Raises:
            IndexError, TypeError, ValueError: torch's, for an index that it does not take.
            SafetensorError, OverflowError, TypeError: the same, for numpy and "pread".
        """
        if self._handle._is_strict:
            index = _inside(index, self._entry)
        return self._handle._deliver(self._entry, self._file.read(self._entry, index))

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy a slice of a file: index it, or open the file again where it is needed")


def _inside(index: Any, entry: TensorEntry) -> tuple[int | slice, ...]:
    """An index of integers, slices and one Ellipsis, checked against the shape of the tensor."""

    def refused(problem: str) -> CheckpointError:
        return CheckpointError(problem, path=entry.shard.path, tensor=entry.name, reason="InvalidSlice")

    if isinstance(index, list) and not index:
        index = slice(0, 0)
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise refused("only one ellipsis (...) is allowed in an index")
    if dots:
        items[dots[0] : dots[0] + 1] = [slice(None)] * (len(entry.shape) - len(items) + 1)
    parts: list[int | tuple[int, int | None, int]] = []
    for position, item in enumerate(items):
        if isinstance(item, slice):
            start = 0 if item.start is None else _unsigned(item.start)
            stop = None if item.stop is None else _unsigned(item.stop)
            step = 1 if item.step is None else operator.index(item.step)
            if step < 1:
                raise refused(f"the step of a slice must be a positive integer, found {step}")
            parts.append((start, stop, step))
            continue
        try:
            parts.append(operator.index(item))
        except TypeError:
            found = f"found {type(item).__name__} at position {position}"
            raise refused(f"expected an index of integers, slices and one ellipsis, {found}") from None
    if len(parts) > len(entry.shape):
        raise refused(f"{len(parts)} indices for shape {list(entry.shape)}")
    checked: list[int | slice] = []
    for position, (part, size) in enumerate(zip(parts, entry.shape, strict=False)):
        if isinstance(part, int):
            is_inside = -size <= part < size
            checked.append(part)
        else:
            start, stop, _ = part
            is_inside = start <= (size if stop is None else stop) <= size
            checked.append(slice(*part))
        if not is_inside:
            raise refused(f"index {items[position]} is out of bounds for dimension {position} of {list(entry.shape)}")
    return tuple(checked)


def _unsigned(bound: Any) -> int:
    number = operator.index(bound)
    if not 0 <= number <= _MAX_USIZE:
        raise OverflowError(f"{number} in a slice: expected a start and a stop of 0 or more; count from the beginning")
    return number


def _parse_device(device: Any) -> str | int:
    """A device as torch takes it.

    Raises:
        ValueError: a name that ends in what is not a number.
        SafetensorError: anything else that is no device.
    """
    if device is None or device == "cpu":
        return "cpu"
    if isinstance(device, str):
        match = _DEVICE.fullmatch(device)
        if match and match[2] is None:
            return device if device == "mps" else f"{device}:0"
        if match:
            digits = match[2][1:].removeprefix("+")
            if not (digits.isascii() and digits.isdigit() and int(digits) <= _MAX_USIZE):
                raise ValueError(f"device {device!r}: expected a number after the colon")
            if match[1] != "mps" or int(digits) == 0:
                return f"{match[1]}:{int(digits)}"
    else:
        try:
            number = operator.index(device)
        except TypeError:
            number = -1
        if 0 <= number <= _MAX_USIZE:
            return number
    raise _invalid("device", device, "cpu, cuda, cuda:0, ... or the number of an accelerator")


def _invalid(argument: str, value: object, accepted: str) -> CheckpointError:
    return CheckpointError(f"{argument} {value!r} is invalid; expected {accepted}", reason=f"Invalid{argument.title()}")


def _to_numpy(entry: TensorEntry, tensor: torch.Tensor) -> Array:
    """Raises TypeError (BF16) or AttributeError (F8, F4) where numpy has no such dtype, as safetensors does."""
    import numpy

    name = str(entry.dtype).removeprefix("torch.")
    try:
        dtype = numpy.dtype(name)
    except TypeError:
        kind = TypeError if entry.dtype is torch.bfloat16 else AttributeError
        raise kind(
            f"{printable(entry.shard.path)}: {printable(entry.name)}: numpy has no {name}; import ml_dtypes, which "
            'brings it, or open the file with framework="pt"'
        ) from None
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a file into a model whose parameters may share memory; `safetensors.torch.load_model`.

    Bytes go straight into the parameters: no second copy of the model is made, wherever they are.

    Args:
        model: its parameters decide device and dtype.
        filename: one file.
        strict: whether missing and unexpected names are an error.
        device, backend: checked as `safe_open` does; they have no effect.

    Returns:
        Names that the file lacks, and those that the model lacks. Of names that share memory, the file needs one.

    Raises:
        RuntimeError: missing or unexpected names, or sizes that differ; nothing is loaded then.
        FileNotFoundError, OSError, SafetensorError: as `safe_open`.
    """
    file = safe_open(filename, "pt", device, backend=backend)._opened()
    redundant = _redundant_names(model.state_dict(), file.files.tensors)
    with Checkpoint(file.files, Program(file.files, file.config), watch=True, header_seconds=0.0) as checkpoint:
        incompatible = model.load_state_dict(dict(checkpoint), strict=False)
        missing, unexpected = set(incompatible.missing_keys), list(incompatible.unexpected_keys)
        for name in redundant:
            if name in missing:
                missing.remove(name)
            else:
                unexpected.append(name)
        if strict and (missing or unexpected):
            raise CheckpointMismatchError(
                type(model).__name__,
                path=file.files.shards[0].path,
                missing_keys=sorted(missing),
                unexpected_keys=sorted(unexpected),
            )
    return missing, unexpected


def _redundant_names(state: Mapping[str, torch.Tensor], preferred: Container[str]) -> list[str]:
    """Names whose memory belongs to another name too, which is kept: one that covers all of it and is preferred."""
    sharing: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in state.items():
        if tensor.device.type != "meta" and tensor.untyped_storage().nbytes():
            sharing.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(name)
    redundant = []
    for names in sharing.values():
        covering = sorted(name for name in names if state[name].nbytes == state[name].untyped_storage().nbytes())
        if len(names) > 1 and covering:
            kept = next((name for name in covering if name in preferred), covering[0])
            redundant += [name for name in sorted(names) if name != kept]
    return redundant


def load(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a file that is in memory already, copied out of it; `safetensors.torch.load`.

    Raises:
        SafetensorError: it is not a valid safetensors file.
        TypeError: not bytes.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"data: expected bytes, found {type(data).__name__}")
    view = memoryview(data)
    tensors = {}
    for entry in shard_of_bytes(data).tensors:
        if entry.nbytes:
            content = bytearray(view[entry.offset : entry.offset + entry.nbytes])
            tensors[entry.name] = torch.frombuffer(content, dtype=torch.uint8).view(entry.dtype).view(entry.shape)
        else:
            tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
    return tensors


class _Patched(safe_open):
    """What stands in the place of safetensors' own; not `safe_open`, which other modules may have by that name."""


_patch_lock = threading.Lock()
_num_patches = 0


class patch_safetensors:
    """Makes libraries that call safetensors read through weightlift, from here on or inside a `with` block.

    Every module that holds `safetensors.safe_open` by any name gets weightlift's: safetensors itself with its
    `load_file` and `load_model` for torch and numpy, and libraries that have imported it. Not reached are references
    elsewhere: in objects, closures and default arguments. Files for other frameworks go to safetensors as before, and
    so does all that writes.

    Patches may be nested, in any order and from any thread; the last that is undone undoes it all, in modules too that
    were imported meanwhile. Handles that are open stay what they are.

    Raises:
        ImportError: safetensors is not installed.

    Example:
        >>> with patch_safetensors():
        ...     model = AutoModel.from_pretrained("Qwen2-7B")
    """

    def __init__(self) -> None:
        global _num_patches
        if _original is None:
            raise ImportError("patch_safetensors: safetensors is not installed, so that nothing can be calling it")
        self._active = True
        with _patch_lock:
            _num_patches += 1
            _replace_everywhere(_original, _Patched)

    def undo(self) -> None:
        """Takes this patch back. May be called twice."""
        global _num_patches
        with _patch_lock:
            if self._active:
                self._active = False
                _num_patches -= 1
                if _num_patches == 0:
                    _replace_everywhere(_Patched, _original)

    def __enter__(self) -> patch_safetensors:
        if not self._active:
            raise RuntimeError("this patch has been undone; call patch_safetensors() again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def _replace_everywhere(old: object, new: object) -> None:
    """Puts `new` in the place of `old` in every module, but this one."""
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", None)
        if module is sys.modules[__name__] or type(variables) is not dict:
            continue
        for name, value in list(variables.items()):
            if value is old:
                variables[name] = new
