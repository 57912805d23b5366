"""The whole load of a model: config, registry, shell, loader, post-processing, and what can be wrong with each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import weightlift
import weightlift.model.linear
from weightlift.cli import main
from weightlift.model import formats, registry
from weightlift.model.dummy import fill_dummy
from weightlift.model.formats import BaseModelLoader, StreamModelLoader, register_loader
from weightlift.model.model_config import ConfigError, ModelConfig, read_config
from weightlift.model.parallel import ParallelConfig
from weightlift.model.pipeline import PPMissingLayer, stage_layers
from weightlift.model.planning import plan_model
from weightlift.model.registry import register_model, registered_models
from weightlift.model.sharded_state import save_sharded_state
from weightlift.model.skeleton import load_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 100,
}


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights under the names that Llama's checkpoints have."""
    hidden, up, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{layer}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": (up, hidden),
            f"{layer}.mlp.up_proj.weight": (up, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, up),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_model(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Writes a config.json and, unless `tensors` says otherwise, all that it needs. A field of None is left out."""
    fields = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if tensors is None:
        tensors = tensors_of({**CONFIG, **fields})
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- what load_model gives


def test_model_is_loaded_on_the_device_and_in_the_dtype_of_the_config_and_in_eval_mode(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert not model.training
    assert torch.get_default_dtype() == torch.float32
    expected = tensors_of(CONFIG)["model.layers.1.self_attn.v_proj.weight"].bfloat16()
    assert torch.equal(model.model.layers[1].self_attn.qkv_proj.weight[-16:], expected)
    assert model.load_report.missing_keys == []


def test_dtype_that_is_asked_for_goes_before_that_of_the_config(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path, dtype="bfloat16"), dtype=torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_dtype_is_that_of_the_checkpoint_where_the_config_says_none(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(CONFIG).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    model = load_model(write_model(tmp_path, tensors, dtype=None))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_head_that_differs_from_the_embedding_is_kept_though_the_config_ties_them(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    model = load_model(write_model(tmp_path, tensors, tie_word_embeddings=True))
    assert torch.equal(model.lm_head.weight[:100], tensors["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight[:100], tensors["model.embed_tokens.weight"])


def test_head_that_differs_from_the_embedding_is_verified_as_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, tensors_of(CONFIG), tie_word_embeddings=True)
    assert main(["load", str(folder), "--tp-size", "2", "--verify"]) == 0
    assert "every byte as safetensors read it" in capsys.readouterr().out


@pytest.mark.parametrize("tied", [False, True])
def test_plan_has_the_memory_of_a_head_until_it_is_known_to_equal_the_embedding(tmp_path: Path, tied: bool) -> None:
    tensors = tensors_of(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = write_model(tmp_path, tensors, tie_word_embeddings=tied)
    embedding, head = 128 * 32 * 4, 128 * 32 * 4
    of_layers = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(("model.l", "model.n")))
    plan = plan_model(folder)
    # Beside what is loaded, the frequencies of rotary embeddings.
    assert 0 <= plan.memory.host_parameters - (embedding + head + of_layers) < 1024


def test_processing_comes_after_loading_layers_before_attention_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Model(nn.Module):
        def __init__(self, config: ModelConfig, *, parallel: ParallelConfig, quant_config: Any = None) -> None:
            super().__init__()
            self.attention = Attention()
            self.linear = weightlift.model.linear.ReplicatedLinear(2, 2, bias=False, prefix="linear")
            process = self.linear.quant_method.process_weights_after_loading
            self.linear.quant_method.process_weights_after_loading = lambda layer: note("layer", process(layer))

        def process_weights_after_loading(self) -> None:
            note("model")

    class Attention(nn.Module):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            assert dtype == torch.float16
            note("attention")

    def note(what: str, _: object = None) -> None:
        calls.append(what)

    monkeypatch.setattr(registry, "_models", {})
    register_model("Mine", Model)
    weight = torch.arange(4.0).reshape(2, 2)
    folder = write_model(tmp_path, {"linear.weight": weight}, architectures=["Mine"], dtype="float16")
    model = load_model(folder)
    assert calls == ["layer", "attention", "model"]
    assert torch.equal(model.linear.weight, weight.half())


def test_pipeline_stage_builds_its_layers_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    first, last = (load_model(folder, parallel=ParallelConfig(pp_rank=rank, pp_size=2)) for rank in range(2))
    assert not any(name.startswith(("model.layers.1.", "model.norm.", "lm_head.")) for name in first.state_dict())
    assert not any(name.startswith(("model.layers.0.", "model.embed_tokens.")) for name in last.state_dict())
    assert isinstance(first.lm_head, PPMissingLayer)
    assert first.load_report.skipped["lm_head.weight"] == "of another pipeline stage"


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(10, 4, [2, 3, 3, 2]), (8, 4, [2, 2, 2, 2]), (7, 2, [4, 3]), (3, 3, [1, 1, 1]), (11, 4, [3, 3, 3, 2])],
)
def test_layers_are_dealt_to_stages_as_in_vllm(num_layers: int, num_stages: int, expected: list[int]) -> None:
    config = ModelConfig({"num_hidden_layers": num_layers})
    stages = [stage_layers(config, ParallelConfig(pp_rank=rank, pp_size=num_stages)) for rank in range(num_stages)]
    assert [len(stage) for stage in stages] == expected
    assert [number for stage in stages for number in stage] == list(range(num_layers))


def test_loads_of_several_threads_have_each_its_own_dtype(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.float16] * 3
    folder = write_model(tmp_path)
    with ThreadPoolExecutor(len(dtypes)) as pool:
        models = list(pool.map(lambda dtype: load_model(folder, dtype=dtype), dtypes))
    assert [{parameter.dtype for parameter in model.parameters()} for model in models] == [{dtype} for dtype in dtypes]
    assert torch.get_default_dtype() == torch.float32


# ---- what is wrong with a config


def test_unknown_architecture_is_an_error_that_lists_what_is_known_and_how_to_register(tmp_path: Path) -> None:
    folder = write_model(tmp_path, architectures=["LLamaForCausalLM"])
    with pytest.raises(ConfigError) as caught:
        load_model(folder)
    text = str(caught.value)
    assert str(tmp_path / "config.json") in text
    assert "nearest: LlamaForCausalLM" in text
    assert "register_model('LLamaForCausalLM', Class)" in text
    assert all(name in text for name in registered_models())


def test_a_file_is_loaded_by_the_config_beside_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert_equal(values(load_model(folder / "model.safetensors")), values(load_model(folder)))


def test_folder_without_config_is_an_error_that_says_what_else_there_is(tmp_path: Path) -> None:
    with pytest.raises(weightlift.CheckpointNotFoundError, match=r"config\.json: not found.*fast_load\(model, path\)"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object, found none"),
        ("[" * 100_000, "expected a JSON object, found none"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "architectures is None"),
        ('{"architectures": []}', "architectures is \\[\\]"),
        ('{"architectures": [1]}', "architectures is \\[1\\]"),
    ],
)
def test_config_that_is_none_is_an_error_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads is True; expected a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, no multiple of num_key_value_heads, 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "no multiple of num_attention_heads, 5"),
        ({"dtype": "float33"}, "dtype is 'float33'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral'; known are default"),
        ({"rope_scaling": [1]}, "rope_parameters is .1.; expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "are not those of rope_type 'linear'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "expected 4"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type is .'linear'.; known are default"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; expected a positive number"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor is -0.5; expected a positive number"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
            "the models here have the same for all layers",
        ),
        ({"max_position_embeddings": "64"}, "max_position_embeddings is '64'; expected a positive integer"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1'; expected a number of layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"]}, "expected one for each of 2 layers"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_parameters lack 'low_freq_factor'"),
        ({"quantization_config": {"quant_method": "fp9"}}, "quant_method 'fp9' is not known; known are awq"),
    ],
)
def test_config_that_cannot_be_is_an_error_that_names_the_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_model(tmp_path, {}, **changes)
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        load_model(folder)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices of the memory that parameters are made of."""
    devices: list[torch.device] = []
    make = nn.Parameter.__new__

    def noting(cls: type[nn.Parameter], data: torch.Tensor, *args: Any, **kwargs: Any) -> nn.Parameter:
        devices.append(data.device)
        return make(cls, data, *args, **kwargs)

    monkeypatch.setattr(nn.Parameter, "__new__", noting)
    return devices


def test_heads_that_cannot_be_dealt_are_an_error_before_anything_is_allocated(
    tmp_path: Path, allocations: list[torch.device]
) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"4 heads for queries and 2 .* to 3 ranks; tp_size may be 1, 2, 4"):
        load_model(folder, parallel=ParallelConfig(tp_rank=0, tp_size=3))
    assert torch.device("cpu") not in allocations


def test_size_that_does_not_divide_is_an_error_before_anything_is_allocated(
    tmp_path: Path, allocations: list[torch.device]
) -> None:
    folder = write_model(tmp_path, intermediate_size=49)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate_up_proj: .*49 is not divisible by 2"):
        load_model(folder, parallel=ParallelConfig(tp_rank=0, tp_size=2))
    assert allocations
    assert torch.device("cpu") not in allocations


def test_tied_tensors_of_two_sizes_are_an_error_before_anything_is_allocated(
    tmp_path: Path, allocations: list[torch.device]
) -> None:
    tensors = tensors_of(CONFIG) | {"lm_head.weight": torch.zeros(104, 32)}
    folder = write_model(tmp_path, tensors, tie_word_embeddings=True)
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"lm_head\.weight: .*\[104, 32\].*\[100, 32\]"):
        load_model(folder)
    assert torch.device("cpu") not in allocations


def test_more_stages_than_layers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 2; pp_size is 3"):
        load_model(write_model(tmp_path), parallel=ParallelConfig(pp_size=3))


def test_default_dtype_is_as_it_was_after_an_error(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    del tensors["model.norm.weight"]
    with pytest.raises(weightlift.CheckpointMismatchError, match=r'Missing key.*"model\.norm\.weight"'):
        load_model(write_model(tmp_path, tensors, dtype="bfloat16"))
    assert torch.get_default_dtype() == torch.float32


def test_part_of_a_stacked_parameter_that_is_missing_is_an_error_that_names_its_rows(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(weightlift.CheckpointMismatchError) as caught:
        load_model(write_model(tmp_path, tensors))
    assert caught.value.gaps == ["model.layers.1.self_attn.qkv_proj.weight[32:48]"]


def test_what_is_missing_stays_out_without_strict(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    del tensors["model.norm.weight"]
    model = load_model(write_model(tmp_path, tensors), strict=False)
    assert model.load_report.missing_keys == ["model.norm.weight"]


def test_size_that_is_null_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": None}))
    with pytest.raises(ConfigError, match="hidden_size is null; the model's class needs it"):
        load_model(folder)


def test_errors_of_configs_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError("x is 1", path="config.json")))
    assert (str(error), error.reason) == ("config.json: x is 1", "InvalidConfig")


def test_config_with_fields_that_are_missing_goes_with_getattr(tmp_path: Path) -> None:
    config = read_config(write_model(tmp_path))
    assert getattr(config, "head_dim", None) is None
    with pytest.raises(AttributeError, match=r"config\.json: head_dim is missing"):
        _ = config.head_dim


# ---- registering


def test_model_may_be_registered_by_where_it_is_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_models", {})
    register_model("Mine", "weightlift.model.llama:MistralForCausalLM")
    assert type(load_model(write_model(tmp_path, architectures=["Mine"]))).__name__ == "MistralForCausalLM"
    with pytest.raises(ValueError, match="expected a class, or the text"):
        register_model("Mine", "weightlift.model.llama")


def test_format_is_one_class_with_one_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_loaders", dict(formats._loaders))

    @register_loader("npy")
    class NpyLoader(StreamModelLoader):
        def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors_of(CONFIG).items()

    folder = write_model(tmp_path)
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    assert_equal(
        values(load_model(folder, load_format="npy", parallel=parallel)), values(load_model(folder, parallel=parallel))
    )
    monkeypatch.setattr(NpyLoader, "iter_weights", lambda self: iter(list(tensors_of(CONFIG).items())[:-1]))
    with pytest.raises(weightlift.CheckpointMismatchError, match="Missing key"):
        load_model(folder, load_format="npy")
    report = load_model(folder, load_format="npy", strict=False).load_report
    assert report.missing_keys == ["model.layers.1.post_attention_layernorm.weight"]
    without_k = [pair for pair in tensors_of(CONFIG).items() if ".1.self_attn.k_proj" not in pair[0]]
    monkeypatch.setattr(NpyLoader, "iter_weights", lambda self: iter(without_k))
    with pytest.raises(weightlift.CheckpointMismatchError) as caught:
        load_model(folder, load_format="npy")
    assert caught.value.gaps == ["model.layers.1.self_attn.qkv_proj.weight[32:48]"]
    unknown = [*tensors_of(CONFIG).items(), ("model.nope.weight", torch.zeros(1))]
    monkeypatch.setattr(NpyLoader, "iter_weights", lambda self: iter(unknown))
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"no module or parameter named 'model\.nope'"):
        load_model(folder, load_format="npy")
    load_model(folder, load_format="npy", strict=False)


def test_unknown_format_is_an_error_that_lists_those_that_are_registered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"load_format is 'gguf'; accepted is one of auto, dummy, .*register_loader"):
        load_model(write_model(tmp_path), load_format="gguf")


def test_what_is_no_loader_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="expected a subclass of BaseModelLoader"):
        register_loader("mine")(nn.Module)  # type: ignore[type-var]
    assert issubclass(StreamModelLoader, BaseModelLoader)


# ---- dummy


def test_dummy_needs_no_files_and_gives_the_same_values_in_every_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    models = [load_model(folder, load_format="dummy") for _ in range(2)]
    assert_equal(values(models[0]), values(models[1]))
    for tensor in values(models[0]).values():
        assert 0 < tensor.abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("dtype", "name", "low", "high", "num_different"),
    [
        (torch.float32, "weight", -1e-3, 1e-3, 500),
        (torch.bfloat16, "weight", -1e-3, 1e-3, 50),
        (torch.bfloat16, "weight_scale", 9e-4, 1.1e-3, 1),
        (torch.float8_e4m3fn, "weight", -1, 1, 50),
        (torch.float8_e8m0fnu, "weight", 2**-7, 2**-7, 1),
        (torch.uint8, "weight_scale", 120, 120, 1),
        (torch.uint8, "weight_packed", 0, 255, 200),
        (torch.int8, "weight", -128, 127, 200),
        (torch.int32, "qweight", 7, 7, 1),
    ],
)
def test_dummy_values_are_those_of_the_dtype(
    dtype: torch.dtype, name: str, low: float, high: float, num_different: int
) -> None:
    tensor = torch.full((1000,), 7.0).to(dtype)
    fill_dummy(tensor, name)
    wide = tensor.float()
    assert low <= wide.min() <= wide.max() <= high
    assert len(wide.unique()) >= num_different
    assert wide.max() >= high * 0.9


@pytest.mark.parametrize("target", ["plain", "marlin"])
@pytest.mark.parametrize("folder", ["fp8", "fp8-block", "w4a16", "nvfp4a16", "mxfp4a16"])
def test_dummy_values_of_quantised_models_can_be_processed_and_computed_with(
    shared_checkpoints: Path, folder: str, target: Any
) -> None:
    model = load_model(shared_checkpoints / folder, load_format="dummy", target=target)
    with torch.no_grad():
        logits = model(torch.arange(8)[None])
    assert target == "marlin" or torch.isfinite(logits).all()  # words of tiles are not set


def test_dummy_value_of_a_parameter_goes_before_its_dtype() -> None:
    parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    parameter.dummy_weight_value = 2.5
    fill_dummy(parameter, "weight")
    assert parameter.tolist() == [2.5] * 3


# ---- sharded_state


def save_ranks(folder: Path, out: Path, ranks: list[ParallelConfig], **options: Any) -> None:
    for parallel in ranks:
        save_sharded_state(load_model(folder, parallel=parallel), out, parallel=parallel, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_slices_that_were_saved_are_loaded_as_they_were(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    ranks = [ParallelConfig(tp_rank=rank, tp_size=2) for rank in range(2)]
    out = write_model(tmp_path / "out", tie_word_embeddings=tied)
    (out / "model.safetensors").unlink()
    save_ranks(folder, out, ranks, max_file_bytes=20_000)
    assert len(list(out.glob("model-rank-1-part-*.safetensors"))) > 1
    for parallel in ranks:
        model = load_model(out, parallel=parallel, load_format="sharded_state")
        assert_equal(values(model), values(load_model(folder, parallel=parallel)))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert model.load_report.bytes_read <= 1.05 * model.load_report.bytes_needed


def test_slices_of_a_head_that_differs_from_the_embedding_are_kept_though_the_config_ties_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tensors_of(CONFIG), tie_word_embeddings=True)
    model = load_model(folder)
    save_sharded_state(model, folder, parallel=ParallelConfig())
    assert_equal(values(load_model(folder, load_format="sharded_state")), values(model))


def test_files_of_slices_are_those_of_vllm_and_safetensors_reads_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    model = load_model(folder)
    (path,) = save_sharded_state(model, tmp_path / "out", parallel=ParallelConfig())
    assert Path(path).name == "model-rank-0-part-0.safetensors"
    saved = safetensors.torch.load_file(path)
    expected = values(model)
    del expected["model.embed_tokens.weight"]  # the same as lm_head.weight
    assert_equal(saved, expected)


def test_files_of_several_stages_have_the_stage_in_their_names(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    ranks = [ParallelConfig(tp_rank=1, tp_size=2, pp_rank=rank, pp_size=2) for rank in range(2)]
    save_ranks(folder, tmp_path / "out", ranks)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"model-pp-{rank}-tp-1-part-0.safetensors" for rank in range(2)]


def test_slices_are_not_saved_over_others(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "model"))
    save_sharded_state(model, tmp_path / "out", parallel=ParallelConfig())
    with pytest.raises(FileExistsError, match=r"model-rank-0-part-0\.safetensors; remove them"):
        save_sharded_state(model, tmp_path / "out", parallel=ParallelConfig())


def test_slices_of_another_number_of_ranks_are_refused_before_anything_is_allocated(
    tmp_path: Path, allocations: list[torch.device]
) -> None:
    folder = write_model(tmp_path)
    save_ranks(folder, folder, [ParallelConfig(tp_rank=0, tp_size=2)])
    allocations.clear()
    with pytest.raises(weightlift.CheckpointError, match=r"expected the slices of tp_rank 0, tp_size 1.* tp_size 2"):
        load_model(folder, load_format="sharded_state")
    assert torch.device("cpu") not in allocations


def test_slices_of_a_rank_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    save_ranks(folder, folder, [ParallelConfig(tp_rank=0, tp_size=2)])
    with pytest.raises(weightlift.CheckpointNotFoundError, match=r"expected model-rank-1-part-\*\.safetensors"):
        load_model(folder, load_format="sharded_state", parallel=ParallelConfig(tp_rank=1, tp_size=2))


def test_slice_that_is_missing_is_an_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (path,) = save_sharded_state(load_model(folder), folder, parallel=ParallelConfig())
    tensors = safetensors.torch.load_file(path)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(weightlift.CheckpointMismatchError, match=r'Missing key.*"model\.norm\.weight"'):
        load_model(folder, load_format="sharded_state")


def test_command_saves_every_rank_and_what_else_the_folder_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights, in another format")
    assert main(["save-sharded", str(folder), str(out), "--tp-size", "2", "--pp-size", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = sorted(path.name for path in out.iterdir())
    files = [f"model-pp-{stage}-tp-{rank}-part-0.safetensors" for stage in range(2) for rank in range(2)]
    assert names == ["config.json", *files, "tokenizer.json"]
    assert sorted(document["files"]) == [str(out / file) for file in files]
    for stage in range(2):
        for rank in range(2):
            parallel = ParallelConfig(tp_rank=rank, tp_size=2, pp_rank=stage, pp_size=2)
            saved = load_model(out, parallel=parallel, load_format="sharded_state")
            assert_equal(values(saved), values(load_model(folder, parallel=parallel)))


@pytest.mark.parametrize("sizes", [["--tp-size", "2"], ["--tp-size", "2", "--pp-size", "2"]])
def test_the_command_for_slices_of_several_ranks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: list[str]
) -> None:
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert main(["save-sharded", str(folder), str(out), *sizes]) == 0
    assert main(["load", str(out), "--load-format", "sharded_state"]) == 1
    error = capsys.readouterr().err
    told = error.partition("weightlift load ")[2].partition(";")[0].split()
    assert main(["load", str(out), *told, "--verify"]) == 0
    assert set(sizes) < set(told)


def test_slices_that_were_saved_by_a_command_are_loaded_and_verified_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert main(["save-sharded", str(folder), str(out), "--tp-size", "2"]) == 0
    arguments = ["load", str(out), "--load-format", "sharded_state", "--tp-size", "2", "--tp-rank", "1", "--verify"]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    saved = safetensors.torch.load_file(out / "model-rank-1-part-0.safetensors")
    assert document["bytes_needed"] == sum(tensor.nbytes for tensor in saved.values())
    assert document["verify"] == {"num_compared": len(saved), "different": []}


def test_command_reports_what_is_wrong_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert main(["save-sharded", str(folder), str(out), "--tp-size", "3"]) == 1
    assert "cannot be dealt evenly to 3 ranks" in capsys.readouterr().err
    assert not out.exists()
    assert main(["save-sharded", str(folder), str(folder), "--tp-size", "2"]) == 2
    assert "is the model's own folder" in capsys.readouterr().err
    assert main(["save-sharded", str(folder), str(out), "--tp-size", "4", "--ep-size", "2"]) == 2
    assert "--ep-size is 2; expected 1, or that of --tp-size, 4" in capsys.readouterr().err
    out.mkdir()
    (out / "model-rank-1-part-0.safetensors").touch()
    assert main(["save-sharded", str(folder), str(out), "--tp-size", "2"]) == 1
    assert "has slices of that rank: model-rank-1-part-0.safetensors; remove them" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["model-rank-1-part-0.safetensors"]
    assert main(["save-sharded", str(folder), str(out), "--tp-size", "0"]) == 2
    assert "expected a positive integer, found '0'" in capsys.readouterr().err
