"""ModelOpt's checkpoints: the real ones of other tools under its config, which have the same tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WriteCheckpoint
from quant_models import INPUTS, tensors_of
from torch import Tensor

from weightlift.model.linear import ColumnParallelLinear, MergedColumnParallelLinear, UnquantizedLinearMethod
from weightlift.model.mapping import WeightsMapper
from weightlift.model.model_config import ConfigError, read_config
from weightlift.model.quantization.base import read_quantization
from weightlift.model.quantization.fp8 import Fp8LinearMethod
from weightlift.model.quantization.modelopt import ModelOptConfig
from weightlift.model.quantization.mxfp8 import Mxfp8LinearMethod
from weightlift.model.skeleton import load_model

STACKS = WeightsMapper(orig_to_new_stacked={".gate.": (".gate_up.", 0), ".up.": (".gate_up.", 1)})


def as_modelopt(
    source: Path, folder: Path, write: WriteCheckpoint, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """A copy with another config; one with "producer" is a file of its own."""
    write(folder, tensors, shards=2)
    fields = json.loads((source / "config.json").read_text())
    del fields["quantization_config"]
    if "producer" in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
    else:
        fields["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def assert_same_logits(folder: Path, source: Path) -> None:
    with torch.no_grad():
        assert torch.equal(load_model(folder)(INPUTS), load_model(source)(INPUTS))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head*"]}},
    ],
    ids=["config.json", "hf_quant_config.json"],
)
def test_fp8_by_tensor(
    shared_checkpoints: Path, tmp_path: Path, write_checkpoint: WriteCheckpoint, config: Mapping[str, Any]
) -> None:
    source = shared_checkpoints / "fp8"
    assert_same_logits(as_modelopt(source, tmp_path, write_checkpoint, config, tensors_of(source)), source)


def test_fp8_by_channel(shared_checkpoints: Path, tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    source = shared_checkpoints / "fp8-dynamic"
    config = {"quant_method": "modelopt", "quant_algo": "fp8_per_channel_per_token", "ignore": ["lm_head"]}
    assert_same_logits(as_modelopt(source, tmp_path, write_checkpoint, config, tensors_of(source)), source)


def test_fp8_by_block(shared_checkpoints: Path, tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    source = shared_checkpoints / "fp8-block"
    tensors = {
        name: tensor[:, None, :, None].contiguous() if name.endswith("_scale") else tensor
        for name, tensor in tensors_of(source).items()
    }
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}
    assert_same_logits(as_modelopt(source, tmp_path, write_checkpoint, config, tensors), source)


def mixed(**algorithms: str) -> ModelOptConfig:
    layers = {name.replace("__", "."): {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    return ModelOptConfig.from_config({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})


def test_each_layer_has_its_own_algorithm() -> None:
    config = mixed(a__gate="FP8", a__up="FP8", a__down="MXFP8")
    config.apply_mapper(STACKS)

    def method_of(name: str) -> type:
        return type(ColumnParallelLinear(128, 128, quant_config=config, prefix=name).quant_method)

    assert method_of("a.down") is Mxfp8LinearMethod
    assert method_of("a.other") is UnquantizedLinearMethod
    merged = MergedColumnParallelLinear(128, [128, 128], quant_config=config, prefix="a.gate_up")
    assert isinstance(merged.quant_method, Fp8LinearMethod)


@pytest.mark.parametrize("algorithms", [{"a__gate": "FP8", "a__up": "MXFP8"}, {"a__gate": "FP8"}])
def test_parts_that_differ_are_refused(algorithms: dict[str, str]) -> None:
    config = mixed(**algorithms)
    config.apply_mapper(STACKS)
    with pytest.raises(ValueError, match=r"Mixed quant_algo within fused layer a\.gate_up\. All shards must use"):
        MergedColumnParallelLinear(128, [128, 128], quant_config=config, prefix="a.gate_up")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_algo is missing"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not known; known are FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        ({"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION needs quantized_layers"),
    ],
)
def test_what_there_is_no_algorithm_for_is_refused(tmp_path: Path, config: dict[str, str], message: str) -> None:
    fields = {"quantization_config": {"quant_method": "modelopt"} | config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=message):
        read_quantization(read_config(tmp_path))


def test_a_file_of_its_own_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"expected a JSON object in .*hf_quant_config\.json, found list"):
        read_quantization(read_config(tmp_path))
