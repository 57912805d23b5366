"""Where tensors lie: questions about the memory of real tensors, and about strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import devices
from .tensor import empty, storage_of


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own that the core can write: not other subclasses, which only look so."""
    return (
        (tensor.is_cpu or devices.index_of(tensor) is not None)
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def addressable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, in a storage that the core can write."""
    return tensor.numel() > 0 and has_storage(tensor)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a real tensor's storage, also those that are not the tensor's."""
    whole = empty((0,), (1,), torch.uint8, tensor.device)
    with torch._C._DisableTorchDispatch():
        whole.set_(storage_of(tensor))
    return whole


def region_of(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one. Not for empty tensors."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill the memory from the first to the last, in whatever order. Not for empty tensors."""
    begin, end = span_of(tensor)
    return end - begin == tensor.nbytes


def is_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements can be walked in the order of the file; the core's source_is_nested()."""
    extent = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda dim: dim[1]):
        if size > 1 and stride:
            if stride < extent:
                return False
            extent = stride * (size - 1) + extent
    return True
