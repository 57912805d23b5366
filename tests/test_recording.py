"""The contract of recording, sentence by sentence: as if every copy had happened at once, in program order."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import gc
import io
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from processes import run_python
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import weightlift
from weightlift import Checkpoint
from weightlift.storage import file_report
from weightlift.tensor import CheckpointTensor
from weightlift.watch import watched

ROWS, COLUMNS = 64, 512  # of float32: 128 KiB, too large to be kept as a value
ROW_BYTES = COLUMNS * 4


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "w": torch.rand(ROWS, COLUMNS, generator=generator),
        "v": torch.rand(ROWS, COLUMNS, generator=generator),
        "q": torch.rand(ROWS, COLUMNS, generator=generator),
        "k": torch.rand(ROWS // 2, COLUMNS, generator=generator),
        "half": torch.rand(ROWS, COLUMNS, generator=generator).half(),
        "int": torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS),
        "small": torch.arange(12.0).view(3, 4),
        "index": torch.tensor([2, 0, 1]),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "complex": torch.complex(torch.arange(6.0), torch.arange(6.0) + 1),
        **{f"scale.{i}": torch.tensor(float(i)) for i in range(50)},
    }


TENSORS = make_tensors()
W, V, SMALL = TENSORS["w"], TENSORS["v"], TENSORS["small"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "model.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    return path


@pytest.fixture
def checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Not recording: `with checkpoint:` records."""
    with torch.no_grad():
        checkpoint = weightlift.open_checkpoint(path, config=weightlift.LoadConfig(strategy="buffered"))
        yield checkpoint
        checkpoint.close()


def param(*shape: int, dtype: torch.dtype = torch.float32, fill: float = -1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, fill).to(dtype), requires_grad=False)


def is_recorded(tensor: torch.Tensor) -> bool:
    return type(tensor) is CheckpointTensor


def assert_nothing_was_read(checkpoint: Checkpoint) -> None:
    report = checkpoint.report
    assert (report.bytes_read, report.num_transfers, report.num_forced) == (0, 0, 0)


# ---- any form in which engines write


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """As engines have it."""
    if param.numel() == 1 and loaded_weight.numel() == 1:
        param.data.fill_(loaded_weight.item())
    else:
        assert param.size() == loaded_weight.size(), (param.size(), loaded_weight.size())
        param.data.copy_(loaded_weight)


def write_ellipsis(p: torch.Tensor, t: torch.Tensor) -> None:
    p[...] = t


def write_slice(p: torch.Tensor, t: torch.Tensor) -> None:
    p.data[:] = t


def write_by_rows(p: torch.Tensor, t: torch.Tensor) -> None:
    for row, loaded in zip(p, t, strict=True):
        row.copy_(loaded)


def write_halves(p: torch.Tensor, t: torch.Tensor) -> None:
    for mine, theirs in zip(p.data.chunk(2, dim=1), torch.chunk(t, 2, dim=1), strict=True):
        mine.copy_(theirs)


def write_narrow(p: torch.Tensor, t: torch.Tensor) -> None:
    for start in range(0, ROWS, 16):
        torch.narrow(p.data, 0, start, 16).copy_(torch.narrow(t, 0, start, 16))


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy_": lambda p, t: p.copy_(t),
    "data.copy_": lambda p, t: p.data.copy_(t),
    "non_blocking": lambda p, t: p.copy_(t, non_blocking=True),
    "default_weight_loader": default_weight_loader,
    "p[...] = t": write_ellipsis,
    "p.data[:] = t": write_slice,
    "rows": write_by_rows,
    "halves": write_halves,
    "narrow": write_narrow,
    "transposed": lambda p, t: p.t().copy_(t.t()),
    "permuted": lambda p, t: p.data.permute(1, 0).copy_(t.permute(1, 0)),
    "flat": lambda p, t: p.view(-1).copy_(t.view(-1)),
    "bytes": lambda p, t: p.view(torch.uint8).copy_(t.view(torch.uint8)),
    "unsqueezed": lambda p, t: p.unsqueeze(0).copy_(t.unsqueeze(0)),
    "contiguous": lambda p, t: p.copy_(t.t().contiguous().t()),
    "reshaped": lambda p, t: p.copy_(t.reshape(2, -1).reshape(ROWS, COLUMNS)),
    "to": lambda p, t: p.copy_(t.to(p.dtype).to("cpu")),
    "type_as": lambda p, t: p.copy_(t.type_as(p)),
    "detached": lambda p, t: p.copy_(t.detach().data),
    "load_state_dict": lambda p, t: torch.nn.ParameterDict({"x": p}).load_state_dict({"x": t}),
    "split": lambda p, t: torch.cat([p]).shape and [a.copy_(b) for a, b in zip(p.split(5), t.split(5), strict=True)],
}


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_writing_is_recorded(path: Path, form: str, mode: type, watch: bool) -> None:
    with mode():
        checkpoint = weightlift.open_checkpoint(path, watch=watch)
        p = param(ROWS, COLUMNS)
        with checkpoint:
            FORMS[form](p, checkpoint["w"])
            assert_nothing_was_read(checkpoint)
        assert torch.equal(p, W)
        assert checkpoint.report.bytes_needed == W.nbytes
        assert checkpoint.report.num_forced == 0


def test_writing_to_a_leaf_that_requires_grad_is_torchs_error(checkpoint: Checkpoint) -> None:
    p = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    with checkpoint, torch.enable_grad(), pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        p.copy_(checkpoint["w"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fused_parameters_are_filled_part_by_part(path: Path, mode: type) -> None:
    """Fused qkv of one tensor-parallel rank of two, gate and up, an expert: vLLM's way, narrow on both sides."""

    def load_shard(p: torch.Tensor, loaded: torch.Tensor, offset: int, size: int) -> None:
        p = p.data.narrow(0, offset, size)
        loaded = loaded.narrow(0, 1 * size, size)
        assert p.shape == loaded.shape
        p.copy_(loaded)

    with mode():
        qkv, gate_up, experts = param(80, COLUMNS), param(64, COLUMNS), param(4, 64, COLUMNS)
        with weightlift.open_checkpoint(path) as checkpoint:
            load_shard(qkv, checkpoint["q"], 0, 32)
            load_shard(qkv, checkpoint["k"], 32, 16)
            load_shard(qkv, checkpoint["v"], 48, 32)
            load_shard(gate_up, checkpoint["w"], 0, 32)
            load_shard(gate_up, checkpoint["v"], 32, 32)
            for expert in range(4):
                experts.data[expert].narrow(0, 0, 32).copy_(checkpoint["w"][:32])
                experts.data[expert][32:].copy_(checkpoint["v"].select(0, expert).expand(32, -1))
            assert_nothing_was_read(checkpoint)
        assert checkpoint.report.num_forced == 0
    q, k = TENSORS["q"], TENSORS["k"]
    assert torch.equal(qkv, torch.cat([q[32:], k[16:], V[32:]]))
    assert torch.equal(gate_up, torch.cat([W[32:], V[32:]]))
    for expert in range(4):
        assert torch.equal(experts[expert], torch.cat([W[:32], V[expert].expand(32, -1)]))


def test_column_halves_read_no_more_than_their_rows(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS // 2)
    with checkpoint:
        p.data.copy_(checkpoint["w"].narrow(1, COLUMNS // 2, COLUMNS // 2))
    assert torch.equal(p, W[:, COLUMNS // 2 :])
    assert checkpoint.report.bytes_needed == W.nbytes // 2
    assert checkpoint.report.bytes_read <= W.nbytes


def test_only_what_is_needed_is_read(checkpoint: Checkpoint) -> None:
    p = param(8, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"][16:24])
    assert checkpoint.report.bytes_read == checkpoint.report.bytes_needed == 8 * ROW_BYTES


def test_python_attributes_are_kept(checkpoint: Checkpoint) -> None:
    t = checkpoint["w"]
    t.shard_id = "q"  # type: ignore[attr-defined]
    assert t.shard_id == "q"  # type: ignore[attr-defined]


def test_what_needs_no_values_reads_nothing(checkpoint: Checkpoint) -> None:
    with checkpoint:
        t = checkpoint["w"].narrow(1, 2, 10).t()
        real = W.narrow(1, 2, 10).t()
        attributes = (
            "shape ndim dtype device layout itemsize nbytes is_sparse is_meta is_cuda requires_grad is_leaf grad"
        )
        for name in attributes.split():
            assert getattr(t, name) == getattr(real, name), name
        methods = (
            "size stride dim numel nelement element_size storage_offset is_contiguous is_floating_point is_complex"
        )
        for name in [*methods.split(), "__len__"]:
            assert getattr(t, name)() == getattr(real, name)(), name
        assert t.size(0) == 10
        assert t.mT.shape == t.T.shape == (ROWS, 10)
        assert isinstance(t, torch.Tensor)
        assert torch.is_tensor(t)
        assert not isinstance(t, torch.nn.Parameter)
        assert torch.empty_like(t).shape == torch.zeros_like(t).shape == t.new_empty(10, ROWS).shape == t.shape
        assert t.to("meta").shape == t.shape
        assert "w" in repr(t)
        assert hash(t) == hash(t)
        assert {t: 1}[t] == 1
        assert t is not None
        assert t != None  # noqa: E711
        for row, other in zip(t, real, strict=True):
            assert row.stride() == other.stride()
        assert_nothing_was_read(checkpoint)


# ---- program order; overwritten transfers


def test_overlapping_copies_keep_their_order(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    expected = torch.full((ROWS, COLUMNS), -1.0)
    with checkpoint:
        for dst, real, name in ((p, expected, "w"), (p[8:24], expected[8:24], "v"), (p[:, 5:9], expected[:, 5:9], "q")):
            source, value = checkpoint[name], TENSORS[name]
            rows, columns = dst.shape
            dst.copy_(source[:rows, :columns])
            real.copy_(value[:rows, :columns])
        assert_nothing_was_read(checkpoint)
    assert torch.equal(p, expected)


def test_overwritten_transfer_is_dropped_and_never_read(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p[10:20].copy_(checkpoint["w"][:10])
        p.copy_(checkpoint["v"])
    assert torch.equal(p, V)
    assert checkpoint.report.num_dropped == 1
    assert checkpoint.report.bytes_read == V.nbytes


@pytest.mark.parametrize(
    "fill", [lambda p: p.zero_(), lambda p: p.fill_(3), lambda p: p.copy_(V), lambda p: p.normal_()]
)
def test_transfer_that_a_fill_overwrites_is_never_read(checkpoint: Checkpoint, fill: Callable[[Any], Any]) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        fill(p)
        left = p.clone()
        p.copy_(p.clone())
    assert torch.equal(p, left)
    assert not torch.equal(p, W)
    assert checkpoint.report.bytes_read == 0
    assert checkpoint.report.num_dropped == 1


def test_partly_overwritten_transfer_runs_first(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        p[:8].zero_()
    assert torch.equal(p, torch.cat([torch.zeros(8, COLUMNS), W[8:]]))


def views_of_one_buffer() -> list[torch.Tensor]:
    flat = torch.full((2 * ROWS * COLUMNS,), -1.0)
    n = ROWS * COLUMNS
    return [flat[:n].view(ROWS, COLUMNS), flat[n // 2 : n // 2 + n].view(ROWS, COLUMNS)]


def data_of_one_parameter() -> list[torch.Tensor]:
    p = param(ROWS, COLUMNS)
    return [p.data, p.detach()]


def two_storages_of_one_memory() -> list[torch.Tensor]:
    array = np.full((ROWS, COLUMNS), -1.0, dtype=np.float32)
    return [torch.from_numpy(array), torch.from_numpy(array[ROWS // 2 :])]


@pytest.mark.parametrize("make", [views_of_one_buffer, data_of_one_parameter, two_storages_of_one_memory])
def test_aliasing_destinations_keep_program_order(path: Path, make: Callable[[], list[torch.Tensor]]) -> None:
    def write(tensors: Any, a: torch.Tensor, b: torch.Tensor) -> None:
        a.copy_(tensors["w"][: len(a)])
        b.copy_(tensors["v"][: len(b)])
        a[1:3].copy_(tensors["q"][:2])

    recorded, eager = make(), make()
    with weightlift.open_checkpoint(path) as checkpoint:
        write(checkpoint, *recorded)
        assert_nothing_was_read(checkpoint)
    write(TENSORS, *eager)
    for a, b in zip(recorded, eager, strict=True):
        assert torch.equal(a, b)


# ---- the watch


def test_filling_the_rest_of_a_half_copied_parameter_forces_nothing(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p[:32].copy_(checkpoint["w"][:32])
        p[32:].zero_()
        p[32:].add_(1)
        assert p[40:].sum() == 24 * COLUMNS
        assert_nothing_was_read(checkpoint)
    assert torch.equal(p, torch.cat([W[:32], torch.ones(32, COLUMNS)]))


def test_interleaved_columns_do_not_overlap(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p[:, ::2].copy_(checkpoint["w"][:, ::2])
        p[:, 1::2].mul_(5)
        assert_nothing_was_read(checkpoint)
    assert torch.equal(p[:, ::2], W[:, ::2])
    assert (p[:, 1::2] == -5).all()


def test_reading_an_element_runs_its_transfer_and_no_other(checkpoint: Checkpoint) -> None:
    p = param(2, ROWS, COLUMNS)
    with checkpoint:
        p[0].copy_(checkpoint["w"])
        p[1].copy_(checkpoint["v"])
        assert p[0, 3, 4] == W[3, 4]
        assert checkpoint.report.num_transfers == checkpoint.report.num_forced == 1
        assert checkpoint.report.bytes_read == W.nbytes
    assert torch.equal(p[1], V)


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy().copy(),
    "asarray": lambda p: np.asarray(p).copy(),
    "dlpack": lambda p: np.from_dlpack(p).copy(),
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)).clone(),
    "repr": repr,
    "sum": lambda p: p.sum(),
    "in place": lambda p: p.add_(1),
    "out": lambda p: torch.mul(p, 2, out=torch.empty_like(p)),
    "list argument": lambda p: torch.cat([p, p]),
    "view": lambda p: p.t()[3:5] + 0,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "clone": lambda p: p.clone(),
    "foreach": lambda p: torch._foreach_add([p], 1),
    "apply_": lambda p: p.apply_(lambda x: x + 1),
    "map_": lambda p: p.map_(torch.ones_like(p), lambda x, y: x + y),
    "storage": lambda p: bytes(p.untyped_storage()),
    "swap": lambda p: p[[1, 0]],
    "bool": lambda p: bool((p == p).all()),
    "functional_call": lambda p: torch.nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "copy from": lambda p: torch.zeros(p.shape).copy_(p),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_a_parameter_sees_what_was_copied(checkpoint: Checkpoint, look: str) -> None:
    p, eager = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    eager.copy_(W)
    with checkpoint:
        p.copy_(checkpoint["w"])
        seen, expected = LOOKS[look](p), LOOKS[look](eager)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0) if not isinstance(seen, (str, bytes, list)) else None
    if isinstance(seen, (str, bytes, list)) and look != "foreach":
        assert seen == expected
    assert torch.equal(p, eager)


def test_saving_a_parameter_saves_what_was_copied(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    file = io.BytesIO()
    with checkpoint:
        p.copy_(checkpoint["w"])
        torch.save({"p": p}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["p"], W)


def test_new_memory_under_a_parameter_gets_what_was_copied(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        p.share_memory_()
        assert p.is_shared()
        p[:2].copy_(checkpoint["v"][:2])
    assert torch.equal(p, torch.cat([V[:2], W[2:]]))


def test_without_the_watch_nothing_is_forced(path: Path) -> None:
    p = param(ROWS, COLUMNS)
    with weightlift.open_checkpoint(path, watch=False) as checkpoint:
        p.copy_(checkpoint["w"])
        assert p[0, 0] == -1
        checkpoint.run()
        assert torch.equal(p, W)


def test_outside_of_a_block_copies_run_at_once(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    p.copy_(checkpoint["w"])
    assert torch.equal(p, W)


# ---- meta destinations; other modes


class CopyCounter(TorchDispatchMode):
    """As engines count loaded elements."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("watch", [True, False])
def test_modes_inside_and_outside_of_the_watch_see_each_copy(
    path: Path, device: str, inside: bool, watch: bool
) -> None:
    counter = CopyCounter()
    p = torch.zeros(ROWS, COLUMNS, device=device)
    outer: AbstractContextManager[Any] = nullcontext() if inside else counter
    inner: AbstractContextManager[Any] = counter if inside else nullcontext()
    with outer, weightlift.open_checkpoint(path, watch=watch) as checkpoint, inner:
        p[:8].copy_(checkpoint["w"][:8])
        p.data.copy_(checkpoint["w"])
        p[...] = torch.cat([checkpoint["k"], checkpoint["k"]])
        assert counter.copied == 8 * COLUMNS + 2 * ROWS * COLUMNS
        assert_nothing_was_read(checkpoint)
    assert counter.copied == 8 * COLUMNS + 2 * ROWS * COLUMNS
    assert (checkpoint.report.bytes_read == 0) == (device == "meta")


def test_meta_copies_check_shapes(checkpoint: Checkpoint) -> None:
    p = torch.zeros(ROWS, 3, device="meta")
    with checkpoint, pytest.raises(RuntimeError, match=r"The size of tensor a \(3\) must match the size of tensor b"):
        p.copy_(checkpoint["w"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_default_device_does_not_matter(path: Path, device: str) -> None:
    p = param(ROWS, COLUMNS)
    whole = torch.zeros(2, ROWS, COLUMNS, dtype=torch.int64)
    with torch.device(device), torch.no_grad(), weightlift.open_checkpoint(path) as checkpoint:
        p.copy_(checkpoint["w"])
        whole[0].copy_(checkpoint["int"])
        whole[1].copy_(torch.cat([checkpoint["int"][:32], checkpoint["int"][32:]]))
        assert checkpoint["scalar"].item() == 2.5
        assert torch.equal(checkpoint["v"] * 2, V * 2)
        assert torch.equal(checkpoint["v"].unfold(0, 2, 1), V.unfold(0, 2, 1))
        moved = torch.nn.Parameter(checkpoint["v"])
    assert torch.equal(p, W)
    assert torch.equal(moved, V)
    assert torch.equal(whole, TENSORS["int"].long().expand(2, -1, -1))


def test_default_dtype_does_not_matter(checkpoint: Checkpoint) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        p = torch.zeros(ROWS, COLUMNS, dtype=torch.float32)
        with checkpoint:
            p.copy_(checkpoint["w"])
            assert torch.equal(checkpoint["v"] + 0, V)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(p, W)


def test_recording_goes_on_under_a_flop_counter(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint, FlopCounterMode(display=False) as counter:
        p.copy_(checkpoint["w"])
        torch.nn.functional.linear(torch.ones(1, COLUMNS), p)
    assert counter.get_total_flops() == 2 * ROWS * COLUMNS
    assert torch.equal(p, W)


class Wrapper(torch.Tensor):
    """A tensor that holds another, as quantised and distributed tensors do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        self: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        result = func(*map(unwrap, args), **(kwargs or {}))
        return args[0] if func._schema.is_mutable else result


def test_tensors_inside_other_subclasses_are_written_and_watched(checkpoint: Checkpoint) -> None:
    wrapper = Wrapper(torch.zeros(ROWS, COLUMNS))
    with checkpoint:
        wrapper.copy_(checkpoint["w"])
        assert_nothing_was_read(checkpoint)
        assert torch.equal(wrapper + 0, W)


# ---- changed destinations


def test_resized_destination_is_an_error_that_names_the_parameter(path: Path) -> None:
    targets = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    storage = targets["w"].untyped_storage()

    def resize(target: torch.Tensor, loaded: torch.Tensor) -> None:
        target.copy_(loaded)
        storage.resize_(8)

    targets["w"].weight_loader = resize  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"w: its memory was replaced or resized after a copy into it was recorded"):
        weightlift.fast_load(targets, path, strict=False)


def test_resizing_through_the_tensor_runs_its_transfer_first(checkpoint: Checkpoint) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        p.untyped_storage().resize_(2 * W.nbytes)
    assert torch.equal(p, W)


@pytest.mark.parametrize(
    "resize",
    [
        lambda end: end.resize_(ROWS, COLUMNS),
        lambda end: end.resize_as_(V),
        lambda end: torch.neg(V, out=end),
        lambda end: end.untyped_storage().resize_(2 * W.nbytes),
    ],
    ids=["resize_", "resize_as_", "out", "untyped_storage"],
)
def test_resizing_a_view_runs_what_writes_to_the_rest_of_its_memory(checkpoint: Checkpoint, resize: Any) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        resize(p[ROWS:])
        p[:1].copy_(checkpoint["v"][:1])
    assert torch.equal(p, torch.cat([V[:1], W[1:]]))


def test_memory_that_was_replaced_between_two_copies_is_an_error(checkpoint: Checkpoint) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    storage = p.untyped_storage()

    def load() -> None:
        with checkpoint:
            p[:1].copy_(checkpoint["w"][:1])
            storage.resize_(64 * W.nbytes)
            p[1:].copy_(checkpoint["w"][1:])

    with pytest.raises(RuntimeError, match="its memory was replaced"):
        load()


def test_memory_that_was_replaced_when_copies_had_landed_is_watched_from_then_on(checkpoint: Checkpoint) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    storage = p.untyped_storage()

    def load() -> None:
        with checkpoint:
            p.copy_(checkpoint["w"])
            assert torch.equal(p + 0, W)
            storage.resize_(64 * W.nbytes)
            p.copy_(checkpoint["v"])
            assert torch.equal(p + 0, V)
            p.copy_(checkpoint["q"])
            storage.resize_(W.nbytes)

    with pytest.raises(RuntimeError, match="its memory was replaced"):
        load()


def test_replaced_data_leaves_the_copy_to_the_old_memory(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    old = p.data
    with checkpoint:
        p.data.copy_(checkpoint["w"])
        p.data = torch.zeros(2)
        assert_nothing_was_read(checkpoint)
    assert torch.equal(p, torch.zeros(2))
    assert torch.equal(old, W)


def test_destination_without_other_owners_stays_alive(checkpoint: Checkpoint) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    address = p.data_ptr()
    with checkpoint:
        p.copy_(checkpoint["w"])
        del p
        assert torch.zeros(ROWS, COLUMNS).data_ptr() != address
    assert checkpoint.report.num_transfers == 1


# ---- errors at record time, in torch's words


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((ROWS, 3), lambda t: t),
        ((3, ROWS, 1), lambda t: t),
        ((COLUMNS,), lambda t: t),
        ((0, COLUMNS), lambda t: t),
        ((2, 2), lambda t: t.view(7, 7)),
        ((2, 2), lambda t: t.narrow(0, 60, 5)),
        ((2, 2), lambda t: t.narrow(2, 0, 1)),
        ((2, 2), lambda t: t.select(0, 64)),
        ((2, 2), lambda t: t[64]),
        ((2, 2), lambda t: t.t().view(-1)),
        ((2, 2), lambda t: t[None].t()),
        ((2, 2), lambda t: t.expand(3, COLUMNS)),
        ((2, 2), lambda t: t.squeeze(5)),
    ],
)
def test_shape_errors_come_when_recording_in_torchs_words(
    checkpoint: Checkpoint, shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as expected:
        torch.zeros(shape).copy_(view(W))
    p = torch.zeros(shape)
    with checkpoint:
        with pytest.raises(type(expected.value)) as raised:
            p.copy_(view(checkpoint["w"]))
        assert str(raised.value) == str(expected.value)
        assert_nothing_was_read(checkpoint)


def test_writing_to_an_expanded_destination_is_torchs_error(checkpoint: Checkpoint) -> None:
    with checkpoint, pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, COLUMNS).expand(ROWS, -1).copy_(checkpoint["w"])


def test_broadcast_is_recorded(checkpoint: Checkpoint) -> None:
    p = param(3, ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        p[0, :].copy_(checkpoint["v"][5])
        assert_nothing_was_read(checkpoint)
    assert torch.equal(p[0], V[5].expand(ROWS, -1))
    assert torch.equal(p[1:], W.expand(2, -1, -1))


# ---- small tensors are values


def test_many_scalars_cost_one_read(checkpoint: Checkpoint) -> None:
    scales = [checkpoint[f"scale.{i}"] for i in range(50)]
    first = scales[7].item()
    once = checkpoint.report.bytes_read
    assert first == 7
    assert max(scale.item() for scale in scales) == 49
    assert max(scales) == 49
    assert torch.stack(scales).max() == 49
    assert (scales[3] > 2) & (scales[3] < 4)
    assert float(scales[2]) == int(scales[2]) == 2
    assert f"{scales[2]:.1f}" == "2.0"
    assert checkpoint.report.bytes_read == once < 64 << 10
    assert checkpoint["index"].tolist() == [2, 0, 1]


def test_small_values_are_kept_up_to_a_bound(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightlift.values, "_RUN_BYTES", 16)
    monkeypatch.setattr(weightlift.values, "_KEPT_BYTES", 64)
    for _ in range(2):
        assert [checkpoint[f"scale.{i}"].item() for i in range(50)] == list(range(50))
        assert sum(value.nbytes for value in checkpoint._program._small._values.values()) <= 64
    once = checkpoint.report.bytes_read
    assert checkpoint["scale.49"].item() == 49
    assert checkpoint.report.bytes_read == once


def test_writing_to_a_value_changes_nobody_elses(checkpoint: Checkpoint) -> None:
    t = checkpoint["small"]
    t.add_(1)
    t.numpy()[0, 0] = 7
    assert torch.equal(checkpoint["small"] + 0, SMALL)
    assert t[0, 0] == 7


def test_values_at_odd_offsets_are_right(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F64","shape":[2],"data_offsets":[3,19]}}'
    )
    b = torch.tensor([1.5, -2.0], dtype=torch.float64)
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"abc" + b.numpy().tobytes())
    checkpoint = weightlift.open_checkpoint(file)
    assert checkpoint["b"].tolist() == [1.5, -2.0]
    assert checkpoint["b"][1:].item() == -2.0


# ---- what stays recorded


def test_copies_of_checkpoint_tensors_stay_recorded(checkpoint: Checkpoint) -> None:
    with checkpoint:
        t = checkpoint["w"]
        for made in (
            t.t().contiguous(),
            t.t().reshape(2, -1, ROWS),
            t.to(torch.float16),
            t.to("cpu", torch.bfloat16),
            t.half(),
            t.clone(),
            t.cpu(),
            torch.cat([t, checkpoint["v"]]),
            torch.cat([t, checkpoint["v"]], dim=-1)[:, 3:700],
            torch.stack([t, checkpoint["v"]]),
            torch.cat([t, checkpoint["v"]]).half(),
        ):
            assert is_recorded(made)
        p = torch.zeros(2, ROWS, COLUMNS)
        p.copy_(torch.stack([t, checkpoint["v"]]))
        assert_nothing_was_read(checkpoint)
    assert torch.equal(p, torch.stack([W, V]))
    assert checkpoint.report.num_forced == 0


def test_strides_of_torch_and_file_are_kept_apart(checkpoint: Checkpoint) -> None:
    t, real = checkpoint["w"].t().contiguous(), W.t().contiguous()
    assert is_recorded(t)
    assert t.stride() == real.stride()
    assert is_recorded(t.view(-1, 2 * ROWS)[1:3]) or torch.equal(t.view(-1, 2 * ROWS), real.view(-1, 2 * ROWS))
    p = param(COLUMNS, ROWS)
    with checkpoint:
        p.copy_(t)
    assert torch.equal(p, real)


def test_concatenations_mixed_with_real_tensors_are_values(checkpoint: Checkpoint) -> None:
    ones = torch.ones(1, COLUMNS)
    assert torch.equal(torch.cat([checkpoint["w"], ones]), torch.cat([W, ones]))
    assert torch.equal(torch.stack([V, checkpoint["w"]]), torch.stack([V, W]))


def test_a_concatenation_is_not_copied_into_an_expanded_tensor(checkpoint: Checkpoint) -> None:
    with checkpoint, torch.inference_mode():
        one = checkpoint["w"][0, :1]
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            torch.zeros(1).expand(2).copy_(torch.cat([one, one]))


def test_writes_do_not_reach_concatenations_made_before(checkpoint: Checkpoint) -> None:
    t = checkpoint["small"]
    whole = torch.cat([t, t])
    part = whole[1:3]
    t.zero_()
    assert torch.equal(whole + 0, torch.cat([SMALL, SMALL]))
    whole.fill_(3)
    assert (part == 3).all()


def test_views_see_writes_through_each_other(checkpoint: Checkpoint) -> None:
    t = checkpoint["small"]
    row, transposed, data = t[1], t.t(), t.data
    t.mul_(10)
    row[0] = -1
    expected = SMALL * 10
    expected[1, 0] = -1
    for seen, real in ((t, expected), (row, expected[1]), (transposed, expected.t()), (data, expected)):
        assert torch.equal(seen + 0, real)
    assert torch.equal(checkpoint["small"] + 0, SMALL)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="without AVX2 torch converts NaN differently"
)
@pytest.mark.parametrize("wanted", [*FLOATS, torch.float64, torch.int32])
@pytest.mark.parametrize("filed", FLOATS)
def test_casts_are_those_of_torch(tmp_path: Path, filed: torch.dtype, wanted: torch.dtype) -> None:
    """Bit for bit. Of NaN, where torch itself gives different ones for the same number, the places."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if filed == torch.float32:
        low = torch.tensor([0, 1, 0x7FF, 0x800, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
        values = ((patterns.long()[:, None] << 16) + low).to(torch.int32).view(filed)
    else:
        values = patterns.to(torch.int16).view(filed)
    if not wanted.is_floating_point:
        values = values.nan_to_num(0, 0, 0).clamp(-1000, 1000)
    safetensors.torch.save_file({"x": values}, tmp_path / "x.safetensors")
    p = torch.zeros(values.shape, dtype=wanted)
    with weightlift.open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        p.copy_(checkpoint["x"])
    expected = values.to(wanted)
    same = p.view(torch.uint8).view(*p.shape, -1).eq(expected.view(torch.uint8).view(*p.shape, -1)).all(-1)
    if (filed, wanted) in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)) or wanted == torch.float64:
        same |= p.isnan() & expected.isnan()
    assert same.all()


def test_two_conversions_in_a_row_round_twice(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"].half())
        assert torch.equal(checkpoint["w"].to(torch.float16).to(torch.bfloat16) + 0, W.half().bfloat16())
    assert torch.equal(p, W.half().float())


def test_conjugate_and_negative_views_are_true(checkpoint: Checkpoint) -> None:
    real = TENSORS["complex"]
    assert torch.equal(checkpoint["complex"].conj() + 0, real.conj() + 0)
    assert torch.equal(checkpoint["complex"].conj().imag + 0, real.conj().imag + 0)
    assert torch.equal(checkpoint["complex"].real + 0, real.real)
    assert torch.equal(torch._neg_view(checkpoint["small"]) + 0, -SMALL)
    p = torch.zeros(2, 6, dtype=torch.complex64)
    with checkpoint:
        p[0].copy_(checkpoint["complex"].conj())
        p.conj()[1].copy_(checkpoint["complex"])
    assert torch.equal(p, torch.stack([real.conj(), real.conj()]))


def test_cuda_without_cuda_is_torchs_error(checkpoint: Checkpoint) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        SMALL.cuda()
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        checkpoint["small"].cuda()
    assert str(raised.value) == str(expected.value)


# ---- no use of a CheckpointTensor crashes or leaks out silently

ESCAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda t: (-t + 1) ** 2 / 3,
    "matmul": lambda t: t @ t.t(),
    "linear": lambda t: torch.nn.functional.linear(torch.ones(1, 4), t),
    "einsum": lambda t: torch.einsum("ij->ji", t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": lambda t: save_and_load(t),
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "array": lambda t: np.array(t, dtype=np.int32),
    "ufunc": lambda t: np.add(t, 1),
    "from_dlpack": torch.from_dlpack,
    "numpy from_dlpack": np.from_dlpack,
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "memoryview": lambda t: memoryview(t.numpy()).tolist(),
    "tolist": lambda t: t.tolist(),
    "share_memory_": lambda t: t.share_memory_(),
    "untyped_storage": lambda t: bytes(t.untyped_storage()),
    "storage": lambda t: t.data_ptr() == t.untyped_storage().data_ptr() == t[:1].data_ptr() != 0,
    "torch.tensor": lambda t: torch.as_tensor(t, dtype=torch.float16),
    "torch.Tensor": lambda t: torch.Tensor(t) + 0,
    "_make_subclass": lambda t: torch.Tensor._make_subclass(torch.nn.Parameter, t, False),
    "as_subclass": lambda t: t.as_subclass(torch.nn.Parameter),
    "Parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "Parameter of a written one": lambda t: torch.nn.Parameter(t.add_(1), requires_grad=False),
    "set_": lambda t: torch.zeros(2).set_(t),
    "fill_": lambda t: torch.zeros(2).fill_(t[1, 1]),
    "fill_ with many": lambda t: torch.zeros(3, 4).fill_(t),
    "data": lambda t: set_data(torch.zeros(2), t),
    "foreach": lambda t: torch._foreach_add([t], 1)[0],
    "foreach copy": lambda t: foreach_copy(t),
    "out": lambda t: torch.add(t, 1, out=torch.empty(0)),
    "into": lambda t: torch.add(SMALL, 1, out=t) + t,
    "setitem": lambda t: set_items(t),
    "equal": lambda t: torch.equal(t, SMALL),
    "allclose": lambda t: torch.allclose(t, SMALL),
    "assert_close": lambda t: torch.testing.assert_close(t, SMALL),
    "==": lambda t: t == SMALL,
    "in": lambda t: 3.0 in t and 77.0 not in t,
    "in list": lambda t: t in [t],
    "iter": lambda t: [row.sum().item() for row in t],
    "sum of rows": lambda t: sum(t),
    "unpack": lambda t: torch.maximum(*t[:2]),
    "new_tensor": lambda t: t.new_tensor([1, 2]),
    "type": lambda t: t.type(torch.half),
    "as_strided": lambda t: t.as_strided((2, 2), (4, 1), 1),
    "to_sparse": lambda t: t.to_sparse().to_dense(),
    "index": lambda t: t[torch.tensor([2, 0])],
    "mask": lambda t: t[t > 3],
    "repeat": lambda t: t.repeat(2, 1).roll(1),
    "vmap": lambda t: torch.func.vmap(lambda x: x * 2)(t),
    "grad": lambda t: torch.func.grad(lambda x: (x * x).sum())(t),
    "functional_call": lambda t: torch.func.functional_call(
        torch.nn.Linear(4, 3, bias=False), {"weight": t}, (torch.ones(1, 4),)
    ),
    "apply_": lambda t: t.apply_(lambda x: x + 1),
    "map_": lambda t: t.map_(torch.ones(3, 4), lambda x, y: x + y),
    "map_ from": lambda t: torch.ones(3, 4).map_(t, lambda x, y: x + y),
    "checkpoint": lambda t: torch.utils.checkpoint.checkpoint(lambda x: x * 2, t, use_reentrant=False),
    "pytree": lambda t: torch.utils._pytree.tree_map(lambda x: x + 1, {"t": t})["t"],
    "quantize": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8).dequantize(),
    "swap_tensors": lambda t: swap(torch.zeros(3, 4), t) + 0,
    "detach_": lambda t: t.detach_() + 0,
    "buffer": lambda t: torch.nn.Buffer(t) + 0,
    "format": lambda t: f"{t[1, 1]:.3f} {float(t[0, 0])} {int(t[1, 0])} {bool(t[0, 1])}",
    "assign": lambda t: assigned(t),
    "half module": lambda t: half_module(t),
}


def save_and_load(t: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"x": t}, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)["x"]
    return loaded


def set_data(real: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    real.data = t
    return real


def set_items(t: torch.Tensor) -> torch.Tensor:
    t[0] = 7
    t[1, 2] = 5
    t[:, 1] = torch.zeros(3)
    return t + 0


def foreach_copy(t: torch.Tensor) -> torch.Tensor:
    real = torch.zeros(3, 4)
    torch._foreach_copy_([real], [t])
    return real


def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.utils.swap_tensors(a, b)
    return a


def assigned(t: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Linear(4, 3, bias=False, device="meta")
    module.load_state_dict({"weight": t}, assign=True)
    assert type(module.weight) is torch.nn.Parameter
    return module.weight.detach()


def half_module(t: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Linear(4, 3, bias=False)
    module.weight = torch.nn.Parameter(t)
    module.register_buffer("buffer", t.clone())
    return torch.cat([module.half().weight.detach(), module.buffer])


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning", "ignore:.*quantized tensor:UserWarning")
def test_every_other_use_gives_true_values(path: Path, escape: str, mode: type, recording: bool) -> None:
    def outcome(t: torch.Tensor) -> Any:
        try:
            result = ESCAPES[escape](t)
        except (RuntimeError, TypeError) as error:
            return type(error), str(error)
        return result + 0 if is_recorded(result) else result

    with mode():
        expected = outcome(SMALL.clone())
        checkpoint = weightlift.open_checkpoint(path)
        with checkpoint if recording else nullcontext():
            seen = outcome(checkpoint["small"])
        if isinstance(expected, (torch.Tensor, np.ndarray)):
            assert type(seen) is type(expected)
            assert torch.equal(torch.as_tensor(seen), torch.as_tensor(expected))
            assert seen.dtype == expected.dtype
        else:
            assert seen == expected
        checkpoint.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.squeeze_(),
        lambda t: t.transpose_(0, 1),
        lambda t: t.resize_(2, 2),
        lambda t: t.resize_as_(torch.ones(2)),
        lambda t: t.set_(torch.ones(2)),
        lambda t: t.as_strided_((2,), (1,)),
        lambda t: set_data(t, torch.ones(2)),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_changing_geometry_in_place_is_one_clear_error(checkpoint: Checkpoint, change: Any, mode: type) -> None:
    with mode(), pytest.raises(RuntimeError, match=r"small: .*can't change its shape or memory in place; clone\(\) it"):
        change(checkpoint["small"])


def test_compiled_functions_see_true_values(path: Path) -> None:
    printed = run_python(
        """
        import sys, torch, weightlift
        def add(x): return x * 2 + 1
        def load(p, x): p.copy_(x.narrow(0, 0, 2)); return p
        with torch.no_grad(), weightlift.open_checkpoint(sys.argv[1]) as checkpoint:
            t = checkpoint["small"]
            print(torch.compile(add, backend="eager")(t).sum().item())
            print(torch.compile(load, backend="eager")(torch.zeros(2, 4), t).sum().item())
            p = torch.zeros(3, 4)
            p.copy_(t)
            print(torch.compile(add, backend="eager")(p).sum().item())
        """,
        path,
    )
    assert printed.split() == ["144.0", "28.0", "144.0"]


def test_fake_tensor_modes_do_not_crash(path: Path) -> None:
    printed = run_python(
        """
        import sys, torch, weightlift
        from torch._subclasses.fake_tensor import FakeTensorMode
        with torch.no_grad(), weightlift.open_checkpoint(sys.argv[1]) as checkpoint:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                print(mode.from_tensor(checkpoint["small"]).shape)
                for use in (lambda t: torch.zeros(3, 4).copy_(t), lambda t: t + 1, lambda t: t.sum().item()):
                    try:
                        use(checkpoint["small"])
                    except Exception as error:
                        print(type(error).__name__, file=sys.stderr)
            print(checkpoint["small"].sum().item())
        """,
        path,
    )
    assert printed.splitlines() == ["torch.Size([3, 4])", "66.0"]


def test_tensors_travel_to_other_processes(path: Path) -> None:
    printed = run_python(
        """
        import sys, torch, torch.multiprocessing as mp, weightlift
        def child(queue, back):
            back.put(queue.get().sum().item())
        if __name__ == "__main__":
            context = mp.get_context("fork")
            queue, back = context.SimpleQueue(), context.SimpleQueue()
            process = context.Process(target=child, args=(queue, back))
            process.start()
            with weightlift.open_checkpoint(sys.argv[1]) as checkpoint:
                queue.put(checkpoint["small"])
                print(back.get())
            process.join()
        """,
        path,
    )
    assert printed.split() == ["66.0"]


def test_a_tensor_whose_checkpoint_object_is_gone_can_be_used(path: Path) -> None:
    printed = run_python(
        """
        import gc, sys, torch, weightlift
        t = weightlift.open_checkpoint(sys.argv[1])["small"]
        gc.collect()
        p = torch.zeros(1)
        p.data = t
        print(p.sum().item(), torch.nn.Parameter(t).sum().item())
        """,
        path,
    )
    assert printed.split() == ["66.0", "66.0"]


def test_doors_are_restored_after_the_last_checkpoint(path: Path) -> None:
    run_python(
        """
        import gc, sys, torch, weightlift
        from weightlift.watch import _DOORS
        def stand():
            return [place.__dict__.get(name) for place, name, _ in _DOORS]
        before = stand()
        first, second = (weightlift.open_checkpoint(sys.argv[1]) for _ in range(2))
        assert stand() != before
        first.close()
        del first
        gc.collect()
        assert stand() != before
        second["small"].add_(1)
        del second
        gc.collect()
        assert stand() == before
        print(torch.zeros(2).numpy(), torch.nn.Parameter(torch.zeros(2)).data)
        """,
        path,
    )


def test_what_others_put_in_the_place_of_doors_is_called_and_stays(path: Path) -> None:
    printed = run_python(
        """
        import gc, sys, torch, weightlift
        def patched(name):
            original = getattr(torch.Tensor, name)
            def method(self, *args, **kwargs):
                print(name)
                return original(self, *args, **kwargs)
            setattr(torch.Tensor, name, method)
            return method
        earlier = patched("__repr__")
        checkpoint = weightlift.open_checkpoint(sys.argv[1])
        assert torch.Tensor.__repr__ is not earlier
        repr(torch.zeros(1))
        later = patched("tolist")
        del checkpoint
        gc.collect()
        assert torch.Tensor.__repr__ is earlier
        assert torch.Tensor.tolist is later
        with weightlift.open_checkpoint(sys.argv[1]) as checkpoint:
            p = torch.zeros(3, 4)
            p.copy_(checkpoint["small"])
            print(int(sum(map(sum, p.tolist()))))
        """,
        path,
    )
    assert printed.split() == ["__repr__", "tolist", "66"]


# ---- leaving


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_leaving_through_an_exception_drops_what_is_pending(checkpoint: Checkpoint) -> None:
    p, q = param(ROWS, COLUMNS), param(ROWS, COLUMNS)
    before = threads_and_files()

    def fail() -> None:
        with checkpoint:
            p.copy_(checkpoint["w"])
            q.copy_(checkpoint["v"])
            assert q[0, 0] == V[0, 0]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (p == -1).all()
    assert checkpoint.report.bytes_read == V.nbytes
    assert threads_and_files() == before


def sparse_checkpoint(folder: Path, num_bytes: int) -> Path:
    path = folder / "large.safetensors"
    header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (num_bytes, num_bytes)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    return path


def interrupt(*_: int) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting looks up all the time, so that it can be interrupted at once."""
    monkeypatch.setattr(weightlift.program, "_POLL_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_while_waiting_leaves_nothing_behind(tmp_path: Path) -> None:
    path = sparse_checkpoint(tmp_path, 64 << 20)
    p = torch.ones(64 << 20, dtype=torch.uint8)
    before = threads_and_files()

    def load() -> None:
        with weightlift.open_checkpoint(path) as checkpoint:
            p.copy_(checkpoint["x"])
            checkpoint._program.on_progress = interrupt

    with pytest.raises(KeyboardInterrupt):
        load()
    assert threads_and_files() == before


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_that_is_caught_inside_the_block_loses_nothing(tmp_path: Path) -> None:
    path = sparse_checkpoint(tmp_path, 64 << 20)
    p = torch.ones(64 << 20, dtype=torch.uint8)
    with weightlift.open_checkpoint(path) as checkpoint:
        p.copy_(checkpoint["x"])
        for look in (lambda: p[0].item(), lambda: checkpoint["x"].sum()):
            checkpoint._program.on_progress = interrupt
            with pytest.raises(KeyboardInterrupt):
                look()
            checkpoint._program.on_progress = None
    assert not p.any()


def test_failure_that_is_caught_inside_the_block_is_raised_again_at_its_end(tmp_path: Path) -> None:
    path = sparse_checkpoint(tmp_path, 1 << 20)
    checkpoint = weightlift.open_checkpoint(path)
    os.truncate(path, 1 << 19)
    p = torch.ones(1 << 20, dtype=torch.uint8)

    def load() -> None:
        with checkpoint:
            p.copy_(checkpoint["x"])
            with pytest.raises(weightlift.CheckpointError):
                p.sum()
            with pytest.raises(weightlift.CheckpointError):
                p.copy_(checkpoint["x"])

    with pytest.raises(weightlift.CheckpointError, match="x"):
        load()


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: torch.zeros(ROWS, COLUMNS).copy_(t),
        lambda t: t.numpy(),
        lambda t: set_data(torch.zeros(1), t),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_use_after_close_is_one_clear_error(checkpoint: Checkpoint, use: Callable[[torch.Tensor], Any]) -> None:
    t = checkpoint["w"]
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(RuntimeError, match="w: its checkpoint has been closed, and its bytes are still on disk"):
        use(t)
    assert t.shape == W.shape
    assert "w" in repr(t)


def test_pipeline_that_cannot_be_made_fails_the_load_for_good(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("no memory for staging")

    p = param(ROWS, COLUMNS)

    def load() -> None:
        with checkpoint:
            p.copy_(checkpoint["w"])
            with monkeypatch.context() as patch:
                patch.setattr(weightlift.program, "make_pipeline", no_memory)
                with pytest.raises(MemoryError):
                    p.sum()

    with pytest.raises(MemoryError, match="no memory for staging"):
        load()
    assert (p == -1).all()


def test_failed_wait_names_no_byte(checkpoint: Checkpoint) -> None:
    failure = checkpoint._program._end_by(("read", errno.EIO, -1, -1, -1, ""))
    assert "waiting for reads failed: Input/output error" in str(failure)


def test_landed_tensor_can_be_copied_after_close(checkpoint: Checkpoint) -> None:
    p, t = param(ROWS, COLUMNS), checkpoint["w"]
    t.add_(1)
    checkpoint.close()
    assert torch.equal(p.copy_(t), W + 1)
    assert torch.equal(t + 0, W + 1)


def test_blocks_cannot_be_nested_nor_entered_after_the_end(checkpoint: Checkpoint) -> None:
    p = param(ROWS, COLUMNS)
    with checkpoint:
        p.copy_(checkpoint["w"])
        with pytest.raises(RuntimeError, match="cannot be nested"), checkpoint:
            pass
    assert torch.equal(p, W)
    with pytest.raises(RuntimeError, match="has been closed"), checkpoint:
        pass


def test_nothing_is_kept_after_the_end(path: Path) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    with weightlift.open_checkpoint(path) as checkpoint:
        t = checkpoint["w"]
        p.copy_(t)
        written = checkpoint["v"].half()
        written.add_(1)
        program, storage = weakref.ref(checkpoint._program), weakref.ref(written._land().untyped_storage())
        destination = weakref.ref(p)
    del p, t, checkpoint
    assert destination() is None
    del written
    assert storage() is None  # without the garbage collector: these are large
    gc.collect()
    assert program() is None


# ---- several checkpoints, several threads


def test_two_checkpoints_keep_order_in_the_same_parameter(path: Path) -> None:
    p = param(ROWS, COLUMNS)
    with weightlift.open_checkpoint(path) as first, weightlift.open_checkpoint(path) as second:
        p[:32].copy_(second["q"][:32])
        p.copy_(first["w"])
        p[8:16].copy_(second["v"][8:16])
        p[12:14].copy_(first["q"][12:14])
        assert p[8, 0] == V[8, 0]
        assert p[13, 0] == TENSORS["q"][13, 0]
    assert torch.equal(p, torch.cat([W[:8], V[8:12], TENSORS["q"][12:14], V[14:16], W[16:]]))


def test_two_checkpoints_in_their_own_parameters_force_nothing(path: Path) -> None:
    p, q = param(ROWS, COLUMNS), param(ROWS, COLUMNS)
    with weightlift.open_checkpoint(path) as first, weightlift.open_checkpoint(path) as second:
        p.copy_(first["w"])
        q.copy_(second["v"])
        assert_nothing_was_read(first)
        assert_nothing_was_read(second)
    assert torch.equal(p, W)
    assert torch.equal(q, V)


def test_concatenations_of_two_checkpoints_read_each_from_its_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": V}, tmp_path / "other.safetensors")
    p = param(2 * ROWS, COLUMNS)
    with weightlift.open_checkpoint(tmp_path) as other, checkpoint:
        p.copy_(torch.cat([checkpoint["w"], other["w"]]))
    assert torch.equal(p, torch.cat([W, V]))


def test_looking_visits_every_watched_program_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    with checkpoint, monkeypatch.context() as patch:
        patch.setattr(checkpoint._program, "before_read", seen.append)
        checkpoint._program.before_look(W)
    assert len(seen) == 1


def test_block_that_ends_in_another_thread_hides_no_program(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.zeros(ROWS, COLUMNS)
    with weightlift.open_checkpoint(path) as first, weightlift.open_checkpoint(path) as second:
        p.copy_(second["w"])
        with monkeypatch.context() as patch:
            patch.setattr(first._program, "before_read", lambda tensor: watched.remove(first._program))
            values = p.numpy().copy()
        watched.append(first._program)
    assert np.array_equal(values, W.numpy())


def run_threads(*targets: Callable[[], None]) -> None:
    """Runs them at once. Fails when one fails, or does not end."""
    ended = []

    def call(target: Callable[[], None]) -> None:
        with torch.no_grad():
            target()
        ended.append(target)

    threads = [threading.Thread(target=call, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(ended) == len(targets)


def test_load_that_waits_holds_up_no_other(path: Path) -> None:
    p, q = param(ROWS, COLUMNS), param(ROWS, COLUMNS)

    def load() -> None:
        with weightlift.open_checkpoint(path) as second:
            q.copy_(second["v"])
            q[:1].zero_()
            assert not q[0].numpy().any()

    with weightlift.open_checkpoint(path) as first:
        p.copy_(first["w"])
        with first._program._lock:  # as while it waits for storage
            run_threads(load)
    assert torch.equal(p, W)
    assert torch.equal(q[1:], V[1:])


def test_threads_that_need_each_others_checkpoints_do_not_lock_each_other_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, done = threading.Barrier(2), threading.Barrier(2)
    read = weightlift.program.Program.read

    def read_together(program: Any, tensor: CheckpointTensor) -> torch.Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.2)
        return read(program, tensor)

    monkeypatch.setattr(weightlift.program.Program, "read", read_together)
    checkpoints = [weightlift.open_checkpoint(path) for _ in range(2)]
    parameters = [param(ROWS, COLUMNS) for _ in range(2)]

    def load(mine: Checkpoint, other: Checkpoint, p: torch.Tensor) -> None:
        with mine:
            p.copy_(mine["w"])
            p.fill_(other["scalar"])
            done.wait(10)

    run_threads(
        lambda: load(checkpoints[0], checkpoints[1], parameters[0]),
        lambda: load(checkpoints[1], checkpoints[0], parameters[1]),
    )
    for p in parameters:
        assert (p == 2.5).all()


def test_threads_may_record_at_once(path: Path) -> None:
    p = param(8, ROWS, COLUMNS)
    errors: list[BaseException] = []

    def record(checkpoint: Checkpoint, number: int) -> None:
        try:
            for row in range(ROWS):
                p[number, row].copy_(checkpoint["w"][row])
                if row % 16 == number:
                    assert checkpoint["scalar"].item() == 2.5
                    assert torch.equal(checkpoint["v"][row] + 0, V[row])
        except BaseException as error:
            errors.append(error)

    with weightlift.open_checkpoint(path) as checkpoint:
        threads = [threading.Thread(target=record, args=(checkpoint, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert torch.equal(p, W.expand(8, -1, -1))


# ---- the report


def test_file_that_an_aborted_pipeline_read_too_is_reported_once(checkpoint: Checkpoint) -> None:
    assert torch.equal(checkpoint["w"] + 0, W)
    checkpoint._program.abort()
    assert torch.equal(checkpoint["v"] + 0, V)
    (file,) = checkpoint.report.files
    assert file.bytes_read == W.nbytes + V.nbytes


def test_direct_read_that_ended_buffered_is_reported_as_direct(checkpoint: Checkpoint) -> None:
    (shard,) = checkpoint.files.shards
    file: dict[str, object] = {
        "direct_bytes": 4096,
        "buffered_bytes": 100,
        "cached_bytes": 0,
        "direct_usable": True,
        "direct_proven": True,
        "direct_reason": "",
        "offset_alignment": 512,
    }
    report = file_report(shard, file, {"direct_reader": "io_uring", "buffered_reader": ""})
    assert (report.reader, report.strategy, report.bytes_read) == ("io_uring", "direct", 4196)
    assert "page cache" not in report.reason


# ---- landing at the end of fast_load


class Holder(torch.nn.Module):
    def __init__(self, loader: Callable[[Holder, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = param(ROWS, COLUMNS)
        self.weight.weight_loader = lambda p, t: loader(self, p, t)  # type: ignore[attr-defined]


def replace_parameter(module: Holder, p: torch.Tensor, t: torch.Tensor) -> None:
    module.weight = torch.nn.Parameter(t, requires_grad=False)


def replace_raw(module: Holder, p: torch.Tensor, t: torch.Tensor) -> None:
    module._parameters["weight"] = t  # type: ignore[assignment]


def keep_attribute(module: Holder, p: torch.Tensor, t: torch.Tensor) -> None:
    module.scale = t[0, 0]
    module.register_buffer("buffer", t[1:3])
    p.data.copy_(t)


def write_to_memory(module: Holder, p: torch.Tensor, t: torch.Tensor) -> None:
    ctypes.memmove(p.untyped_storage().data_ptr(), t.numpy().ctypes.data, t.nbytes)


LOADERS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "param.data = t": lambda module, p, t: set_data(p, t),
    "module.weight = Parameter(t)": replace_parameter,
    "module._parameters[...] = t": replace_raw,
    "attributes": keep_attribute,
    "index": lambda module, p, t: p.data.index_copy_(0, torch.arange(ROWS), t),
    "mask": lambda module, p, t: p.data.masked_scatter_(p < 0, t),
    "out": lambda module, p, t: torch.add(t, 0, out=p.data),
    "foreach": lambda module, p, t: torch._foreach_copy_([p.data], [t]),
    "numpy": lambda module, p, t: np.copyto(p.data.numpy(), t.numpy()),
    "untyped_storage": write_to_memory,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_whatever_a_loader_does_the_model_is_real_at_the_end(tmp_path: Path, loader: str) -> None:
    safetensors.torch.save_file({"weight": W}, tmp_path / "model.safetensors")
    module = Holder(LOADERS[loader])
    report = weightlift.fast_load(module, tmp_path)
    assert type(module.weight) is torch.nn.Parameter
    assert torch.equal(module.weight, W)
    assert report.gaps == []
    for place in (module._parameters, module._buffers, module.__dict__):
        assert not any(is_recorded(value) for value in place.values())
    if loader == "attributes":
        assert module.scale == W[0, 0]
        assert torch.equal(module.buffer, W[1:3])


def test_gaps_are_told_before_anything_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": W}, tmp_path / "model.safetensors")
    module = Holder(lambda module, p, t: p.data[:16].copy_(t[:16]))
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"weight\[16:64\]"):
        weightlift.fast_load(module, tmp_path)
    assert (module.weight == -1).all()


def test_copy_that_does_not_fit_notes_the_tensor(checkpoint: Checkpoint) -> None:
    with pytest.raises(RuntimeError, match="must match the size of tensor b") as caught, checkpoint:
        torch.empty(3, 7).copy_(checkpoint["w"])
    notes: list[str] = getattr(caught.value, "__notes__", [])
    if sys.version_info >= (3, 11):
        assert notes[0].startswith("while copying w of ")
