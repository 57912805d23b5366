"""Random weights in the place of a checkpoint, for measuring speed."""

from __future__ import annotations

import torch
from torch import nn

from ..report import LoadReport
from .formats import BaseModelLoader

_SEED = 1234
# 2 ** -7, as a byte of float8_e8m0fnu.
_EXPONENT = 120
_SCALE = 1e-3


class DummyModelLoader(BaseModelLoader):
    """Random values, the same in every run, without files. For measuring speed: what they compute is noise."""

    def load_weights(self, model: nn.Module) -> LoadReport:
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                fill_dummy(tensor, name)
        return LoadReport()


def fill_dummy(tensor: torch.Tensor, name: str) -> None:
    """Fills a parameter or buffer with random values as vLLM's `dummy` does, by the same seed for each.

    Floating dtypes: uniform, from -0.001 to 0.001; from -1 to 1 where they have 8 bits. Integers of 8 bits, and packed
    floats: random bytes; exponents (scales in e8m0, or uint8): 120. Larger integers, and what is on the meta device: as
    they are. An attribute `dummy_weight_value` of the parameter goes before all this. Unlike there, scales in floating
    point are 0.001: negative ones, and parts with different ones, are refused when layers are processed.
    """
    if tensor.is_meta or not tensor.numel():
        return
    value = getattr(tensor, "dummy_weight_value", None)
    if value is not None:
        tensor.fill_(value)
        return
    dtype = tensor.dtype
    generator = torch.Generator(device=tensor.device).manual_seed(_SEED)
    if str(dtype) == "torch.float8_e8m0fnu" or (dtype == torch.uint8 and "scale" in name):
        tensor.view(torch.uint8).fill_(_EXPONENT)
    elif dtype.is_floating_point and "scale" in name.rpartition(".")[2]:
        tensor.fill_(_SCALE)
    elif dtype in (torch.uint8, torch.int8) or str(dtype) == "torch.float4_e2m1fn_x2":
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    elif dtype.is_floating_point and dtype.itemsize == 1:
        tensor.copy_(torch.empty_like(tensor, dtype=torch.float16).uniform_(-1.0, 1.0, generator=generator))
    elif dtype.is_floating_point:
        tensor.uniform_(-1e-3, 1e-3, generator=generator)
