"""Linear layers: which part of a checkpoint's tensor each rank has, and what the ranks compute with their parts."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from conftest import WriteCheckpoint
from golden import golden, load_both_ways, make_layer, parents, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import command
from ranks import run_ranks

import weightlift
from weightlift.model.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from weightlift.model.parallel import ParallelConfig
from weightlift.model.parameter import ModelWeightParameter

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def rank(number: int, tp_size: int) -> ParallelConfig:
    return ParallelConfig(tp_rank=number, tp_size=tp_size)


def load(layer: LinearBase, tensor: torch.Tensor, *shard: Any, name: str = "weight") -> torch.Tensor:
    parameter = layer.get_parameter(name)
    parameter.weight_loader(parameter, tensor, *shard)
    return parameter.data


def rows(*numbers: int) -> torch.Tensor:
    """A tensor with one column, whose rows have these numbers."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def merged(sizes: list[int], number: int, tp_size: int, **kwargs: Any) -> MergedColumnParallelLinear:
    layer = MergedColumnParallelLinear(
        1, sizes, bias=False, prefix="gate_up_proj", parallel=rank(number, tp_size), **kwargs
    )
    layer.weight.data.zero_()
    return layer


# ---- values of a reference implementation


@pytest.mark.parametrize("parent", parents("tp_slices_plain"))
def test_weights_and_biases_are_cut_as_the_reference_cuts_them(parent: str) -> None:
    topic = golden("tp_slices_plain")
    info = topic.cases[parent]
    for case, child in topic.children(parent):
        parallel = rank(child["rank"], child["tp"])

        def make(parallel: ParallelConfig = parallel) -> LinearBase:
            return make_layer(info["layer"], info["spec"], parallel, params_dtype=DTYPES[info["dtype"]])

        if not child["ok"]:
            with pytest.raises(ValueError, match=child["error"].removeprefix("AssertionError: ")):
                make()
            continue
        loaded = load_both_ways(topic, parent, make)
        expected = topic.expected(case)
        assert loaded.keys() == expected.keys()
        for name, value in expected.items():
            assert same_bits(loaded[name], value), f"{case}.{name}"


# ---- merged columns


def test_merged_parts_fused_on_disk_are_cut_one_by_one() -> None:
    assert load(merged([4, 4, 4], 1, 2), rows(*range(12))).flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_a_part_by_its_id_goes_behind_those_before_it() -> None:
    assert load(merged([4, 8, 4], 1, 2), rows(100, 102, 104, 106), 2).flatten().tolist() == [0] * 6 + [104, 106]


@pytest.mark.parametrize(
    ("sizes", "shard", "expected"),
    [
        ([4, 8, 4], (0, 1), [3, 4, 9, 10, 11, 12, 0, 0]),
        ([4, 4, 4], (1, 2), [0, 0, 3, 4, 7, 8]),
        ([4, 8, 4], (1, 2), [0, 0, 5, 6, 7, 8, 11, 12]),
        ([4, 4, 4], (1,), [0, 0, 3, 4, 0, 0]),
    ],
)
def test_consecutive_parts_that_are_one_tensor_go_where_they_belong(
    sizes: list[int], shard: tuple[int, ...], expected: list[int]
) -> None:
    on_disk = rows(*range(1, sum(sizes[i] for i in shard) + 1))
    assert load(merged(sizes, 1, 2), on_disk, shard).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        (3, r"Shard id should be between 0 and 2\. Got shard id 3\."),
        (-1, r"Shard id should be between 0 and 2\. Got shard id -1\."),
        ((0, 2), r"Shard id with multiple indices should be consecutive\. Got shard id \(0, 2\)\."),
        ((1, 0), r"Shard id with multiple indices should be consecutive\. Got shard id \(1, 0\)\."),
        ((2, 3), r"Shard id index 3 should be between 0 and 2\. Got shard id \(2, 3\)\."),
        ((), r"Shard id should be a number, a tuple of numbers or None\. Got shard id \(\)\."),
        ("q", r"Shard id should be a number, a tuple of numbers or None\. Got shard id q\."),
    ],
)
def test_an_id_that_a_merged_layer_does_not_have_is_refused(shard: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^gate_up_proj: {problem}$"):
        load(merged([4, 4, 4], 0, 1), rows(1, 2, 3, 4), shard)


def test_a_merged_layer_without_tensor_parallelism_is_whole_on_every_rank() -> None:
    layer = merged([4, 2], 1, 2, disable_tp=True)
    load(layer, rows(4, 5), 1)
    assert load(layer, rows(0, 1, 2, 3), 0).flatten().tolist() == [0, 1, 2, 3, 4, 5]


# ---- query, key and value


def qkv(number: int, tp_size: int, heads: int, kv_heads: int, size: int, **kwargs: Any) -> QKVParallelLinear:
    return QKVParallelLinear(1, size, heads, kv_heads, prefix="qkv_proj", parallel=rank(number, tp_size), **kwargs)


def test_ranks_share_key_and_value_heads_where_there_are_more_ranks() -> None:
    layer = qkv(3, 8, 8, 4, 2)
    q, k, v = torch.arange(16.0), 100 + torch.arange(8.0), 200 + torch.arange(8.0)
    expected = [6, 7, 102, 103, 202, 203]
    for shard, part in (("q", q), ("k", k), ("v", v)):
        load(layer, part[:, None], shard)
        load(layer, part, shard, name="bias")
    assert layer.get_parameter("weight").flatten().tolist() == expected
    assert layer.get_parameter("bias").tolist() == expected
    fused = qkv(3, 8, 8, 4, 2)
    assert load(fused, torch.cat([q, k, v])[:, None]).flatten().tolist() == expected
    assert load(fused, torch.cat([q, k, v]), name="bias").tolist() == expected


def test_value_heads_may_have_a_size_of_their_own() -> None:
    layer = qkv(1, 2, 4, 2, 4, v_head_size=2, bias=False)
    layer.weight.data.zero_()
    assert layer.weight.shape == (14, 1)
    load(layer, rows(*range(8)), "k")
    assert load(layer, rows(10, 11, 12, 13), "v").flatten().tolist() == [0] * 8 + [4, 5, 6, 7, 12, 13]


def test_what_engines_read_of_a_qkv_layer() -> None:
    layer = qkv(3, 8, 8, 4, 2, v_head_size=3)
    assert (layer.num_heads, layer.num_kv_heads, layer.num_kv_head_replicas) == (1, 1, 2)
    assert (layer.output_sizes, layer.output_partition_sizes, layer.output_size) == ([16, 16, 24], [2, 2, 3], 56)


@pytest.mark.parametrize(
    ("tp_size", "heads", "kv_heads", "problem"),
    [
        (3, 8, 8, "total_num_heads by tp_size: 8 is not divisible by 3"),
        (8, 8, 3, "tp_size by total_num_kv_heads: 8 is not divisible by 3"),
        (8, 4, 1, "total_num_heads by tp_size: 4 is not divisible by 8"),
        (2, 4, 3, "total_num_kv_heads by tp_size: 3 is not divisible by 2"),
    ],
)
def test_heads_that_do_not_divide_are_refused(tp_size: int, heads: int, kv_heads: int, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^qkv_proj: {problem}; choose another tp_size$"):
        qkv(0, tp_size, heads, kv_heads, 2)


@pytest.mark.parametrize("shard", [0, "w1", ("q",)])
def test_an_id_that_a_qkv_layer_does_not_have_is_refused(shard: object) -> None:
    with pytest.raises(ValueError, match="Shard id for QKVParallelLinear should be 'q', 'k', or 'v', got shard id"):
        load(qkv(0, 1, 2, 2, 2), rows(1, 2, 3, 4), shard)


# ---- rows


def test_a_row_layer_has_columns_and_the_whole_bias() -> None:
    layer = RowParallelLinear(8, 4, parallel=rank(1, 2))
    weight, bias = torch.arange(32.0).view(4, 8), torch.arange(4.0)
    assert torch.equal(load(layer, weight), weight[:, 4:])
    assert torch.equal(load(layer, bias, name="bias"), bias)


def test_a_row_layer_that_does_not_add_up_has_no_bias_to_add() -> None:
    with pytest.raises(ValueError, match="When not reduce the results, adding bias to the results can lead to"):
        RowParallelLinear(8, 4, reduce_results=False)
    RowParallelLinear(8, 4, reduce_results=False, skip_bias_add=True)


# ---- what does not fit


@pytest.mark.parametrize("size", [6, 10])
@pytest.mark.parametrize("number", [0, 1])
def test_a_tensor_of_another_size_is_refused_on_every_rank(number: int, size: int) -> None:
    column = ColumnParallelLinear(2, 8, bias=False, prefix="model.up", parallel=rank(number, 2))
    row = RowParallelLinear(8, 2, bias=False, prefix="model.down", parallel=rank(number, 2))
    problem = r"model\.up\.weight: Tried to load weights of size torch\.Size\(\[{}, 2\]\).*expected size .*\[8, 2\]"
    with pytest.raises(weightlift.CheckpointMismatchError, match=problem.format(size)):
        load(column, torch.zeros(size, 2))
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"model\.down\.weight: .*expected size .*\[2, 8\]"):
        load(row, torch.zeros(2, size))


def test_a_tensor_of_another_width_is_refused() -> None:
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"expected size torch\.Size\(\[4, 1\]\)"):
        load(merged([4, 4], 0, 2), torch.zeros(4, 3), 0)


def test_a_whole_tensor_of_another_size_is_refused() -> None:
    layer = ReplicatedLinear(2, 3, prefix="model.gate")
    problem = (
        r"Error\(s\) in loading state_dict for ReplicatedLinear:\n\tsize mismatch for model\.gate\.weight: "
        r"Tried to load weights of size torch\.Size\(\[4, 2\]\) to a parameter of size torch\.Size\(\[3, 2\]\)\."
    )
    with pytest.raises(weightlift.CheckpointMismatchError, match=problem):
        load(layer, torch.zeros(4, 2))


@pytest.mark.parametrize("make", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_layers_without_parts_refuse_ids(make: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{make.__name__}: {make.__name__} has no parts\. Got shard id 0\.$"):
        load(make(2, 2), torch.zeros(2, 2), 0)


@pytest.mark.parametrize(("make", "what"), [(ColumnParallelLinear, "output_size"), (RowParallelLinear, "input_size")])
def test_sizes_that_do_not_divide_are_refused(make: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"^mlp: {what} by tp_size: 8 is not divisible by 3; choose another tp_size$"):
        make(8, 8, prefix="mlp", parallel=rank(0, 3))


def test_a_quant_config_without_a_method_for_linear_layers_is_refused() -> None:
    class Config:
        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
            return None

    with pytest.raises(ValueError, match="mlp: Config has no quant method for a linear layer"):
        ColumnParallelLinear(2, 2, quant_config=Config(), prefix="mlp")


def test_a_quant_config_is_asked_by_name() -> None:
    class Config:
        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> UnquantizedLinearMethod:
            self.asked = type(layer), prefix
            return UnquantizedLinearMethod()

    config = Config()
    RowParallelLinear(2, 2, quant_config=config, prefix="mlp.down_proj")
    assert config.asked == (RowParallelLinear, "mlp.down_proj")


# ---- parallelism


def test_a_replaced_parameter_is_cut_as_its_layer_is() -> None:
    layer = ColumnParallelLinear(1, 4, bias=False, disable_tp=True, parallel=rank(1, 2))
    layer.weight = ModelWeightParameter(
        data=torch.empty(4, 1), input_dim=1, output_dim=0, weight_loader=layer.weight_loader
    )
    assert load(layer, rows(0, 1, 2, 3)).flatten().tolist() == [0, 1, 2, 3]


def test_without_torch_distributed_a_layer_is_whole() -> None:
    assert ParallelConfig.current() == ParallelConfig()
    assert ColumnParallelLinear(2, 8).weight.shape == (8, 2)


def test_torch_distributed_says_which_part_is_ours_and_adds_up(tmp_path: Path) -> None:
    code = """
        import sys
        import torch
        from weightlift.model.linear import ColumnParallelLinear, RowParallelLinear
        number = int(sys.argv[1])
        torch.distributed.init_process_group("gloo", f"file://{sys.argv[2]}", world_size=2, rank=number)
        column = ColumnParallelLinear(2, 4, gather_output=True, bias=False, return_bias=False)
        row = RowParallelLinear(4, 2, input_is_parallel=False, bias=False, return_bias=False)
        column.weight_loader(column.weight, torch.arange(8.0).view(4, 2))
        row.weight_loader(row.weight, torch.ones(2, 4))
        assert (column.tp_rank, column.tp_size, column.weight.tolist()[0][0]) == (number, 2, 4.0 * number)
        assert row(column(torch.ones(1, 2))).tolist() == [[28.0, 28.0]]
        torch.distributed.destroy_process_group()
    """
    processes = [
        subprocess.Popen(command(code, number, tmp_path / "store"), stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    for process in processes:
        _, problem = process.communicate(timeout=120)
        assert process.returncode == 0, problem


def test_forward_of_a_cut_layer_needs_a_group() -> None:
    layer = RowParallelLinear(4, 2, parallel=rank(1, 2))
    with pytest.raises(RuntimeError, match="give ParallelConfig a tp_group, such as ProcessGroup"):
        layer(torch.zeros(1, 2))


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(2, 2), (-1, 1), (0, 0)])
def test_a_rank_that_is_none_is_refused(tp_rank: int, tp_size: int) -> None:
    with pytest.raises(ValueError, match=f"^tp_rank is {tp_rank} with tp_size {tp_size}; ranks count from 0"):
        ParallelConfig(tp_rank=tp_rank, tp_size=tp_size)


# ---- what they compute


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_together_compute_what_one_layer_computes(tp_size: int) -> None:
    """A column layer into a row layer, with biases; once more by way of all of their outputs and inputs."""
    torch.manual_seed(0)
    up, up_bias, down, down_bias = torch.randn(8, 6), torch.randn(8), torch.randn(3, 8), torch.randn(3)
    x = torch.randn(2, 5, 6)
    expected = F.linear(F.linear(x, up, up_bias), down, down_bias)

    def compute(parallel: ParallelConfig) -> list[torch.Tensor]:
        outputs = []
        for is_gathered in (False, True):
            first = ColumnParallelLinear(6, 8, gather_output=is_gathered, parallel=parallel)
            second = RowParallelLinear(8, 3, input_is_parallel=not is_gathered, return_bias=False, parallel=parallel)
            for layer, weight, bias in ((first, up, up_bias), (second, down, down_bias)):
                load(layer, weight)
                load(layer, bias, name="bias")
            hidden, no_bias = first(x)
            assert no_bias is None
            outputs.append(second(hidden))
        return outputs

    for output in itertools.chain(*run_ranks(tp_size, compute)):
        torch.testing.assert_close(output, expected)


def test_a_bias_that_is_not_added_is_returned() -> None:
    x = torch.randn(2, 4)
    for make in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        layer = make(4, 3, skip_bias_add=True)
        load(layer, torch.ones(3, 4))
        load(layer, torch.arange(3.0), name="bias")
        output, bias = layer(x)
        torch.testing.assert_close(output, F.linear(x, torch.ones(3, 4)))
        assert bias is layer.bias


# ---- recorded, eager and spelled out


@st.composite
def layers(draw: st.DrawFn) -> tuple[str, dict[str, Any], int, int]:
    """(kind, sizes, tp size, rank)"""
    tp_size = draw(st.sampled_from([1, 2, 3, 4]))
    kind = draw(st.sampled_from(["column", "row", "merged", "qkv"]))
    sizes = st.integers(1, 3).map(lambda size: size * tp_size)
    spec: dict[str, Any] = {"in": draw(sizes if kind == "row" else st.integers(1, 5))}
    if kind == "merged":
        spec["sizes"] = draw(st.lists(sizes, min_size=1, max_size=3))
    elif kind == "qkv":
        kv_heads = draw(st.sampled_from([n for n in range(1, 9) if n % tp_size == 0 or tp_size % n == 0]))
        spec |= {
            "heads": draw(sizes),
            "kv": kv_heads,
            "head": draw(st.integers(1, 3)),
            "vhead": draw(st.integers(1, 3)),
        }
    else:
        spec["out"] = draw(sizes)
    return kind, spec, tp_size, draw(st.integers(0, tp_size - 1))


def spelled_out(
    kind: str, spec: dict[str, Any], tp_size: int, number: int, part: torch.Tensor, shard: object
) -> torch.Tensor:
    """What a rank has of one part, of which it has not the rows but the numbers."""
    if kind == "row":
        return part.chunk(tp_size, -1)[number] if part.dim() == 2 else part
    if kind == "qkv" and shard != "q":
        heads = part.unflatten(0, (spec["kv"], -1))
        if tp_size > spec["kv"]:
            return heads[number * spec["kv"] // tp_size]
        return heads.chunk(tp_size)[number].flatten(0, 1)
    return part.chunk(tp_size)[number]


@settings(max_examples=60, deadline=None)
@given(case=layers(), is_fused=st.booleans(), is_converted=st.booleans())
def test_recorded_eager_and_spelled_out_are_the_same(
    case: tuple[str, dict[str, Any], int, int], is_fused: bool, is_converted: bool
) -> None:
    kind, spec, tp_size, number = case
    if kind == "merged":
        parts = dict(enumerate(spec["sizes"]))
    elif kind == "qkv":
        kv, head = spec["kv"], spec["head"]
        parts = {"q": spec["heads"] * head, "k": kv * head, "v": kv * spec["vhead"]}
    else:
        parts = {None: spec["out"]}
    tensors: dict[str, dict[Any, torch.Tensor]] = {
        "weight": {shard: torch.randn(size, spec["in"]) for shard, size in parts.items()},
        "bias": {shard: torch.randn(size) for shard, size in parts.items()},
    }
    expected = {
        name: torch.cat([spelled_out(kind, spec, tp_size, number, part, shard) for shard, part in given.items()])
        for name, given in tensors.items()
    }
    if is_fused:
        tensors = {name: {None: torch.cat(list(given.values()))} for name, given in tensors.items()}
    dtype = torch.float16 if is_converted else torch.float32
    eager, recorded = (make_layer(kind, spec, rank(number, tp_size), params_dtype=dtype) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        named = {f"{name}.{shard}": part for name, given in tensors.items() for shard, part in given.items()}
        safetensors.torch.save_file(named, path)
        with weightlift.open_checkpoint(path) as checkpoint:
            for name, given in tensors.items():
                for shard, part in given.items():
                    arguments = () if shard is None else (shard,)
                    load(eager, part, *arguments, name=name)
                    load(recorded, checkpoint[f"{name}.{shard}"], *arguments, name=name)
            assert checkpoint.report.num_forced == 0
    for name, value in expected.items():
        assert same_bits(eager.get_parameter(name).data, value.to(dtype)), name
        assert same_bits(recorded.get_parameter(name).data, value.to(dtype)), name


# ---- a whole load


def test_layers_are_loaded_by_their_names_with_no_part_left_unset(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    class Attention(torch.nn.Module):
        def __init__(self, parallel: ParallelConfig) -> None:
            super().__init__()
            self.qkv_proj = QKVParallelLinear(16, 4, 4, 2, prefix="qkv_proj", parallel=parallel)
            self.o_proj = RowParallelLinear(16, 16, bias=False, prefix="o_proj", parallel=parallel)

    tensors = {"o_proj.weight": torch.randn(16, 16)}
    for name, size in (("q", 16), ("k", 8), ("v", 8)):
        tensors |= {f"{name}_proj.weight": torch.randn(size, 16), f"{name}_proj.bias": torch.randn(size)}
    mapper = weightlift.WeightsMapper(orig_to_new_stacked={f"{name}_proj.": ("qkv_proj.", name) for name in "qkv"})
    model = Attention(rank(1, 2))
    report = weightlift.fast_load(model, write_checkpoint(tmp_path, tensors), mapper=mapper)
    assert (report.gaps, report.double_writes, report.num_forced) == ([], [], 0)
    q, k, v = (tensors[f"{name}_proj.weight"].chunk(2)[1] for name in "qkv")
    assert torch.equal(model.qkv_proj.weight, torch.cat([q, k, v]))
    del tensors["k_proj.bias"]
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"qkv_proj\.bias\[8:12\]"):
        weightlift.fast_load(model, write_checkpoint(tmp_path / "less", tensors), mapper=mapper)


@pytest.mark.parametrize("number", range(4))
def test_a_rank_reads_no_more_than_its_share_of_the_rows(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, number: int
) -> None:
    sizes = {"q": 2048, "k": 512, "v": 512}
    folder = write_checkpoint(tmp_path, {name: torch.zeros(size, 1024) for name, size in sizes.items()})
    layer = QKVParallelLinear(1024, 64, 32, 8, bias=False, parallel=rank(number, 4))
    with weightlift.open_checkpoint(folder) as checkpoint:
        for name in sizes:
            load(layer, checkpoint[name], name)
    assert checkpoint.report.bytes_needed == layer.weight.nbytes
    assert checkpoint.report.bytes_read <= 1.05 * layer.weight.nbytes
