"""Weights, scales, zero points and biases in the layout of the Marlin kernels.

K is the input size of a layer, N its output size, G the number of groups along K that have a scale of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import _C
from ..tensor import CheckpointTensor
from ._library import Bind, check_finite, compute, known, place_of, register, require, require_dtype

_AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}  # of columns in a word, from the lowest bits up
_FP8_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


# ---- weights


def _repack_shape(num_bits: int, padded_n: int, padded_k: int) -> tuple[int, int]:
    return padded_k // 16, padded_n * 16 * num_bits // 32


def _bind_repack(
    layout: str,
    num_bits: int,
    is_a_8bit: bool,
    size_n: int,
    size_k: int,
    padded_n: int,
    padded_k: int,
    perm: list[int] | torch.Tensor,
) -> Bind:
    """perm: of an output on a GPU also a tensor there; empty: in order."""

    def bind(out: torch.Tensor) -> _C.Op | None:
        place = place_of(out, padded_k // 16)
        if is_a_8bit:  # a row of tiles is two rows of the result, without a gap
            address, rows, row_bytes, row_stride = place
            if row_stride != row_bytes:
                return None
            place = (address, rows // 2, 2 * row_bytes, 2 * row_bytes)
        device_perm = None
        if out.is_cuda and len(perm):
            device_perm = torch.as_tensor(perm, dtype=torch.int32, device=out.device).contiguous()
        op = _C.marlin_repack(
            layout=layout,
            num_bits=num_bits,
            is_a_8bit=is_a_8bit,
            size_k=size_k,
            size_n=size_n,
            padded_k=padded_k,
            padded_n=padded_n,
            perm=perm if isinstance(perm, list) else [],
            device_perm=0 if device_perm is None else device_perm.data_ptr(),
            output=place,
        )
        if device_perm is not None:
            op.hold(device_perm)
        return op

    return bind


def _repack_kernel(
    weight: torch.Tensor,
    layout: str,
    num_bits: int,
    is_a_8bit: bool,
    size_n: int,
    size_k: int,
    padded_n: int,
    padded_k: int,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    order = [] if perm is None else perm if weight.is_cuda else perm.tolist()
    bind = _bind_repack(layout, num_bits, is_a_8bit, size_n, size_k, padded_n, padded_k, order)
    return compute(bind, weight, _repack_shape(num_bits, padded_n, padded_k), torch.int32)


def _repack_fake(
    weight: torch.Tensor,
    layout: str,
    num_bits: int,
    is_a_8bit: bool,
    size_n: int,
    size_k: int,
    padded_n: int,
    padded_k: int,
    perm: torch.Tensor | None,
) -> torch.Tensor:
    return weight.new_empty(_repack_shape(num_bits, padded_n, padded_k), dtype=torch.int32)


_repack_op = register(
    "marlin_repack(Tensor weight, str layout, int num_bits, bool is_a_8bit, SymInt size_n, SymInt size_k, "
    "SymInt padded_n, SymInt padded_k, Tensor? perm) -> Tensor",
    _repack_kernel,
    _repack_fake,
)


def _repack(
    name: str,
    weight: torch.Tensor,
    layout: str,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool,
    padded_nk: tuple[int, int] | None,
    perm: torch.Tensor | None = None,
) -> torch.Tensor:
    require(num_bits in (4, 8), f"{name}: num_bits must be 4 or 8, found {num_bits}")
    padded_n, padded_k = padded_nk or (size_n, size_k)
    tile_k = 32 if is_a_8bit else 16
    require(
        padded_k % tile_k == 0 and padded_n % 64 == 0 and padded_k >= size_k > 0 and padded_n >= size_n > 0,
        f"{name}: no Marlin tile fits size_k = {padded_k}, size_n = {padded_n}: they must be multiples of {tile_k} and "
        "64" + ("" if padded_nk else "; marlin_padded_nk() says to what to pad"),
    )
    per_word = 32 // num_bits
    expected = {
        "gptq": (size_k // per_word, size_n),
        "awq": (size_k, size_n // per_word),
        "nk": (size_n, size_k * num_bits // 8 // weight.itemsize),
    }[layout]
    packed = {"gptq": size_k, "awq": math.gcd(size_k, size_n), "nk": size_k}[layout]
    require(
        tuple(weight.shape) == expected and packed % per_word == 0,
        f"{name}: expected a weight of shape {expected} for size_k = {size_k}, size_n = {size_n}, {num_bits} bits, "
        f"found {tuple(weight.shape)}",
    )
    if perm is not None and perm.numel() == 0:
        perm = None
    if perm is not None:
        require_dtype(f"{name}: perm", perm, torch.int32, torch.int64)
        require(tuple(perm.shape) == (size_k,), f"{name}: perm must have an entry for each of size_k = {size_k}")
        require(padded_nk is None, f"{name}: perm and padding don't go together")
    if isinstance(weight, CheckpointTensor):
        order = [] if perm is None else (perm._read() if isinstance(perm, CheckpointTensor) else perm).tolist()
        bind = _bind_repack(layout, num_bits, is_a_8bit, size_n, size_k, padded_n, padded_k, order)
        return weight._with_op(bind, _repack_shape(num_bits, padded_n, padded_k), torch.int32)
    result: torch.Tensor = _repack_op(weight, layout, num_bits, is_a_8bit, size_n, size_k, padded_n, padded_k, perm)
    return result


def gptq_marlin_repack(
    b_q_weight: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    *,
    perm: torch.Tensor | None = None,
    padded_nk: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Brings a GPTQ weight into Marlin's layout.

    Args:
        b_q_weight: int32 (K * num_bits / 32, N): values packed along K, lowest bits first.
        size_k, size_n: K and N. Multiples of 16 and 64, with `is_a_8bit` of 32 and 64, unless they are padded.
        num_bits: 4 or 8.
        is_a_8bit: the layout for activations of 8 bits.
        perm: (K,): row k of the result is made of row perm[k] (act-order: argsort of g_idx). It makes the op need the
            whole weight at once. None, or empty: in order. On a GPU, an entry outside of [0, K) gives a row of zeros.
        padded_nk: sizes to fill up to with zeros, as marlin_padded_nk() gives them.

    Returns:
        int32 (K / 16, N * num_bits / 2), of the padded sizes.

    Raises:
        ValueError: sizes that no tile fits, or that the weight does not have; an entry of perm outside of [0, K).
        TypeError: another dtype.

    Example:
        >>> gptq_marlin_repack(torch.zeros(2, 64, dtype=torch.int32), 16, 64, 4).shape
        torch.Size([1, 128])
    """
    require_dtype("gptq_marlin_repack: b_q_weight", b_q_weight, torch.int32)
    return _repack("gptq_marlin_repack", b_q_weight, "gptq", size_k, size_n, num_bits, is_a_8bit, padded_nk, perm)


def awq_marlin_repack(
    b_q_weight: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    *,
    padded_nk: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Brings an AWQ weight into Marlin's layout.

    Args:
        b_q_weight: int32 (K, N * num_bits / 32): values packed along N, interleaved as AWQ does.
        size_k, size_n, num_bits, is_a_8bit, padded_nk: as for gptq_marlin_repack.

    Returns, Raises: as gptq_marlin_repack.
    """
    require_dtype("awq_marlin_repack: b_q_weight", b_q_weight, torch.int32)
    return _repack("awq_marlin_repack", b_q_weight, "awq", size_k, size_n, num_bits, is_a_8bit, padded_nk)


def nk_marlin_repack(
    weight: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    *,
    padded_nk: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Brings a weight whose rows are outputs into Marlin's layout, as a checkpoint has it: no transposition before.

    What pack_fp8_to_int32 and gptq_marlin_repack do to an FP8 weight, in one go; likewise for FP4 and packed integers.

    Args:
        weight: (N, K) of FP8 (float8_e4m3fn), or bytes or int32 words in which values are packed along K, lowest bits
            first: NVFP4 and MXFP4 (N, K / 2), compressed-tensors (N, K * num_bits / 32).
        size_k, size_n, num_bits, is_a_8bit, padded_nk: as for gptq_marlin_repack; K a multiple of 32 / num_bits.

    Returns, Raises: as gptq_marlin_repack.
    """
    require_dtype("nk_marlin_repack: weight", weight, torch.int32, *_FP8_BYTES)
    return _repack("nk_marlin_repack", weight, "nk", size_k, size_n, num_bits, is_a_8bit, padded_nk)


def pack_fp8_to_int32(fp8_tensor: torch.Tensor, size_k_first: bool = True) -> torch.Tensor:
    """Packs FP8 values into words, four along K, lowest byte first.

    Args:
        fp8_tensor: float8_e4m3fn (K, N), or with `size_k_first=False` (N, K). K a multiple of 4.

    Returns:
        int32 (K / 4, N), or (N, K / 4).
    """
    require_dtype("pack_fp8_to_int32", fp8_tensor, torch.float8_e4m3fn)
    require(fp8_tensor.dim() == 2, f"pack_fp8_to_int32: expected a matrix, found {tuple(fp8_tensor.shape)}")
    size_k = fp8_tensor.shape[0 if size_k_first else 1]
    require(size_k % 4 == 0, f"pack_fp8_to_int32: K = {size_k} is not a multiple of 4")
    if not size_k_first:
        return fp8_tensor.contiguous().view(torch.int32)
    return fp8_tensor.T.contiguous().view(torch.int32).T.contiguous()


def marlin_padded_nk(size_n: int, size_k: int, group_size: int = -1) -> tuple[int, int]:
    """The smallest sizes (N, K) that Marlin's kernels take, and that hold a layer's.

    The kernels want N and K to be multiples of 64 and 128, or of 128 and 64; K stays a multiple of the group size too.
    """
    require(size_n > 0 and size_k > 0, f"marlin_padded_nk: sizes must be positive, found N = {size_n}, K = {size_k}")
    group = group_size if group_size > 0 else 1

    def up(size: int, step: int) -> int:
        return -(-size // step) * step

    candidates = [(up(size_n, n), up(size_k, math.lcm(k, group))) for n, k in ((64, 128), (128, 64))]
    return min(candidates, key=lambda nk: (nk[0] * nk[1], nk[0] + nk[1]))


# ---- scales and biases


# Which column a kernel's thread wants at each place: of 64 columns with scales by group, of 32 otherwise.
_GROUPED = [i + 8 * j for i in range(8) for j in range(8)]
_SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _permute_columns(name: str, tensor: torch.Tensor, perm: list[int]) -> torch.Tensor:
    require(
        tensor.shape[-1] % len(perm) == 0,
        f"{name}: N = {tensor.shape[-1]} is not a multiple of {len(perm)}",
    )
    return tensor.reshape(-1, len(perm))[:, perm].reshape(tensor.shape)


def marlin_permute_scales(
    s: torch.Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Brings scales (G, N) into the order in which Marlin's threads read them. group_size -1: one group."""
    require(
        s.dim() == 2 and s.shape[1] == size_n,
        f"marlin_permute_scales: expected scales of shape (G, {size_n}), found {tuple(s.shape)}",
    )
    groups = -(-size_k // group_size) if 0 < group_size < size_k else 1
    require(
        s.shape[0] == groups,
        f"marlin_permute_scales: expected {groups} groups for size_k = {size_k}, group_size = {group_size}, found "
        f"{s.shape[0]}",
    )
    return _permute_columns("marlin_permute_scales", s, _GROUPED if groups > 1 and not is_a_8bit else _SINGLE)


def marlin_permute_bias(s: torch.Tensor) -> torch.Tensor:
    """Brings a bias (N,) into the order in which Marlin's threads read it."""
    return _permute_columns("marlin_permute_bias", s, _SINGLE)


def convert_to_channelwise(weight_scale: torch.Tensor, logical_widths: Sequence[int]) -> torch.Tensor:
    """One scale for each part of a fused weight, repeated for each of the part's rows: float32 (N, 1)."""
    scales = weight_scale.reshape(-1).float()
    require(
        len(scales) == len(logical_widths),
        f"convert_to_channelwise: {len(scales)} scales for {len(logical_widths)} parts",
    )
    parts = [scale.expand(width) for scale, width in zip(scales.unbind(), logical_widths, strict=True)]
    return torch.cat(parts).unsqueeze(1)


def fp8_fused_exponent_bias_into_scales(scales: torch.Tensor) -> torch.Tensor:
    """Multiplies scales by what Marlin leaves out when it widens FP8 exponents: 2^8 in float16, 2^120 in bfloat16.

    Raises:
        ValueError: a scale of 256 or more, which becomes infinite.
    """
    require_dtype("fp8_fused_exponent_bias_into_scales", scales, torch.float16, torch.bfloat16)
    fused = scales * (2.0**8 if scales.dtype == torch.float16 else 2.0**120)
    check_finite("fp8_fused_exponent_bias_into_scales", fused, scales)
    return fused


def fp8_marlin_process_scales(
    weight_scale: torch.Tensor,
    size_k: int,
    size_n: int,
    dtype: torch.dtype,
    *,
    logical_widths: Sequence[int] | None = None,
    block_size: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Brings the scales of an FP8 weight (N, K) into the form that Marlin's FP8 kernel takes, padded as the weight is.

    Args:
        weight_scale: of the whole weight (one), of each part of a fused one, of each channel (N, 1), or of each block
            (ceil(N / block_n), ceil(K / block_k)).
        dtype: of the activations, float16 or bfloat16: the scales are rounded to it.
        logical_widths: the parts of a fused weight, when there is a scale for each.
        block_size: (block_n, block_k), when there is a scale for each block.

    Returns:
        `dtype` (1, N), or (K / block_k, N), of the padded sizes.

    Raises:
        ValueError: a number of scales that fits none of these; a scale that overflows `dtype`.
    """
    scales = weight_scale.to(dtype)
    check_finite("fp8_marlin_process_scales", scales, weight_scale)
    group_size = -1
    if block_size is not None:
        block_n, group_size = block_size
        expected = (-(-size_n // block_n), -(-size_k // group_size))
        require(
            tuple(scales.shape) == expected,
            f"fp8_marlin_process_scales: expected block scales of shape {expected}, found {tuple(scales.shape)}",
        )
        scales = scales.T.repeat_interleave(block_n, 1)[:, :size_n]
    elif logical_widths is not None and scales.numel() == len(logical_widths):
        require(
            sum(logical_widths) == size_n,
            f"fp8_marlin_process_scales: the parts have {sum(logical_widths)} rows, the weight has {size_n}",
        )
        scales = convert_to_channelwise(scales, logical_widths).to(dtype).T
    else:
        require(
            scales.numel() in (1, size_n),
            f"fp8_marlin_process_scales: expected 1 scale or {size_n}, found {scales.numel()}",
        )
        scales = scales.reshape(1, -1).expand(1, size_n)
    padded_n, padded_k = marlin_padded_nk(size_n, size_k, group_size)
    groups = padded_k // group_size if group_size > 0 else 1
    scales = torch.nn.functional.pad(scales, (0, padded_n - size_n, 0, groups - scales.shape[0]))
    return fp8_fused_exponent_bias_into_scales(marlin_permute_scales(scales, padded_k, padded_n, group_size))


def _interleave_four(name: str, scales: torch.Tensor) -> torch.Tensor:
    return _permute_columns(name, scales, [0, 2, 1, 3])


def mxfp8_marlin_process_scales(marlin_scales: torch.Tensor) -> torch.Tensor:
    """The last step for MXFP8: permuted scales (K / 32, N) of float16 or bfloat16 become float8_e8m0fnu in order."""
    return _interleave_four("mxfp8_marlin_process_scales", marlin_scales).to(torch.float8_e8m0fnu)


def mxfp4_marlin_process_scales(marlin_scales: torch.Tensor, input_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The last step for MXFP4: permuted scales (K / 32, N) become float8_e8m0fnu bytes in order.

    With activations of 8 bits the order stays; for float8_e4m3fn ones the scales take up the difference of the
    exponents' biases, 2^6.

    Raises:
        ValueError: a scale too large for that.
    """
    if input_dtype is None or input_dtype.itemsize == 2:
        marlin_scales = _interleave_four("mxfp4_marlin_process_scales", marlin_scales)
    scales = marlin_scales.to(torch.float8_e8m0fnu)
    if input_dtype != torch.float8_e4m3fn:
        return scales
    exponents = scales.view(torch.uint8)
    values = known(exponents)
    require(
        values is None or not values.numel() or int(values.max()) <= 248,
        "mxfp4_marlin_process_scales: a scale of 2^122 or more has no place for the factor 2^6",
    )
    return (exponents + 6).view(torch.float8_e8m0fnu)


def nvfp4_marlin_process_scales(
    marlin_scales: torch.Tensor, scale_factor: float | None = None, a_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, float]:
    """The last step for NVFP4: permuted scales (K / 16, N) become bytes of 5 exponent and 3 mantissa bits, no sign.

    Args:
        marlin_scales: not negative.
        scale_factor: a power of two that the scales are multiplied with first, so that none is lost; the global scale
            is to be divided by it. None: the largest that fits (1 where the activations are float16).
        a_dtype: of the activations.

    Returns:
        The scales, as float8_e4m3fn (K / 16, N), bytes that only Marlin reads, and the factor.

    On a GPU, this waits for the scales: the factor is a number.

    Raises:
        ValueError: a negative scale, or NaN.
    """
    name = "nvfp4_marlin_process_scales"
    require(bool((marlin_scales >= 0).all()), f"{name}: scales must not be negative, nor NaN")
    scales = _interleave_four(name, marlin_scales.to(torch.float16))
    if scale_factor is None:
        largest = float(scales.max()) if scales.numel() else 0.0
        limit = 448.0
        bounded = a_dtype != torch.float16 and 0 < largest < limit
        scale_factor = 2.0 ** math.floor(math.log2(limit / largest)) if bounded else 1.0
    scales = (scales.float() * scale_factor).to(torch.float16) * 2.0**7
    scales = torch.where(scales < 2, torch.zeros_like(scales), scales)
    # Below 65536 the highest bit of a float16's exponent says nothing more: what follows it fits a byte.
    high = (scales.view(torch.int16) << 1).view(torch.uint8)[:, 1::2]
    return high.contiguous().view(torch.float8_e4m3fn), scale_factor


def nvfp4_marlin_process_global_scale(global_scale: torch.Tensor, a_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiplies NVFP4's global scale by what Marlin leaves out when it widens exponents: 2^7 or 2^119 by `a_dtype`.

    a_dtype: of the activations, float16 or bfloat16; None: the scale's.
    """
    dtype = a_dtype or global_scale.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"nvfp4_marlin_process_global_scale: expected torch.float16 or torch.bfloat16, found {dtype}")
    result = global_scale * (2.0**7 if dtype == torch.float16 else 2.0**119)
    check_finite("nvfp4_marlin_process_global_scale", result, global_scale)
    return result


def marlin_act_int8_process_scales(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For INT8 activations: scales become integers up to 4096, in the bits of their dtype, and one factor for all."""
    require_dtype("marlin_act_int8_process_scales", s, torch.float16, torch.bfloat16)
    largest = s.max()
    factor = 1 / 4096 * largest.float()
    return (s / largest * 4096).round().to(torch.int16).view(s.dtype), factor


def swizzle_blockscale(scale: torch.Tensor) -> torch.Tensor:
    """Brings block scales (M, K) or (B, M, K) of one byte each into the order of the 128x4 tiles of CUTLASS.

    Returns:
        The same shape with M filled up with zeros to a multiple of 128 and K to one of 4, its memory in the order of
        the tiles.
    """
    require(scale.dim() in (2, 3), f"swizzle_blockscale: expected 2 or 3 dimensions, found {tuple(scale.shape)}")
    batched = (scale if scale.dim() == 3 else scale.unsqueeze(0)).view(torch.uint8)
    num, rows, columns = batched.shape
    padded = torch.nn.functional.pad(batched, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(num, padded.shape[1] // 128, 4, 32, padded.shape[2] // 4, 4)
    swizzled = tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(padded.shape)
    return (swizzled if scale.dim() == 3 else swizzled[0]).view(scale.dtype)


# ---- zero points


def _pack_columns(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Values (G, N) as words, int32 (G, N * num_bits / 32), lowest bits first."""
    per_word = 32 // num_bits
    words = values[:, ::per_word].to(torch.int32)
    for i in range(1, per_word):
        words = words | (values[:, i::per_word].to(torch.int32) << (i * num_bits))
    return words


def marlin_zero_points(
    zp: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Packs zero points (G, N) of any integer dtype as Marlin's kernels read them. size_k is G.

    Returns:
        int32 (G, N * num_bits / 32).
    """
    name = "marlin_zero_points"
    require(num_bits in _AWQ_ORDER, f"{name}: num_bits must be 4 or 8, found {num_bits}")
    require(
        tuple(zp.shape) == (size_k, size_n),
        f"{name}: expected zero points of shape {(size_k, size_n)}, found {tuple(zp.shape)}",
    )
    zp = _permute_columns(name, zp, _GROUPED)
    if not is_a_8bit:
        zp = _permute_columns(name, zp, list(_AWQ_ORDER[num_bits]))
    return _pack_columns(zp, num_bits)


def awq_to_marlin_zero_points(
    q_zp_packed: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Brings AWQ's zero points, int32 (G, N * num_bits / 32), into Marlin's order. size_k is G.

    Returns:
        int32 of the same shape.
    """
    name = "awq_to_marlin_zero_points"
    require(num_bits in _AWQ_ORDER, f"{name}: num_bits must be 4 or 8, found {num_bits}")
    return _reorder_zero_points(name, q_zp_packed, size_k, size_n, num_bits, _AWQ_ORDER[num_bits], is_a_8bit)


def gptq_to_marlin_zero_points(
    q_zp_packed: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """The same of zero points whose words have the columns one after the other, the first in the lowest bits.

    They are what is subtracted: GPTQ's own, of `checkpoint_format` "gptq", are one less than that.
    """
    name = "gptq_to_marlin_zero_points"
    require(num_bits in _AWQ_ORDER, f"{name}: num_bits must be 4 or 8, found {num_bits}")
    return _reorder_zero_points(name, q_zp_packed, size_k, size_n, num_bits, range(32 // num_bits), is_a_8bit)


def _reorder_zero_points(
    name: str,
    packed: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    order: Sequence[int],
    is_a_8bit: bool,
) -> torch.Tensor:
    """`order` says which column of a word is in each of its fields, from the lowest bits up."""
    require_dtype(name, packed, torch.int32)
    expected = (size_k, size_n * num_bits // 32)
    require(
        tuple(packed.shape) == expected,
        f"{name}: expected zero points of shape {expected}, found {tuple(packed.shape)}",
    )
    block = len(_GROUPED)
    require(size_n % block == 0, f"{name}: N = {size_n} is not a multiple of {block}")
    per_word, mask = 32 // num_bits, (1 << num_bits) - 1
    to_order = range(per_word) if is_a_8bit else _AWQ_ORDER[num_bits]
    # The words of a block, and each of all blocks at once: values are moved between them without being unpacked.
    words = torch.unflatten(packed, 1, (-1, block // per_word)).movedim(2, 0).contiguous()
    result = torch.zeros_like(words)
    for field, place in enumerate(to_order):
        columns = _GROUPED[place::per_word]  # of each word of the result, what is in this field
        shifts = [list(order).index(column % per_word) * num_bits for column in columns]
        by = torch.tensor(shifts, dtype=torch.int32, device=words.device).view(-1, 1, 1)
        values = (words[[column // per_word for column in columns]] >> by) & mask
        result |= values << (field * num_bits)
    return result.movedim(0, 2).flatten(1)
