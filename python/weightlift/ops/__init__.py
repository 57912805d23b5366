"""The fused ops: what engines do to weights between the checkpoint and their kernels.

Names and signatures are vLLM's where it has them. On real tensors an op runs at once, on torch's threads, or is queued
on torch's current stream where they are on a GPU, with the same bytes as its result; it is registered with
torch.library as `weightlift::...`, so that meta tensors and torch.compile know its result. On tensors of an open
checkpoint it is recorded, and runs on each chunk as it lands, once the result is copied somewhere.

Nothing is read back from a GPU: values there, such as scales, are not checked. The two exceptions are
nvfp4_marlin_process_scales, and `scale_ub` of scaled_fp8_quant, which become numbers of Python. What waits for the GPU
besides is torch, where it takes a list of Python's there: in the ops on scales, zero points and biases.

Where upstream rounds or saturates more than it has to, or makes numbers of NaN, `compat="vllm"` asks for its bytes.
"""

from .blocks import AlignedScales, BlockSlice, align_block_scales, dequantize_blocks, slice_block_scales
from .fp8 import normalize_e4m3fn_to_e4m3fnuz, requantize_with_max_scale
from .marlin import (
    awq_marlin_repack,
    awq_to_marlin_zero_points,
    convert_to_channelwise,
    fp8_fused_exponent_bias_into_scales,
    fp8_marlin_process_scales,
    gptq_marlin_repack,
    gptq_to_marlin_zero_points,
    marlin_act_int8_process_scales,
    marlin_padded_nk,
    marlin_permute_bias,
    marlin_permute_scales,
    marlin_zero_points,
    mxfp4_marlin_process_scales,
    mxfp8_marlin_process_scales,
    nk_marlin_repack,
    nvfp4_marlin_process_global_scale,
    nvfp4_marlin_process_scales,
    pack_fp8_to_int32,
    swizzle_blockscale,
)
from .quantize import (
    mxfp8_e4m3_quantize,
    per_block_cast_to_fp8,
    per_token_group_quant_fp8,
    requant_weight_ue8m0,
    scaled_fp8_quant,
    scaled_int8_quant,
    shared_fp8_scale,
)

__all__ = [
    "AlignedScales",
    "BlockSlice",
    "align_block_scales",
    "awq_marlin_repack",
    "awq_to_marlin_zero_points",
    "convert_to_channelwise",
    "dequantize_blocks",
    "fp8_fused_exponent_bias_into_scales",
    "fp8_marlin_process_scales",
    "gptq_marlin_repack",
    "gptq_to_marlin_zero_points",
    "marlin_act_int8_process_scales",
    "marlin_padded_nk",
    "marlin_permute_bias",
    "marlin_permute_scales",
    "marlin_zero_points",
    "mxfp4_marlin_process_scales",
    "mxfp8_e4m3_quantize",
    "mxfp8_marlin_process_scales",
    "nk_marlin_repack",
    "normalize_e4m3fn_to_e4m3fnuz",
    "nvfp4_marlin_process_global_scale",
    "nvfp4_marlin_process_scales",
    "pack_fp8_to_int32",
    "per_block_cast_to_fp8",
    "per_token_group_quant_fp8",
    "requant_weight_ue8m0",
    "requantize_with_max_scale",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "shared_fp8_scale",
    "slice_block_scales",
    "swizzle_blockscale",
]
