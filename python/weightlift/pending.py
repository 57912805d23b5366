"""Pending ops: what shall become of a tensor's bytes on their way from the file into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from . import _C
    from .tensor import CheckpointTensor


class PendingOp:
    """An op of `weightlift.ops` that has been asked for, and not carried out.

    Attributes:
        source: what it is made of; backed by its file, in the file's dtype.
        bind: makes the core's op, given its output: a real tensor, contiguous or a matrix whose rows are. None where
            the op can't write into that; into what is contiguous it can.
    """

    __slots__ = ("bind", "source")

    def __init__(self, source: CheckpointTensor, bind: Callable[[torch.Tensor], _C.Op | None]) -> None:
        self.source = source
        self.bind = bind

    def row_stride(self, op: _C.Op) -> int | None:
        """Bytes from one of the op's rows to the next, in the file; None where they do not lie there as rows."""
        rows = _as_rows(self.source._shape, self.source._file_strides)
        if rows is None:
            return None
        size, stride = rows
        if stride == 0:
            return op.row_bytes
        item = self.source._file_dtype.itemsize
        return stride * item if size * item == op.row_bytes else None


def run_op(op: _C.Op, values: torch.Tensor) -> None:
    """Runs an op of the core over a real tensor: a matrix with the op's rows, or any with as many bytes.

    On a GPU, where the op's outputs have to be too, it is queued on torch's current stream.

    Raises:
        ValueError: it has another number of bytes.
        RuntimeError: it can't be queued; no CUDA in this build.
    """
    if values.nbytes != op.num_rows * op.row_bytes:
        raise ValueError(f"{op.name}: expected {op.num_rows} rows of {op.row_bytes} bytes, found {values.nbytes} bytes")
    row_stride = op.row_bytes
    if has_rows(values) and not values.is_contiguous() and values.shape[1] * values.itemsize == op.row_bytes:
        row_stride = values.stride(0) * values.itemsize
    else:
        values = values.contiguous()
    if values.is_cuda:
        with torch.cuda.device(values.device):
            op.launch(values.data_ptr(), row_stride, torch.cuda.current_stream().cuda_stream)
    else:
        op.run(values.data_ptr(), row_stride, torch.get_num_threads())


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether an op can write into a tensor, as far as that depends on its strides: see PendingOp.bind."""
    is_matrix = tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
    return is_matrix or tensor.is_contiguous()


def _as_rows(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """The elements as contiguous rows, each as far from the one before as all are: their size and stride, in elements.

    One row has stride 0. None where there are no such rows.
    """
    size, stride = 1, 0
    step = 1  # the stride with which the next dimension goes on with what there is
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if s != step:
            if stride or s < size:
                return None
            stride = s
        elif not stride:
            size *= n
        step = s * n
    return size, stride
