"""Parameters that processing replaces: the object stays, and what can't be loaded again says so."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import WriteCheckpoint
from torch import nn

import weightlift
from weightlift import CheckpointMismatchError
from weightlift.model.linear import ColumnParallelLinear
from weightlift.model.parallel import ParallelConfig
from weightlift.model.postprocess import PostProcessing
from weightlift.model.quantization.replace import replace_parameter


def layer_of(parallel: ParallelConfig | None = None) -> ColumnParallelLinear:
    return ColumnParallelLinear(4, 8, bias=False, prefix="proj", parallel=parallel or ParallelConfig())


def test_values_of_the_same_geometry_are_copied_into_the_memory_that_is_there() -> None:
    layer = layer_of()
    parameter, address, loader = layer.weight, layer.weight.data_ptr(), layer.weight.weight_loader
    new = torch.nn.Parameter(torch.ones(8, 4))
    new.is_shuffled, new.output_dim = True, 1
    replace_parameter(layer, "weight", new)
    assert layer.weight is parameter
    assert layer.weight.is_shuffled
    assert layer.weight.output_dim == 0
    assert layer.weight.data_ptr() == address
    assert layer.weight.weight_loader == loader
    assert torch.equal(layer.weight, torch.ones(8, 4))


@pytest.mark.parametrize(
    "new",
    [torch.ones(4, 8), torch.ones(8, 4, dtype=torch.float16), torch.ones(4, 8).t()],
    ids=["shape", "dtype", "strides"],
)
def test_values_of_another_geometry_become_those_of_the_same_object(new: torch.Tensor) -> None:
    layer = layer_of()
    parameter = layer.weight
    replace_parameter(layer, "weight", new)
    assert layer.weight is parameter
    assert layer.weight.data_ptr() == new.data_ptr()
    assert (layer.weight.dtype, layer.weight.stride()) == (new.dtype, new.stride())


def test_attributes_of_the_new_one_are_taken_over_but_for_its_loader() -> None:
    layer = layer_of()
    new = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    new.input_dim, new.output_dim, new.weight_loader = 0, 1, None
    replace_parameter(layer, "weight", new)
    assert (layer.weight.input_dim, layer.weight.output_dim) == (0, 1)
    assert layer.weight.weight_loader is not None


def test_cut_metadata_is_that_of_the_layer_after_processing() -> None:
    layer = layer_of(ParallelConfig(tp_rank=1, tp_size=2))
    replace_parameter(layer, "weight", torch.zeros(4, 4))
    loaded = torch.arange(32.0).view(8, 4)
    layer.weight_loader(layer.weight, loaded)
    assert torch.equal(layer.weight, loaded[4:])


def test_parameter_that_is_not_there_or_has_no_memory_is_made() -> None:
    layer = layer_of()
    layer.on_meta = nn.Parameter(torch.empty(2, device="meta"))
    layer.plain = torch.ones(3)
    for name in ("scale", "on_meta", "plain"):
        replace_parameter(layer, name, torch.full((2,), 5.0))
        assert torch.equal(layer.get_parameter(name), torch.full((2,), 5.0))
        assert not layer.get_parameter(name).requires_grad


def test_none_takes_the_parameter_away() -> None:
    layer = layer_of()
    replace_parameter(layer, "weight", None)
    assert layer.weight is None


def test_tie_holds() -> None:
    layer, other = layer_of(), layer_of()
    other.weight = layer.weight
    replace_parameter(layer, "weight", torch.ones(2, 2))
    assert torch.equal(other.weight, torch.ones(2, 2))


def test_copy_of_a_processed_layer_refuses_too() -> None:
    layer = layer_of()
    replace_parameter(layer, "weight", torch.ones(2, 2))
    again = copy.deepcopy(layer)
    with pytest.raises(CheckpointMismatchError, match="can't be loaded again"):
        again.weight.weight_loader(again.weight, torch.ones(8, 4))


# ---- a second load


class Model(nn.Module):
    def __init__(self, new: torch.Tensor) -> None:
        super().__init__()
        self.proj = layer_of()
        self.proj.quant_method.process_weights_after_loading = lambda layer: replace_parameter(layer, "weight", new)


def process(model: nn.Module, folder: Path) -> None:
    processing = PostProcessing()
    weightlift.fast_load(model, folder, on_module_loaded=processing.process_layer)
    processing.finish(model, torch.float32)


def test_weights_are_loaded_again_where_their_geometry_is_that_of_the_checkpoint(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    weight = torch.arange(32.0).view(8, 4)
    model = Model(weight)
    model.proj.quant_method.process_weights_after_loading = lambda layer: replace_parameter(
        layer, "weight", layer.weight * 2
    )
    address = model.proj.weight.data_ptr()
    for factor in (1, 10):
        process(model, write_checkpoint(tmp_path / str(factor), {"proj.weight": weight * factor}))
        assert torch.equal(model.proj.weight, weight * factor * 2)
    assert model.proj.weight.data_ptr() == address


def test_weights_that_processing_has_changed_are_not_loaded_again(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    folder = write_checkpoint(tmp_path, {"proj.weight": torch.ones(8, 4)})
    model = Model(torch.full((4, 8), 7.0, dtype=torch.float16))
    process(model, folder)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"proj.weight: it was float32 \[8, 4\] when it was loaded, and processing has made it float16 \[4, 8\], "
        "so that it can't be loaded again; build the model anew",
    ):
        process(model, folder)
    assert torch.equal(model.proj.weight, torch.full((4, 8), 7.0, dtype=torch.float16))
