"""Experts of tiny layers, as a quantised checkpoint has them, and what each rank must have of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from golden import same_bits
from torch import Tensor, nn

from weightlift import fast_load
from weightlift.model.experts import FusedMoE
from weightlift.model.parallel import ParallelConfig

# (tp_rank, tp_size, ep_rank, ep_size): alone, ranks that cut experts, and ranks that have some of them.
RANKS = [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (0, 1, 0, 2), (0, 1, 1, 2)]

# Gate, down and up projection.
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

# What weights are called; scales and zero points, which are small, may be read as values.
_WEIGHTS = ("weight", "weight_packed", "proj", "proj_packed")

# A weight [N, K] in the tensors of a format, by the last parts of their names; and the numbers that these stand for.
Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


class Experts:
    """The tensors of all experts, and their numbers.

    Attributes:
        tensors: by expert, shard and suffix.
        numbers: by expert and shard, float32 [N, K].
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, quantize: Quantize) -> None:
        generator = torch.Generator().manual_seed(7)
        self.sizes = num_experts, hidden, intermediate
        self.tensors: dict[tuple[int, str], dict[str, Tensor]] = {}
        self.numbers: dict[tuple[int, str], Tensor] = {}
        for expert in range(num_experts):
            for shard in PROJECTIONS:
                shape = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
                weight = torch.randn(shape, generator=generator) * 0.05 * (1 + expert + (shard == "w3"))
                self.tensors[expert, shard], self.numbers[expert, shard] = quantize(weight)

    def stored(self, form: str, *, output_dim: int = 0) -> dict[str, Tensor]:
        """As files have them: "each" projection of each expert, gate and up "paired" (along that dimension), or
        "stacked" experts."""
        if form == "each":
            return {
                f"{expert}.{PROJECTIONS[shard]}.{suffix}": tensor
                for (expert, shard), tensors in self.tensors.items()
                for suffix, tensor in tensors.items()
            }
        stored: dict[str, Tensor] = {}
        for expert in range(self.sizes[0]):
            gate, up = self.tensors[expert, "w1"], self.tensors[expert, "w3"]
            for suffix, tensor in gate.items():
                joined = torch.cat([tensor, up[suffix]], dim=output_dim) if tensor.dim() == 2 else tensor
                stored[f"{expert}.gate_up_proj.{suffix}"] = joined
            for suffix, tensor in self.tensors[expert, "w2"].items():
                stored[f"{expert}.down_proj.{suffix}"] = tensor
        if form == "paired":
            return stored
        stacked = {}
        for name in [name for name in stored if name.startswith("0.")]:
            _, projection, suffix = name.split(".")
            what = suffix.removeprefix("weight").removeprefix("_")
            parts = [stored[f"{expert}.{projection}.{suffix}"] for expert in range(self.sizes[0])]
            stacked[f"{projection}_{what}".rstrip("_")] = torch.stack(parts)
        return stacked

    def expected(self, layer: FusedMoE) -> tuple[Tensor, Tensor]:
        """The numbers of a rank: `dequantize` without padding."""
        size = layer.intermediate_size // layer.tp_size
        rows = slice(layer.tp_rank * size, (layer.tp_rank + 1) * size)
        w13 = [torch.cat([self.numbers[e, shard][rows] for shard in ("w1", "w3")]) for e in layer.local_experts]
        w2 = [self.numbers[e, "w2"][:, rows] for e in layer.local_experts]
        return torch.stack(w13), torch.stack(w2)


def make_layer(
    sizes: tuple[int, int, int],
    method: Callable[[FusedMoE], Any],
    rank: tuple[int, int, int, int] = RANKS[0],
    dtype: torch.dtype = torch.bfloat16,
    **arguments: Any,
) -> FusedMoE:
    """A layer, its parameters full of what was there before."""
    tp_rank, tp_size, ep_rank, ep_size = rank
    layer = FusedMoE(
        sizes[0],
        2,
        sizes[1],
        sizes[2],
        params_dtype=dtype,
        reduce_results=False,
        prefix="model.experts",
        quant_config=SimpleNamespace(get_quant_method=lambda layer, prefix: method(layer)),
        parallel=ParallelConfig(tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size),
        **arguments,
    )
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0x55)
    return layer


def load_eagerly(layer: FusedMoE, stored: dict[str, Tensor]) -> None:
    list(layer.load_weights(stored.items()))


def load_recorded(layer: FusedMoE, stored: dict[str, Tensor], folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    tensors = {f"model.experts.{name}": tensor.contiguous() for name, tensor in stored.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    model = nn.ModuleDict({"model": nn.ModuleDict({"experts": layer})})
    return fast_load(model, folder)


def load_both_ways(make: Callable[[], FusedMoE], stored: dict[str, Tensor], folder: Path) -> FusedMoE:
    """A layer, loaded and processed; that both ways give the same bytes, and that a second load does, is checked."""
    eager, recorded = make(), make()
    load_eagerly(eager, stored)
    report = load_recorded(recorded, stored, folder)
    assert (report.gaps, report.double_writes, report.missing_keys) == ([], [], [])
    assert report.num_forced <= sum(not name.endswith(_WEIGHTS) for name in stored)
    for layer in (eager, recorded):
        layer.quant_method.process_weights_after_loading(layer)
    loaded = {name: parameter.data.clone() for name, parameter in recorded.named_parameters()}
    load_recorded(recorded, stored, folder)
    recorded.quant_method.process_weights_after_loading(recorded)
    for name, parameter in recorded.named_parameters():
        assert same_bits(parameter.data, getattr(eager, name).data), name
        assert same_bits(parameter.data, loaded[name]), name
    return recorded


def plain_forward(layer: FusedMoE, numbers: tuple[Tensor, Tensor], x: Tensor, logits: Tensor) -> Tensor:
    """What the layer makes of tokens with these weights."""
    weights, experts = logits.softmax(-1).topk(layer.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            if expert in layer.local_experts:
                position = layer.local_experts.index(expert)
                gate, up = (numbers[0][position].to(x.dtype) @ x[token]).chunk(2)
                total[token] += weight * (numbers[1][position].to(x.dtype) @ (nn.functional.silu(gate) * up))
    return total


# ---- formats, by plain torch

AWQ_ORDER = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}


def quantize_fp8(
    weight: Tensor,
    strategy: str,
    *,
    block: tuple[int, int] = (128, 128),
    static: bool = False,
    scale_name: str = "weight_scale_inv",
) -> tuple[dict[str, Tensor], Tensor]:
    """A weight in FP8 by plain torch, and its numbers."""
    if strategy == "tensor":
        scale = weight.abs().max() / 448
        spread = scale
    elif strategy == "channel":
        scale = spread = weight.abs().amax(1, keepdim=True) / 448
    else:
        rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
        scale = torch.empty(rows, columns)
        spread = torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scale[i, j] = spread[part] = weight[part].abs().max() / 448
    values = (weight / spread).to(torch.float8_e4m3fn)
    tensors = {"weight": values, scale_name if strategy == "block" else "weight_scale": scale}
    if static:
        tensors["input_scale"] = torch.tensor(0.5 + weight.std().item() // 1e-3)
    return tensors, values.float() * spread


def words(values: Tensor, num_bits: int, order: list[int] | None = None) -> Tensor:
    """Packs the last dimension, from the lowest bits up."""
    per_word = 32 // num_bits
    total = torch.zeros(*values.shape[:-1], values.shape[-1] // per_word, dtype=torch.int64)
    for field in range(per_word):
        column = order[field] if order else field
        total |= values[..., column::per_word].long() << (field * num_bits)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def quantize_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A weight in INT8 with a scale for each output, and its numbers."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def quantize_packed(
    weight: Tensor, layout: str, *, num_bits: int, group_size: int, has_zero_points: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """A weight [N, K] in a format by plain torch, and its numbers."""
    size_n, size_k = weight.shape
    grouped = weight.unflatten(1, (-1, size_k if group_size == -1 else group_size))
    top = 2**num_bits - 1
    # Scales have a value in float16, as on disk, and in bfloat16.
    if has_zero_points:
        low, high = grouped.amin(2), grouped.amax(2)
        scales = ((high - low) / top).bfloat16().half()
        zero_points = (-low / scales.float()).round().clamp(0, top)
    else:
        scales = (grouped.abs().amax(2) / (top // 2)).bfloat16().half()
        zero_points = torch.full_like(scales, 2 ** (num_bits - 1)).float()
    integers = (grouped / scales.float().unsqueeze(2) + zero_points.unsqueeze(2)).round().clamp(0, top)
    numbers = ((integers - zero_points.unsqueeze(2)) * scales.float().unsqueeze(2)).flatten(1)
    integers = integers.flatten(1)
    if layout == "compressed-tensors":
        tensors = {
            "weight_packed": words(integers, num_bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([size_n, size_k]),
        }
        if has_zero_points:
            tensors["weight_zero_point"] = words(zero_points.T, num_bits).T.contiguous()
        return tensors, numbers
    if layout == "gptq":
        tensors = {"qweight": words(integers, num_bits).T.contiguous(), "qzeros": words(zero_points.T - 1, num_bits)}
    else:
        order = AWQ_ORDER[num_bits]
        tensors = {"qweight": words(integers.T, num_bits, order), "qzeros": words(zero_points.T, num_bits, order)}
    return tensors | {"scales": scales.T.contiguous()}, numbers


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize_mx(weight: Tensor, kind: str, largest: float | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """A weight [N, K] in "mxfp4", "mxfp8", "nvfp4" (compressed-tensors) or "modelopt" (its NVFP4), and its numbers.

    The scale of the tensor of NVFP4 is that of a tensor with that largest number.
    """
    is_nvfp4 = kind in ("nvfp4", "modelopt")
    grouped = weight.unflatten(1, (-1, 16 if is_nvfp4 else 32))
    amax = grouped.abs().amax(2)
    tensors = {}
    if is_nvfp4:
        multiplier = (weight.abs().max() if largest is None else torch.tensor(largest)) / (6 * 448)
        scale = (amax / 6 / multiplier).to(torch.float8_e4m3fn)
        spread = scale.float() * multiplier
        names = (
            ("weight_scale_2", "input_scale") if kind == "modelopt" else ("weight_global_scale", "input_global_scale")
        )
        tensors = {names[0]: multiplier if kind == "modelopt" else 1 / multiplier, names[1]: torch.tensor(0.5)}
        if kind == "nvfp4":
            spread = scale.float() * (1 / tensors[names[0]])
    else:
        scale = torch.exp2((amax / (448 if kind == "mxfp8" else 6)).log2().ceil()).to(torch.float8_e8m0fnu)
        spread = scale.float()
    values = grouped / spread.unsqueeze(2)
    if kind == "mxfp8":
        stored = values.flatten(1).to(torch.float8_e4m3fn)
        numbers = stored.float().view_as(values) * spread.unsqueeze(2)
        return {"weight": stored, "weight_scale": scale.view(torch.uint8)}, numbers.flatten(1)
    codes = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    numbers = E2M1[codes] * values.sign() * spread.unsqueeze(2)
    codes = (codes + 8 * (values < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scale = scale.view(torch.uint8) if kind == "mxfp4" else scale
    tensors |= {"weight" if kind == "modelopt" else "weight_packed": packed, "weight_scale": scale}
    return tensors, numbers.flatten(1)
