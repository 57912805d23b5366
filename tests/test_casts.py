"""Copies between every two dtypes, against torch, bit for bit (the rules are in csrc/transform/cast.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightlift
from weightlift.program import Program

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="without AVX2 torch converts NaN differently"
    ),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
]

BOOLS_AND_INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, *FLOAT8)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (*BOOLS_AND_INTEGERS, *FLOATS, *COMPLEX)
INTEGERS = BOOLS_AND_INTEGERS[1:]

# More than what is read whole as a value, so that the core converts.
NUM_ELEMENTS = 256 * 260


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Elements of every kind: all patterns of 8 and 16 bits; of wider types the values around which rounding turns, NaN
    with payloads, infinities, both zeros, subnormal numbers, and random bits."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (NUM_ELEMENTS * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype in COMPLEX:
        part = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        real, imaginary = patterns(part), patterns(part).flip(0)
        imaginary[::3] = 0
        return torch.stack([real, imaginary], -1).view(torch.uint8).view(dtype).flatten()
    if dtype.itemsize == 1:
        return raw.view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(NUM_ELEMENTS, dtype=torch.int32).to(torch.int16).view(dtype)
    bits = raw.view(torch.int32 if dtype.itemsize == 4 else torch.int64).clone()
    width = 8 * dtype.itemsize
    # A step or none from where the lower bits end in 10...0, 0...0 or 1...1: ties of any shorter format.
    place = torch.arange(NUM_ELEMENTS) % width
    tied = (bits >> place << place) ^ (torch.ones_like(bits) << (place - 1).clamp(min=0))
    values = torch.where(torch.arange(NUM_ELEMENTS) % 3 == 0, bits, tied + torch.arange(NUM_ELEMENTS) % 5 - 2)
    if dtype in FLOATS:
        # Every other one near 1, where all formats have their numbers; random exponents lie outside nearly always.
        mantissa, bias = (23, 127) if dtype == torch.float32 else (52, 1023)
        keep = (1 << mantissa) - 1
        exponents = torch.randint(bias - 30, bias + 22, (NUM_ELEMENTS,), generator=generator)
        near = (values & keep) | (exponents << mantissa) | (values & (1 << (width - 1)) * -1)
        values = torch.where(torch.arange(NUM_ELEMENTS) % 2 == 0, values, near)
        special = torch.tensor([0, 1, keep, keep + 1, (2 * bias + 1) << mantissa, ((2 * bias + 1) << mantissa) + 1])
        values[: len(special)] = special
        values[len(special) : 2 * len(special)] = special - (1 << (width - 1))
    return values.to(bits.dtype).view(dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("casts") / "model.pt"
    torch.save({str(dtype): patterns(dtype) for dtype in DTYPES}, path)
    return path


def goes_through_torch(src: torch.dtype, dst: torch.dtype) -> bool:
    if src in COMPLEX:
        return dst not in (*COMPLEX, torch.bool)
    return src in FLOATS and dst in INTEGERS


@pytest.mark.parametrize("src", DTYPES, ids=str)
def test_bits_are_those_of_torch(path: Path, src: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch = set()
    copy_by_torch = Program._copy_by_torch

    def watched(program: Program, dst: torch.Tensor, source: Any) -> None:
        by_torch.add(dst.dtype)
        copy_by_torch(program, dst, source)

    monkeypatch.setattr(Program, "_copy_by_torch", watched)
    values = patterns(src)
    for dst in DTYPES:
        expected = bits_of(torch.empty(NUM_ELEMENTS, dtype=dst).copy_(values))
        if src == dst:
            expected = bits_of(values)  # also of bools, which copy_ makes 0 or 1
        row = torch.empty(NUM_ELEMENTS, dtype=dst)
        spread = torch.zeros(NUM_ELEMENTS, 2, dst.itemsize, dtype=torch.uint8)
        with weightlift.open_checkpoint(path) as checkpoint:
            row.copy_(checkpoint[str(src)])
            spread.view(dst)[:, 1, 0].copy_(checkpoint[str(src)])
        for found in (bits_of(row), spread[:, 1]):
            wrong = (found != expected).any(1)
            if src in (torch.float32, torch.float64) and dst == torch.bfloat16:
                wrong &= ~(values.isnan() & (found == torch.tensor([0xC0, 0x7F])).all(1))
            if goes_through_torch(src, dst):  # out of range its own code paths differ
                real = torch.view_as_real(values.to(torch.complex128))[:, 0] if src in COMPLEX else values.double()
                wrong &= real.abs() < 2.0**7
            assert not wrong.any(), (src, dst, values[wrong][:3], found[wrong][:3], expected[wrong][:3])
        assert not spread[:, 0].any()
    assert by_torch == {dst for dst in DTYPES if goes_through_torch(src, dst)}


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (torch.int64, torch.float16),
        (torch.float16, torch.float64),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.complex64, torch.complex128),
        (torch.uint8, torch.complex128),
    ],
)
def test_transposed_copies_convert_too(path: Path, src: torch.dtype, dst: torch.dtype) -> None:
    values = patterns(src).view(256, 260)[3:250, 5:190].t()
    found = torch.empty(185, 247, dtype=dst)
    with weightlift.open_checkpoint(path) as checkpoint:
        found.copy_(checkpoint[str(src)].view(256, 260)[3:250, 5:190].t())
    assert torch.equal(bits_of(found), bits_of(torch.empty(185, 247, dtype=dst).copy_(values)))
