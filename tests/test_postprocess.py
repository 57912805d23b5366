"""Layers get their final form when their weights are there, while others are still being read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import WriteCheckpoint
from resources import loading_threads
from torch import nn

import weightlift
from weightlift import program
from weightlift.model import registry
from weightlift.model.linear import QuantizeMethodBase
from weightlift.model.loader import plan_load
from weightlift.model.model_config import ModelConfig
from weightlift.model.parallel import ParallelConfig
from weightlift.model.postprocess import (
    PostProcessing,
    device_loading_context,
    is_weights_pre_processed,
    release_memory_under_pressure,
    require_pre_processed_support,
)
from weightlift.model.sharded_state import save_sharded_state
from weightlift.model.skeleton import load_model
from weightlift.program import Program


class Layer(nn.Module):
    """One weight, which a loader fills."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = with_loader(torch.full((size, 2), -1.0))


def with_loader(data: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.weight_loader = lambda param, loaded: param.copy_(loaded)  # type: ignore[attr-defined]
    return parameter


class Model(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.empty = nn.Identity()


def weights(num_layers: int = 3) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.arange(8.0).view(4, 2) + number for number in range(num_layers)}


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy is a segment of its own, and nothing is held back."""
    monkeypatch.setattr(program, "_SEGMENT_BYTES", 1)
    monkeypatch.setattr(program, "_SHARD_SEGMENT_BYTES", 1)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was waited for, as numbers; a test adds the modules that it is given."""
    noted: list[object] = []
    finish = Program.finish

    def noting(self: Program, started: int) -> None:
        noted.append(started)
        finish(self, started)

    monkeypatch.setattr(Program, "finish", noting)
    return noted


# ---- on_module_loaded


@pytest.mark.usefixtures("small_segments")
def test_module_is_handed_over_when_its_bytes_are_there_and_others_are_not_waited_for(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, events: list[object]
) -> None:
    tensors = weights()
    model = Model()
    layers = list(model.layers)

    def note(module: nn.Module) -> None:
        if module in layers:
            assert torch.equal(module.weight, tensors[f"layers.{layers.index(module)}.weight"])
        events.append(module)

    load(model, write_checkpoint(tmp_path, tensors), on_module_loaded=note)
    handed = [event for event in events if isinstance(event, nn.Module)]
    # What got nothing first; children before their parents.
    assert handed == [model.empty, *layers, model.layers, model]
    last = max(event for event in events if isinstance(event, int))
    assert events.index(last) > events.index(layers[0])


def test_what_was_held_back_until_it_was_recorded_lands_module_by_module_too(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch, events: list[object]
) -> None:
    monkeypatch.setattr(program, "_SEGMENT_BYTES", 32)  # those of one layer; a segment is not handed over before 16 MiB
    model = Model()
    checkpoint = write_checkpoint(tmp_path, weights())
    load(model, checkpoint, on_module_loaded=events.append)
    last = max(event for event in events if isinstance(event, int))
    assert events.index(last) > events.index(model.layers[1])


def test_module_whose_parameter_was_replaced_by_its_loader_is_handed_over_with_the_new_one(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    model = Model(1)
    layer = model.layers[0]

    def replace(param: nn.Parameter, loaded: torch.Tensor) -> None:
        layer.weight = with_loader(torch.empty(2, 4))
        layer.weight.copy_(loaded.t())

    layer.weight.weight_loader = replace
    seen = []
    load(model, write_checkpoint(tmp_path, weights(1)), on_module_loaded=lambda module: seen.append(layer.weight.sum()))
    assert seen[-1] == weights(1)["layers.0.weight"].sum()


def test_tensor_that_a_loader_left_on_disk_has_landed_when_its_module_is_handed_over(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    model = Model(1)
    layer = model.layers[0]
    layer.weight.weight_loader = lambda param, loaded: setattr(layer, "kept", loaded)
    seen = []
    load(
        model,
        write_checkpoint(tmp_path, weights(1)),
        strict=False,
        on_module_loaded=lambda module: seen.append(type(getattr(module, "kept", None))),
    )
    assert torch.Tensor in seen
    assert weightlift.CheckpointTensor not in seen


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("differ", [False, True])
def test_tied_parameters_are_settled_before_their_modules_are_handed_over(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, differ: bool
) -> None:
    model = Model()
    model.layers[2].weight = model.layers[0].weight
    tensors = weights()
    if not differ:
        tensors["layers.2.weight"] = tensors["layers.0.weight"].clone()
    seen: dict[nn.Module, torch.Tensor] = {}

    def note(module: nn.Module) -> None:
        if isinstance(module, Layer):
            seen[module] = module.weight

    load(model, write_checkpoint(tmp_path, tensors), on_module_loaded=note)
    assert list(seen) == [model.layers[1], model.layers[0], model.layers[2]]
    assert (seen[model.layers[2]] is seen[model.layers[0]]) is not differ
    assert torch.equal(seen[model.layers[2]], tensors["layers.2.weight"])


@pytest.mark.usefixtures("small_segments")
def test_hook_that_looks_at_a_module_that_has_not_landed_sees_its_values(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    model = Model()
    sums = []

    def look(module: nn.Module) -> None:
        if module is model.empty:
            sums.append(float(model.layers[2].weight.sum()))

    report = load(model, write_checkpoint(tmp_path, weights()), on_module_loaded=look)
    assert sums == [float(weights()["layers.2.weight"].sum())]
    assert not report.gaps


@pytest.mark.usefixtures("small_segments")
def test_error_of_a_hook_ends_the_load_and_says_where(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    model = Model()
    handed = []

    def fail(module: nn.Module) -> None:
        handed.append(module)
        if module is model.layers[1]:
            raise KeyError("no kernel")

    with pytest.raises(KeyError, match="no kernel") as caught:
        load(model, write_checkpoint(tmp_path, weights()), on_module_loaded=fail)
    assert getattr(caught.value, "__notes__", ["in on_module_loaded of layers.1 (Layer)"]) == [
        "in on_module_loaded of layers.1 (Layer)"
    ]
    assert model.layers[2] not in handed
    assert not loading_threads()


def test_modules_of_a_model_that_loads_itself_are_handed_over_when_they_are_complete(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    class Own(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            loaded = set()
            for name, tensor in weights:
                self.get_parameter(name)[:2].copy_(tensor[:2])
                self.get_parameter(name)[2:].copy_(tensor[2:])
                loaded.add(name)
            return loaded

    model = Own()
    sums = {}

    def note(module: nn.Module) -> None:
        if isinstance(module, Layer):
            sums[module] = float(module.weight.sum())

    load(model, write_checkpoint(tmp_path, weights()), on_module_loaded=note)
    assert list(sums.values()) == [float(tensor.sum()) for tensor in weights().values()]


def test_hook_may_replace_parameters_and_the_load_says_nothing_of_gaps(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    model = Model()

    def transpose(module: nn.Module) -> None:
        if isinstance(module, Layer):
            module.weight = nn.Parameter(module.weight.t().contiguous())

    report = load(model, write_checkpoint(tmp_path, weights()), on_module_loaded=transpose)
    assert torch.equal(model.layers[1].weight, weights()["layers.1.weight"].t())
    assert not report.gaps
    assert not report.missing_keys


def test_hook_is_refused_where_there_are_no_modules(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    with pytest.raises(TypeError, match="on_module_loaded is for the modules of a module, found dict"):
        weightlift.fast_load({}, write_checkpoint(tmp_path, weights()), on_module_loaded=print)


def test_planning_hands_over_nothing(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    model = Model()
    model.layers[0].quant_method = Method()
    plan_load(model, write_checkpoint(tmp_path, weights()))
    assert model.layers[0].quant_method.calls == []


# ---- PostProcessing


class Method(QuantizeMethodBase):
    supports_pre_processed_weights = True

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert not torch.is_grad_enabled()
        self.calls.append(is_weights_pre_processed())
        if not is_weights_pre_processed():
            layer.weight.mul_(2)


class Unsupported(Method):
    supports_pre_processed_weights = False


def with_methods(*methods: QuantizeMethodBase) -> Model:
    model = Model(len(methods))
    for layer, method in zip(model.layers, methods, strict=True):
        layer.quant_method = method
    return model


def test_layer_that_was_processed_while_loading_is_not_processed_again(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    model = with_methods(Method(), Method())
    processing = PostProcessing()
    load(model, write_checkpoint(tmp_path, weights(2)), on_module_loaded=processing.process_layer)
    processing.finish(model, torch.float32)
    assert [layer.quant_method.calls for layer in model.layers] == [[False], [False]]
    assert torch.equal(model.layers[1].weight, 2 * weights()["layers.1.weight"])
    assert processing.seconds > 0


def test_layers_that_nobody_handed_over_are_processed_in_the_end() -> None:
    model = with_methods(Method())
    PostProcessing().finish(model, torch.float32)
    assert model.layers[0].quant_method.calls == [False]


def test_rank_of_a_layer_is_told_to_its_parameters_after_its_method() -> None:
    model = with_methods(Method())
    model.layers[0].update_param_tp_status = lambda: model.layers[0].quant_method.calls.append("told")
    PostProcessing().finish(model, torch.float32)
    assert model.layers[0].quant_method.calls == [False, "told"]


def test_methods_are_told_that_weights_are_processed_already() -> None:
    model = with_methods(Method())
    PostProcessing(pre_processed=True).finish(model, torch.float32)
    assert model.layers[0].quant_method.calls == [True]
    assert not is_weights_pre_processed()


def test_method_that_cannot_take_processed_weights_is_refused_before_any_other_runs() -> None:
    model = with_methods(Method(), Unsupported())
    message = "layer layers.1: Unsupported does not support pre-processed weights"
    with pytest.raises(RuntimeError, match=message):
        require_pre_processed_support(model)
    with pytest.raises(RuntimeError, match=message):
        PostProcessing(pre_processed=True).finish(model, torch.float32)
    assert model.layers[0].quant_method.calls == []


def test_method_that_processes_nothing_takes_processed_weights() -> None:
    class Plain(Unsupported):
        process_weights_after_loading = QuantizeMethodBase.process_weights_after_loading

    require_pre_processed_support(with_methods(Plain()))


@pytest.mark.parametrize("quant_method", [Method, Unsupported])
def test_slices_that_were_saved_of_a_processed_model_are_not_processed_again(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch, quant_method: type[Method]
) -> None:
    class Mine(Model):
        def __init__(self, config: ModelConfig, *, parallel: ParallelConfig, quant_config: Any = None) -> None:
            super().__init__(1)
            self.layers[0].quant_method = quant_method()

    monkeypatch.setattr(registry, "_models", {"Mine": Mine})
    folder, saved = write_checkpoint(tmp_path / "model", weights(1)), tmp_path / "saved"
    saved.mkdir()
    for place in (folder, saved):
        (place / "config.json").write_text(json.dumps({"architectures": ["Mine"], "dtype": "float32"}))
    model = load_model(folder)
    assert torch.equal(model.layers[0].weight, 2 * weights()["layers.0.weight"])
    save_sharded_state(model, saved, parallel=ParallelConfig())
    if quant_method is Unsupported:
        with pytest.raises(RuntimeError, match="Unsupported does not support pre-processed weights"):
            load_model(saved, load_format="sharded_state")
        return
    again = load_model(saved, load_format="sharded_state")
    assert again.layers[0].quant_method.calls == [True]
    assert torch.equal(again.layers[0].weight, model.layers[0].weight)


# ---- offloaded modules


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose memory is the CPU's; what goes there is a copy."""
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.Tensor, "to", lambda self, target: self.clone())
    return device


def test_offloaded_parameters_are_processed_on_the_device_and_get_their_memory_back(gpu: Any) -> None:
    layer = Layer()
    parameter, address = layer.weight, layer.weight.data_ptr()
    with device_loading_context(layer, gpu):
        assert layer.weight.data_ptr() != address
        layer.weight.mul_(3)
    assert layer.weight is parameter
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer.weight, torch.full((4, 2), -3.0))


def test_offloaded_parameter_that_got_another_size_keeps_its_new_values(gpu: Any) -> None:
    layer = Layer()
    with device_loading_context(layer, gpu):
        layer.weight.data = torch.ones(3)
    assert torch.equal(layer.weight, torch.ones(3))


def test_offloaded_parameters_come_back_when_processing_fails(gpu: Any) -> None:
    layer = Layer()
    address = layer.weight.data_ptr()
    with pytest.raises(ValueError, match="no"), device_loading_context(layer, gpu):
        raise ValueError("no")
    assert layer.weight.data_ptr() == address


def test_methods_that_do_not_need_the_device_find_parameters_where_they_are(
    monkeypatch: pytest.MonkeyPatch, gpu: Any
) -> None:
    monkeypatch.setattr(torch, "device", lambda name: gpu)
    addresses = []

    class Looking(Method):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            addresses.append(layer.weight.data_ptr())

    class InPlace(Looking):
        requires_device_loading = False

    monkeypatch.setattr("weightlift.model.postprocess.release_memory_under_pressure", lambda device: None)
    model = with_methods(Looking(), InPlace())
    PostProcessing(device="cuda").finish(model, torch.float32)
    assert [address == layer.weight.data_ptr() for address, layer in zip(addresses, model.layers, strict=True)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("integrated", "free", "expected"), [(True, 10, ["emptied"]), (True, 100, []), (False, 10, [])]
)
def test_unused_memory_is_given_back_where_the_host_needs_it(
    monkeypatch: pytest.MonkeyPatch, integrated: bool, free: int, expected: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 128))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    release_memory_under_pressure(torch.device("cuda"))
    assert calls == expected


def load(model: nn.Module, folder: Path, **arguments: Any) -> weightlift.LoadReport:
    config = weightlift.LoadConfig(coverage_wait_seconds=0)
    return weightlift.fast_load(model, folder, config=config, **arguments)
