"""The tables of docs/quantization.md say what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from weightlift.model import FusedMoE, ParallelConfig, ReplicatedLinear
from weightlift.model.model_config import ModelConfig
from weightlift.model.quantization import read_quantization, registered_quantization_configs
from weightlift.model.quantization.base import Target
from weightlift.model.quantization.online import SCHEMES

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "quantization.md"
TEXT = DOCUMENT.read_text()


def ct(weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights, **group}}}


def floats(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return ct({"type": "float", "num_bits": num_bits, "strategy": strategy, **more})


def packed(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": num_bits, "strategy": strategy, **more}
    return ct(weights, format="pack-quantized")


def gptq(bits: int, group_size: int) -> dict[str, Any]:
    return {"bits": bits, "group_size": group_size, "desc_act": False, "sym": True}


def torchao(kind: str) -> dict[str, Any]:
    return {"quant_type": {"default": {"_type": kind, "_data": {}}}}


# What the rows of the table of formats stand for.
CONFIGS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("fp8", "per tensor"): [{}, {"activation_scheme": "static"}],
    ("fp8", "blocks"): [{"weight_block_size": [128, 128]}],
    ("compressed-tensors", "FP8 per tensor"): [
        floats(8, "tensor"),
        floats(8, "channel"),
        floats(8, "block", block_structure=[128, 128]),
    ],
    ("compressed-tensors", "MXFP8"): [floats(8, "group", group_size=32)],
    ("compressed-tensors", "INT8"): [ct({"type": "int", "num_bits": 8, "strategy": "channel"})],
    ("compressed-tensors", "W4A16"): [
        packed(4, "group", group_size=32),
        packed(4, "channel"),
        packed(8, "group", group_size=128),
    ],
    ("compressed-tensors", "NVFP4"): [floats(4, "tensor_group", group_size=16), floats(4, "group", group_size=32)],
    ("modelopt", "FP8 per"): [{"quant_algo": name} for name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")],
    ("modelopt", "MXFP8"): [{"quant_algo": "MXFP8"}],
    ("modelopt", "NVFP4"): [{"quant_algo": "NVFP4"}],
    ("gptq", "4 and 8"): [gptq(4, 32), gptq(8, -1)],
    ("awq", "4 and 8"): [{"bits": bits, "group_size": 64} for bits in (4, 8)],
    ("fbgemm_fp8", "FP8"): [{"activation_scale_ub": 1200.0}],
    ("torchao", "FP8"): [torchao("Float8WeightOnlyConfig")],
    ("torchao", "INT8"): [torchao("Int8WeightOnlyConfig")],
}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table that begins so, without its first two rows."""
    table = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


FORMATS = rows_of("`quant_method`")


def test_table_has_all_kinds() -> None:
    assert {row[0].strip("`") for row in FORMATS} == set(registered_quantization_configs())
    keys = [key for row in FORMATS for key in CONFIGS if key[0] == row[0].strip("`") and row[1].startswith(key[1])]
    assert keys == list(CONFIGS)
    names = {name for row in rows_of("`quantization=`") for name in re.findall("`([^`]+)`", row[0])}
    assert names == set(SCHEMES)


@pytest.mark.parametrize(
    ("row", "configs"), list(zip(FORMATS, CONFIGS.values(), strict=True)), ids=map(" ".join, CONFIGS)
)
def test_layouts_are_those_of_the_table(row: list[str], configs: list[dict[str, Any]]) -> None:
    name, what, *cells = row
    for config in configs:
        for target, cell in zip(get_args(Target), cells, strict=True):
            fields = ModelConfig({"quantization_config": {"quant_method": name.strip("`"), **config}})
            quant_config = read_quantization(fields, target=target)
            has_experts = "no experts" not in what and cell not in ("no", "linear layers alone")
            assert builds(linear, quant_config) == (cell != "no"), (config, target)
            assert builds(experts, quant_config) == has_experts, (config, target)


def linear(quant_config: Any) -> None:
    ReplicatedLinear(256, 256, bias=False, params_dtype=torch.bfloat16, quant_config=quant_config, prefix="l")


def experts(quant_config: Any) -> None:
    FusedMoE(
        2,
        1,
        256,
        256,
        params_dtype=torch.bfloat16,
        quant_config=quant_config,
        prefix="experts",
        parallel=ParallelConfig(),
    )


def builds(make: Any, quant_config: Any) -> bool:
    try:
        make(quant_config)
    except ValueError:
        return False
    return True
