"""The contract of recording, tried at random: a recorded program gives the bytes that an eager one gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightlift

# Views, each with numbers that are reduced to what the tensor at hand allows. Some fail, for both in the same way.
VIEWS = [
    "narrow",
    "select",
    "slice",
    "step",
    "t",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "expand",
    "view",
    "reshape",
    "flatten",
    "contiguous",
    "split",
    "chunk",
    "unbind",
    "to",
    "view_dtype",
    "detach",
    "data",
    "index_none",
    "diagonal",
    "unfold",
]
View = tuple[str, int, int, int]
views = st.lists(st.tuples(st.sampled_from(VIEWS), *[st.integers(0, 7)] * 3), max_size=4)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32)


def apply_view(t: torch.Tensor, view: View) -> torch.Tensor:
    kind, a, b, c = view
    ndim = t.dim()
    dim = a % ndim if ndim else 0
    size = t.shape[dim] if ndim else 0
    if kind == "view_dtype":
        return t.view((torch.uint8, torch.int16, torch.int32, t.dtype)[a % 4])
    if kind == "to":
        return t.to(DTYPES[a % len(DTYPES)])
    if kind in ("contiguous", "t", "detach", "flatten", "squeeze"):
        return getattr(t, kind)()
    if kind == "data":
        return t.data
    if kind == "view":
        return t.view(-1)
    if kind == "reshape":
        return t.reshape(-1, a % 3 + 1)
    if kind == "index_none":
        return t[..., None]
    if kind == "unsqueeze":
        return t.unsqueeze(a % (ndim + 1))
    if kind == "expand":
        return t.expand(a % 3 + 1, *t.shape)
    if kind == "permute":
        order = list(range(ndim))
        return t.permute(order[a % ndim :] + order[: a % ndim]) if ndim else t
    if ndim == 0:
        return t
    if kind == "narrow":
        start = b % (size + 1)
        return t.narrow(dim, start, c % (size - start + 1))
    if kind == "select":
        return t.select(dim, b % size if size else 0)
    if kind == "slice":
        return t[b : b + c + 1]
    if kind == "step":
        return t[:: b + 1]
    if kind == "transpose":
        return t.transpose(dim, b % ndim)
    if kind == "split":
        parts = t.split(b + 1, dim)
        return parts[c % len(parts)]
    if kind == "chunk":
        parts = t.chunk(b + 1, dim)
        return parts[c % len(parts)]
    if kind == "unbind":
        parts = t.unbind(dim)
        return parts[b % len(parts)] if parts else t
    if kind == "diagonal":
        return t.diagonal()
    assert kind == "unfold"
    return t.unfold(dim, min(size, b + 1), 1 + c % 2)


def fit(src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts both to what they share, so that most copies succeed."""
    if src.dim() != dst.dim():
        return src, dst
    for dim in range(src.dim()):
        size = min(src.shape[dim], dst.shape[dim])
        src, dst = src.narrow(dim, 0, size), dst.narrow(dim, 0, size)
    return src, dst


class Program:
    """A random program over sources (tensors of a checkpoint) and destinations (real tensors)."""

    def __init__(self, sources: Mapping[str, torch.Tensor], destinations: list[torch.Tensor]) -> None:
        self.sources = sources
        self.destinations = destinations
        self.held: dict[str, torch.Tensor] = {}  # sources that are kept, so that writes to them can be seen later
        self.seen: list[Any] = []

    def source(self, index: int, path: list[View], *, kept: bool = False) -> torch.Tensor:
        name = sorted(self.sources)[index % len(self.sources)]
        t = self.held.setdefault(name, self.sources[name]) if kept else self.sources[name]
        for view in path:
            t = apply_view(t, view)
        return t

    def destination(self, index: int, path: list[View]) -> torch.Tensor:
        t = self.destinations[index % len(self.destinations)]
        for view in path:
            if view[0] != "unfold":  # where windows overlap, torch does not say which of the values written stays
                t = apply_view(t, view)
        return t

    def step(self, op: tuple[Any, ...]) -> None:
        kind, index, path, other, other_path = op
        if kind in ("copy", "copy_fit", "copy_kept", "setitem", "copy_cat"):
            src = self.source(index, path, kept=kind == "copy_kept")
            if kind == "copy_cat":
                src = torch.cat([src, self.source(index, path).flip(0) if other % 3 == 0 else self.source(index, path)])
            dst = self.destination(other, other_path)
            if kind != "copy":
                src, dst = fit(src, dst)
            if kind == "setitem":
                dst[...] = src
            else:
                dst.copy_(src)
        elif kind == "copy_between":
            src, dst = fit(self.destination(index, path), self.destination(other, other_path))
            if src.untyped_storage().data_ptr() != dst.untyped_storage().data_ptr():
                dst.copy_(src)
        elif kind == "fill":
            self.destination(index, path).fill_(other)
        elif kind == "zero":
            self.destination(index, path).zero_()
        elif kind == "add_":
            self.destination(index, path).add_(other)
        elif kind == "write_source":
            self.source(index, path, kept=True).add_(other)
        elif kind == "read":
            self.seen.append(self.destination(index, path).clone())
        elif kind == "item":
            t = self.destination(index, path)
            self.seen.append(t.flatten()[other % t.numel()].item() if t.numel() else None)
        elif kind == "numpy":
            self.seen.append(self.destination(index, path).tolist())
        elif kind == "read_source":
            self.seen.append(self.source(index, path) + 0)
        elif kind == "geometry":
            t = self.source(index, path)
            self.seen.append([*t.shape, *t.stride(), t.storage_offset(), t.is_contiguous(), t.dtype, t.numel(), len(t)])
        elif kind == "equal":
            self.seen.append(torch.equal(self.source(index, path), self.destination(other, other_path)))
        else:
            raise AssertionError(kind)

    def run(self, ops: list[tuple[Any, ...]]) -> None:
        for op in ops:
            try:
                self.step(op)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                self.seen.append(type(error))


KINDS = (
    ["copy", "copy_kept", "setitem", "copy_cat", "copy_between", "fill", "zero", "add_", "write_source"]
    + ["read", "item", "numpy", "read_source", "geometry", "equal"]
    + ["copy_fit"] * 10
)
ops = st.tuples(st.sampled_from(KINDS), st.integers(0, 9), views, st.integers(0, 9), views)


def make_sources() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=generator).float()

    return {
        "f32": numbers(6, 8),
        "f16": numbers(6, 8).half(),
        "bf16": numbers(4, 3, 5).bfloat16(),
        "i32": numbers(7, 4).int(),
        "u8": numbers(9, 8).to(torch.uint8),
        "scalar": torch.tensor(2.5),
        "large": numbers(200, 100),  # beyond what is kept as a value
        "empty": torch.zeros(0, 3),
    }


class ReadAnew(dict[str, torch.Tensor]):
    """As a file gives tensors: each time another one."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).clone()


def make_destinations() -> list[torch.Tensor]:
    flat = torch.full((96,), -1.0)
    return [
        flat[:48].view(6, 8),
        flat[24:72].view(8, 6),  # shares bytes with both others
        flat[48:].view(6, 8),
        torch.full((4, 3, 5), -1.0, dtype=torch.bfloat16),
        torch.full((9, 8), 1, dtype=torch.uint8),
        torch.full((100, 120), -1.0),
        torch.full((6, 8), -1, dtype=torch.int32),
    ]


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("property") / "model.safetensors"
    safetensors.torch.save_file(make_sources(), path)
    return path


def same(a: Any, b: Any) -> bool:
    """Byte for byte; of NaN the place only, since torch itself gives different ones for the same numbers."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.numel() == 0:
            return True
        flat_a, flat_b = (t.flatten().clone(memory_format=torch.contiguous_format) for t in (a, b))
        if torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)):
            return True
        return a.is_floating_point() and torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and (a == b or (a != a and b != b)))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
@settings(max_examples=400, deadline=None)
@given(program=st.lists(ops, max_size=12))
@pytest.mark.filterwarnings("ignore:Casting complex:UserWarning")
def test_recorded_programs_equal_eager_ones(checkpoint_path: Path, mode: str, program: list[tuple[Any, ...]]) -> None:
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}[mode]
    with context():
        eager = Program(ReadAnew(make_sources()), make_destinations())
        eager.run(program)
        with weightlift.open_checkpoint(checkpoint_path) as checkpoint:
            recorded = Program(checkpoint, make_destinations())
            recorded.run(program)
    assert len(eager.seen) == len(recorded.seen)
    for a, b in zip(eager.seen, recorded.seen, strict=True):
        assert same(a, b), (a, b)
    for a, b in zip(eager.destinations, recorded.destinations, strict=True):
        assert same(a, b)
