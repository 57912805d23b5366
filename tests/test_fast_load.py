"""`fast_load` where names differ, modules load themselves, or parameters are tied."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import WriteCheckpoint
from torch import Tensor, nn

from weightlift import CheckpointMismatchError, LoadConfig, fast_load
from weightlift.model.mapping import KV_CACHE_SCALES, WeightsMapper
from weightlift.model.router import AutoWeightsLoader, Router

Weights = Iterable[tuple[str, Tensor]]


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a load that gets as far as reading fail."""
    monkeypatch.setattr("weightlift.storage._C.Pipeline", lambda **_: pytest.fail("the pipeline was started"))


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 4, bias=False) for _ in range(3))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(8, 12, bias=False)
        self.qkv_proj.weight.weight_loader = self.load_part

    def load_part(self, parameter: nn.Parameter, loaded: Tensor, shard_id: str) -> None:
        parameter.data.narrow(0, 4 * "qkv".index(shard_id), 4).copy_(loaded)


def model_of(layer: Callable[[], nn.Module], num_layers: int = 2) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([layer() for _ in range(num_layers)])})


def parts(num_layers: int = 2, names: Iterable[str] = ("q_proj", "k_proj", "v_proj")) -> dict[str, Tensor]:
    return {f"layers.{i}.{name}.weight": torch.rand(4, 8) for i in range(num_layers) for name in names}


STACKED = WeightsMapper(orig_to_new_stacked={f".{i}_proj": (".qkv_proj", i) for i in "qkv"})


# ---- mappers


def test_renamed_architecture_is_loaded_with_one_line(tmp_path: Path) -> None:
    saved = parts(names=("query_proj", "k_proj", "v_proj"))
    model = model_of(Attention)
    mapper = WeightsMapper(orig_to_new_substr={".query_proj.": ".q_proj."})
    report = fast_load(model, write(tmp_path, saved), mapper=mapper)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name.replace("q_proj", "query_proj")])
    assert (report.missing_keys, report.unexpected_keys, report.skipped) == ([], [], {})


@pytest.mark.usefixtures("nothing_is_read")
def test_error_about_names_says_which_line_would_do(tmp_path: Path) -> None:
    folder = write(tmp_path, parts(names=("query_proj", "k_proj", "v_proj")))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model_of(Attention), folder)
    assert caught.value.missing_keys == ["layers.0.q_proj.weight", "layers.1.q_proj.weight"]
    assert caught.value.unexpected_keys == ["layers.0.query_proj.weight", "layers.1.query_proj.weight"]
    assert "query_proj (q_proj)" in str(caught.value)
    assert "mapper=WeightsMapper(orig_to_new_substr={'query_proj': 'q_proj'})" in str(caught.value)


@pytest.mark.usefixtures("nothing_is_read")
def test_error_about_names_lists_what_is_there(tmp_path: Path) -> None:
    folder = write(tmp_path, parts() | {"layers.0.zzz": torch.ones(1)})
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model_of(Attention), folder)
    assert "There is no module or parameter named 'layers.0.zzz' in ModuleDict." in str(caught.value)
    assert "belonging to layers.0 (Attention) are: layers.0.q_proj.weight, layers.0.k_proj.weight" in str(caught.value)


def test_fused_parameter_is_filled_part_by_part(tmp_path: Path) -> None:
    saved = parts()
    model = model_of(Fused)
    report = fast_load(model, write(tmp_path, saved), mapper=STACKED)
    for i, layer in enumerate(model["layers"]):
        expected = torch.cat([saved[f"layers.{i}.{part}_proj.weight"] for part in "qkv"])
        assert torch.equal(layer.qkv_proj.weight, expected)
    assert (report.gaps, report.double_writes, report.num_forced) == ([], [], 0)
    assert report.num_transfers == 6


@pytest.mark.usefixtures("nothing_is_read")
def test_row_60_fused_parameter_of_which_only_q_is_there_has_a_gap(tmp_path: Path) -> None:
    folder = write(tmp_path, parts(names=["q_proj"]))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model_of(Fused), folder, mapper=STACKED)
    assert caught.value.gaps == ["layers.0.qkv_proj.weight[4:12]", "layers.1.qkv_proj.weight[4:12]"]


def test_tensor_may_go_to_several_parts(tmp_path: Path) -> None:
    saved = {"layers.0.in_proj.weight": torch.rand(4, 8), "layers.0.k_proj.weight": torch.rand(4, 8)}
    mapper = WeightsMapper(orig_to_new_stacked={".in_proj": (".qkv_proj", ["q", "v"]), ".k_proj": (".qkv_proj", "k")})
    model = model_of(Fused, 1)
    fast_load(model, write(tmp_path, saved), mapper=mapper)
    q, k = saved.values()
    assert torch.equal(model["layers"][0].qkv_proj.weight, torch.cat([q, k, q]))


@pytest.mark.usefixtures("nothing_is_read")
def test_what_cannot_be_mapped_so_is_told_before_a_byte_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, parts(1) | {"a": torch.ones(2), "b": torch.ones(2)})
    model = model_of(lambda: nn.ModuleDict({"qkv_proj": nn.Linear(8, 12, bias=False)}), 1)
    model.register_parameter("c", nn.Parameter(torch.zeros(2)))
    mapper = STACKED | WeightsMapper(orig_to_new_regex={re.compile(r"^[ab]$"): "c"})
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model, folder, mapper=mapper, strict=False)
    text = str(caught.value)
    assert "c: both a and b of the checkpoint are mapped to it." in text
    assert "layers.0.qkv_proj.weight: a tensor is mapped to its shard 'q', but it has no weight_loader" in text


def test_mapping_of_tensors_takes_a_mapper_too(tmp_path: Path) -> None:
    into = {"b": torch.zeros(3)}
    report = fast_load(
        into,
        write(tmp_path, {"a": torch.ones(3), "x.c": torch.ones(1)}),
        mapper=WeightsMapper(orig_to_new_substr={"a": "b"}, orig_to_new_prefix={"x.": None}),
    )
    assert into["b"].tolist() == [1, 1, 1]
    assert report.skipped == {"x.c": "prefix 'x.': None"}


# ---- what is not wanted


def test_skipped_tensors_are_reported_with_their_rules(tmp_path: Path) -> None:
    extra = {"vision.a": torch.ones(1), "mtp.w": torch.ones(1), "layers.0.rotary_emb.inv_freq": torch.ones(4)}
    report = fast_load(
        model_of(Attention),
        write(tmp_path, parts() | extra),
        mapper=WeightsMapper(orig_to_new_prefix={"vision.": None}),
        filters=[lambda name: "not this head" if name.startswith("mtp.") else None, None],
    )
    assert report.skipped == {
        "layers.0.rotary_emb.inv_freq": "substr 'rotary_emb.inv_freq': None",
        "mtp.w": "not this head",
        "vision.a": "prefix 'vision.': None",
    }
    assert report.num_tensors == 6


def test_shards_of_which_nothing_is_wanted_are_not_opened(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    saved = parts(4)
    shards = [[name for name in saved if f".{i}." in name] for i in range(4)]
    folder = write_checkpoint(tmp_path, saved, shards=shards)
    for number in (1, 2, 3):
        (folder / f"model-{number:05}-of-00004.safetensors").unlink()
    model = model_of(Attention, 4)
    model["layers"][0] = PPMissingLayer()
    report = fast_load(
        model,
        folder,
        mapper=WeightsMapper(orig_to_new_prefix={"layers.1.": None}),
        filters=[lambda name: "elsewhere" if ".2." in name else None],
        strict=False,
    )
    assert set(report.skipped.values()) == {
        "of another pipeline stage",
        "prefix 'layers.1.': None",
        "elsewhere",
    }
    assert len(report.skipped) == 9
    assert torch.equal(model["layers"][3].q_proj.weight, saved["layers.3.q_proj.weight"])


class PPMissingLayer(nn.Identity):
    pass


def test_rotary_buffer_that_the_model_has_is_loaded(tmp_path: Path) -> None:
    model = nn.Module()
    model.rotary_emb = nn.Module()
    model.rotary_emb.register_buffer("inv_freq", torch.zeros(4))
    fast_load(model, write(tmp_path, {"rotary_emb.inv_freq": torch.ones(4)}))
    assert model.rotary_emb.inv_freq.eq(1).all()


def test_what_a_hook_takes_out_of_the_state_dict_is_skipped(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.bias.data.zero_()

    def take_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state["bias"]

    model.register_state_dict_post_hook(take_out)
    report = fast_load(model, write(tmp_path, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}))
    assert report.skipped == {"bias": "not in the state dict of the model"}
    assert not model.bias.any()


def test_of_many_unexpected_names_one_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explain, explained = Router.problem, []
    monkeypatch.setattr(Router, "problem", lambda self, route: explained.append(route.name) or explain(self, route))
    model = nn.ParameterDict({"w": torch.empty(1)})
    folder = write(tmp_path, {"w": torch.ones(1)} | {f"zzz{i}.y": torch.ones(1) for i in range(100)})
    with pytest.raises(CheckpointMismatchError, match=r"no module or parameter named 'zzz\d+'"):
        fast_load(model, folder)
    assert len(explained) == 1  # as listing what is there takes a walk through the model


def test_rules_of_the_quantisation_config_come_first(tmp_path: Path) -> None:
    model = model_of(Fused, 1)
    layer = model["layers"][0]
    layer.attn = nn.ParameterDict({"k_scale": torch.zeros(())})
    saved = parts(1) | {
        "layers.0.k_proj.output_scale": torch.tensor(0.5),
        "layers.0.q_proj.output_scale": torch.tensor(0.5),
        "layers.0.qkv_proj.bias": torch.ones(12),
    }
    model.quant_config = SimpleNamespace(
        get_cache_scale_mapper=lambda: KV_CACHE_SCALES, _ignore_unexpected_suffixes=(".q_scale",)
    )
    report = fast_load(model, write(tmp_path, saved), mapper=STACKED)
    assert layer.attn["k_scale"].item() == 0.5
    assert report.skipped == {
        "layers.0.q_proj.output_scale": "unexpected, and ignored as '.q_scale'",
        "layers.0.qkv_proj.bias": "unexpected, and ignored as '.bias'",
    }


@pytest.mark.usefixtures("nothing_is_read")
def test_unexpected_bias_of_a_model_that_is_not_quantised_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model_of(Attention), write(tmp_path, parts() | {"layers.0.q_proj.bias": torch.ones(4)}))
    assert caught.value.unexpected_keys == ["layers.0.q_proj.bias"]


def test_lossy_casts_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast_load(model_of(Attention).half(), write(tmp_path, parts()))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "converted from torch.float32 of the checkpoint to torch.float16 of the parameter: layers.{0,1}.k_proj.weight "
        "(2), layers.{0,1}.q_proj.weight (2), layers.{0,1}.v_proj.weight (2)"
    )


# ---- order


def test_order_is_that_of_the_files_or_of_the_model(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    names = ["b.0", "a.1", "c", "a.0"]
    folder = write_checkpoint(tmp_path, {name: torch.ones(2) for name in names}, shards=[[name] for name in names])
    calls: list[str] = []

    def model() -> nn.Module:
        module = nn.Module()
        module.a = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        module.c = nn.Parameter(torch.zeros(2))
        module.b = nn.ParameterList([torch.zeros(2)])
        for name, parameter in module.named_parameters():
            parameter.weight_loader = lambda parameter, loaded, name=name: (
                calls.append(name),
                parameter.data.copy_(loaded),
            )
        return module

    fast_load(model(), folder)
    assert calls == names
    calls.clear()
    fast_load(model(), folder, order="module")
    assert calls == ["c", "a.0", "a.1", "b.0"]  # as torch has it: what a module holds itself, then its children
    with pytest.raises(ValueError, match="order is 'size'; accepted is 'file' or 'module'"):
        fast_load(model(), folder, order="size")  # type: ignore[arg-type]


# ---- modules that load themselves


class Experts(nn.Module):
    """Gate, up and down of every expert in two parameters, as engines keep them."""

    num_calls = 0

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(num_experts, 4, 8))
        self.w2 = nn.Parameter(torch.zeros(num_experts, 8, 2))
        self.register_buffer("load", torch.zeros(num_experts))

    def load_weights(self, weights: Weights) -> set[str]:
        self.num_calls += 1
        loaded = set()
        for name, tensor in weights:
            expert, part = name.split(".")[:2]
            if int(expert) >= len(self.w2):
                continue  # of another rank
            if part == "w2":
                self.w2.data[int(expert)].copy_(tensor)
            else:
                self.w13.data[int(expert)].narrow(0, 0 if part == "w1" else 2, 2).copy_(tensor)
            loaded.add("w2" if part == "w2" else "w13")
        return loaded


class Sparse(nn.Module):
    def __init__(self, experts: Callable[[], nn.Module] = Experts) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = experts()


def sparse_tensors(num_experts: int = 3, parts: Iterable[str] = ("w1", "w2", "w3")) -> dict[str, Tensor]:
    saved = {"gate.weight": torch.rand(3, 8)}
    for i in range(num_experts):
        saved |= {
            f"experts.{i}.{part}.weight": torch.rand(8, 2) if part == "w2" else torch.rand(2, 8) for part in parts
        }
    return saved


def assert_sparse(model: nn.Module, saved: dict[str, Tensor]) -> None:
    assert torch.equal(model.gate.weight, saved["gate.weight"])
    for i in range(len(model.experts.w2)):
        w13 = torch.cat([saved[f"experts.{i}.{part}.weight"] for part in ("w1", "w3")])
        assert torch.equal(model.experts.w13[i], w13)
        assert torch.equal(model.experts.w2[i], saved[f"experts.{i}.w2.weight"])


def test_module_that_loads_itself_is_handed_its_tensors(tmp_path: Path) -> None:
    model, saved = Sparse(), sparse_tensors()
    report = fast_load(model, write(tmp_path, saved), order="module")
    assert_sparse(model, saved)
    assert model.experts.num_calls == 1
    assert (report.missing_keys, report.gaps, report.num_forced) == ([], [], 0)


def test_what_a_module_does_not_use_is_skipped_and_not_read(tmp_path: Path) -> None:
    model, saved = Sparse(lambda: Experts(1)), sparse_tensors()
    report = fast_load(model, write(tmp_path, saved), config=LoadConfig(merge_gap_bytes=0))
    assert_sparse(model, saved)
    assert set(report.skipped) == {name for name in saved if name.startswith(("experts.1.", "experts.2."))}
    assert set(report.skipped.values()) == {"not used by load_weights"}
    assert report.bytes_needed == sum(saved[name].nbytes for name in saved if name not in report.skipped)


@pytest.mark.usefixtures("nothing_is_read")
def test_what_a_module_did_not_load_is_missing_before_a_byte_is_read(tmp_path: Path) -> None:
    saved = sparse_tensors(parts=("w1", "w3"))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(Sparse(), write(tmp_path, saved))
    assert caught.value.missing_keys == ["experts.w2"]


@pytest.mark.usefixtures("nothing_is_read")
def test_gap_of_a_module_that_loads_itself_is_found(tmp_path: Path) -> None:
    saved = sparse_tensors()
    del saved["experts.1.w2.weight"]
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(Sparse(), write(tmp_path, saved))
    assert caught.value.gaps == ["experts.w2[1:2]"]


def test_not_strict_reports_what_a_module_did_not_load(tmp_path: Path) -> None:
    saved = sparse_tensors(parts=("w1", "w3"))
    report = fast_load(Sparse(), write(tmp_path, saved), strict=False)
    assert report.missing_keys == ["experts.w2"]


class Silent(Experts):
    def load_weights(self, weights: Weights) -> None:  # type: ignore[override]
        super().load_weights(weights)


def test_of_a_module_that_says_nothing_it_counts_what_is_written(tmp_path: Path) -> None:
    model, saved = Sparse(Silent), sparse_tensors()
    assert fast_load(model, write(tmp_path, saved)).missing_keys == []
    assert_sparse(model, saved)
    saved = sparse_tensors(parts=("w1", "w3"))
    assert fast_load(Sparse(Silent), write(tmp_path, saved), strict=False).missing_keys == ["experts.w2"]


class WholeModel(Sparse):
    """A model of an engine: it loads all of itself."""

    def load_weights(self, weights: Weights) -> set[str]:
        return AutoWeightsLoader(self).load_weights(
            weights, mapper=WeightsMapper(orig_to_new_prefix={"router.": "gate."})
        )


def test_model_that_loads_itself_is_given_all_names(tmp_path: Path) -> None:
    model, saved = WholeModel(), sparse_tensors()
    on_disk = {name.replace("gate.", "router."): tensor for name, tensor in saved.items()}
    report = fast_load(model, write(tmp_path, on_disk))
    assert_sparse(model, saved)
    assert (report.missing_keys, report.unexpected_keys, report.skipped, report.gaps) == ([], [], {}, [])


def test_mapper_comes_before_what_the_model_does_itself(tmp_path: Path) -> None:
    model, saved = WholeModel(), sparse_tensors()
    on_disk = {name.replace("gate.", "switch."): tensor for name, tensor in saved.items()} | {"junk": torch.ones(1)}
    mapper = WeightsMapper(orig_to_new_prefix={"switch.": "router.", "junk": None})
    report = fast_load(model, write(tmp_path, on_disk), mapper=mapper)
    assert_sparse(model, saved)
    assert report.skipped == {"junk": "prefix 'junk': None"}


class Impatient(Sparse):
    def load_weights(self, weights: Weights) -> set[str]:
        name, tensor = next(iter(weights))
        self.gate.weight.data.copy_(tensor)
        return {name}


@pytest.mark.usefixtures("nothing_is_read")
def test_what_the_model_does_not_ask_for_is_unexpected(tmp_path: Path) -> None:
    saved = sparse_tensors(1)
    first = {"gate.weight": saved.pop("gate.weight")}
    folder = write(tmp_path, first | {f"z.{name}": tensor for name, tensor in saved.items()})
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(Impatient(), folder, order="module")
    assert caught.value.unexpected_keys == [f"z.{name}" for name in sorted(saved)]
    assert caught.value.missing_keys == ["experts.w2", "experts.w13"]


@pytest.mark.usefixtures("nothing_is_read")
def test_other_differences_are_told_before_a_module_is_asked(tmp_path: Path) -> None:
    saved = sparse_tensors() | {"gate.weight": torch.rand(4, 8)}
    model = Sparse()
    with pytest.raises(CheckpointMismatchError, match=r"size mismatch for gate\.weight"):
        fast_load(model, write(tmp_path, saved))
    assert model.experts.num_calls == 0


class Table(nn.Module):
    """Keeps a tensor that is no parameter, and looks at it."""

    table = torch.zeros(2)
    total = 0.0

    def load_weights(self, weights: Weights) -> set[str]:
        for _, tensor in weights:
            self.table = torch.zeros(2)
            self.table.copy_(tensor)
            self.total = float(self.table.sum())
        return set()


def test_module_without_parameters_may_load_itself_and_look(tmp_path: Path) -> None:
    model = nn.ModuleDict({"table": Table()})
    report = fast_load(model, write(tmp_path, {"table.t": torch.ones(2)}))
    assert model["table"].total == 2
    assert report.skipped == {}


def test_late_coverage_of_a_module_that_loads_itself(tmp_path: Path) -> None:
    model, saved = Sparse(), sparse_tensors()
    fast_load(model, write(tmp_path, saved), config=LoadConfig(coverage_wait_seconds=0))
    assert_sparse(model, saved)


# ---- tied parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def tied_tensors(embed: Tensor | None, head: Tensor | None) -> dict[str, Tensor]:
    saved = {"norm.weight": torch.ones(4), "embed.weight": embed, "head.weight": head}
    return {name: tensor for name, tensor in saved.items() if tensor is not None}


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_row_23_one_name_of_a_tied_parameter_is_enough_whichever(tmp_path: Path, name: str) -> None:
    model = Tied()
    values = torch.rand(6, 4)
    report = fast_load(model, write(tmp_path, {"norm.weight": torch.ones(4), name: values}))
    assert torch.equal(model.embed.weight, values)
    assert model.head.weight is model.embed.weight
    assert report.missing_keys == []


def test_row_24_equal_names_of_a_tied_parameter_are_one_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tied()
    parameter = model.embed.weight
    values = torch.rand(6, 4)
    values[0, 0] = float("nan")
    report = fast_load(model, write(tmp_path, tied_tensors(values, values.clone())))
    assert model.head.weight is model.embed.weight is parameter
    assert torch.equal(parameter[1:], values[1:])
    assert report.skipped == {"head.weight": "equal to embed.weight, to which it is tied"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_row_24_different_names_of_a_tied_parameter_are_two_storages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tied()
    model.embed.weight.requires_grad_(False)
    model.embed.weight.note = "kept"
    embed, head = torch.rand(6, 4), torch.rand(6, 4)
    report = fast_load(model, write(tmp_path, tied_tensors(embed, head)))
    assert torch.equal(model.embed.weight, embed)
    assert torch.equal(model.head.weight, head)
    assert type(model.head.weight) is nn.Parameter
    assert not model.head.weight.requires_grad
    assert model.head.weight.note == "kept"
    assert report.skipped == {}
    assert "head.weight is tied to embed.weight, but they differ in the checkpoint: both are kept" in caplog.text
    assert dict(model.named_parameters()).keys() == {"embed.weight", "norm.weight", "head.weight"}


def test_row_24_with_a_weight_loader_that_pads(tmp_path: Path) -> None:
    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data[5:].fill_(0)
        parameter.data[:5].copy_(loaded)

    for head in (torch.ones(5, 4), torch.zeros(5, 4)):
        model = Tied()
        model.embed.weight.weight_loader = load
        fast_load(model, write(tmp_path, tied_tensors(torch.ones(5, 4), head)))
        assert (model.head.weight is model.embed.weight) == bool(head.any())
        assert torch.equal(model.head.weight[:5], head)
        assert not model.head.weight[5:].any()


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("loader", [None, lambda parameter, loaded: None])
def test_tied_parameter_of_two_sizes_is_an_error_with_both(tmp_path: Path, loader: Any) -> None:
    model = Tied()
    model.embed.weight.weight_loader = loader
    folder = write(tmp_path, tied_tensors(torch.rand(6, 4), torch.rand(8, 4)))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model, folder, strict=False)
    assert (
        "size mismatch for head.weight: its shape in the checkpoint is torch.Size([8, 4]); it is tied to embed.weight, "
        "which is torch.Size([6, 4]) there." in str(caught.value)
    )


def test_module_under_two_names_keeps_what_the_first_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.shared = model.encoder = nn.Embedding(3, 2)
    saved = {"shared.weight": torch.ones(3, 2), "encoder.weight": torch.ones(3, 2)}
    assert list(fast_load(model, write(tmp_path, saved)).skipped) == ["encoder.weight"]
    saved["encoder.weight"] = torch.zeros(3, 2)
    fast_load(model, write(tmp_path, saved))
    assert model.shared.weight.eq(1).all()
    assert "encoder.weight and shared.weight are one module, but differ in the checkpoint" in caplog.text


def test_loader_that_replaces_a_tied_parameter_leaves_it_tied(tmp_path: Path) -> None:
    model = Tied()

    def replace(parameter: nn.Parameter, loaded: Tensor) -> None:
        model.embed.weight = nn.Parameter(loaded)

    model.embed.weight.weight_loader = replace
    values = torch.rand(6, 4)
    fast_load(model, write(tmp_path, tied_tensors(values, None)))
    assert type(model.head.weight) is nn.Parameter
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, values)


def test_tied_names_may_be_mapped(tmp_path: Path) -> None:
    model = Tied()
    embed, head = torch.rand(6, 4), torch.rand(6, 4)
    saved = {f"model.{name}": tensor for name, tensor in tied_tensors(embed, head).items()}
    fast_load(model, write(tmp_path, saved), mapper=WeightsMapper(orig_to_new_prefix={"model.": ""}))
    assert torch.equal(model.embed.weight, embed)
    assert torch.equal(model.head.weight, head)


def test_a_head_registered_before_the_model_that_it_is_tied_to_is_kept_where_it_differs(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 2)

        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, tensor in weights if self.get_parameter(name).data.copy_(tensor) is not None}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Linear(2, 4, bias=False)
            self.model = Inner()
            self.lm_head.weight = self.model.embed.weight

    tensors = {"lm_head.weight": torch.ones(4, 2), "model.embed.weight": torch.full((4, 2), 2.0)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    fast_load(model, tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.model.embed.weight, tensors["model.embed.weight"])
