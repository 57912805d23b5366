"""Gate 6: what the checkpoint has against what the model declares, by names and by regions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from .._logging import logger
from ..errors import CheckpointMismatchError, listed
from ..loading import Checkpoint
from ..program import Program
from ..regions import is_dense
from ..report import LoadReport


def weight_loader(target: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object] | None:
    return getattr(target, "weight_loader", None)


def _place(tensor: torch.Tensor) -> object:
    """The same for tensors that are one: tied parameters, which `state_dict()` gives as an alias for each name."""
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    if not address:  # empty, or without memory of its own
        return id(tensor)
    return tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype


def reconcile(
    model: Any, targets: dict[str, torch.Tensor], checkpoint: Checkpoint, path: Any, *, strict: bool
) -> LoadReport:
    """Compares names and sizes. Raises with all differences, or returns a report that has them."""
    entries = checkpoint.files.tensors
    loaded = {_place(targets[name]) for name in entries if name in targets}
    # A tied parameter is there when one of its names is.
    missing = [name for name, target in targets.items() if name not in entries and _place(target) not in loaded]
    unexpected = [name for name in entries if name not in targets]
    mismatched = []
    on_meta = []
    for name, entry in entries.items():
        target = targets.get(name)
        if target is None:
            continue
        if target.device.type == "meta":
            on_meta.append(name)
        if weight_loader(target) is None and tuple(target.shape) != entry.shape:
            mismatched.append(
                f"{name}: copying a param with shape {torch.Size(entry.shape)} from checkpoint, "
                f"the shape in current model is {target.shape}."
            )
    remedy = ""
    if on_meta:
        remedy = (
            f"{len(on_meta)} parameters are on the meta device and have no memory, {on_meta[0]} is one: "
            'allocate them with model.to_empty(device="cpu") first, or use '
            "model.load_state_dict(weightlift.load_file(path), assign=True). Either way, buffers that are not "
            "persistent (rotary frequencies) are in no checkpoint: the model has to make them again."
        )
    if mismatched or on_meta or (strict and (missing or unexpected)):
        raise CheckpointMismatchError(
            type(model).__name__,
            path=os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None,
            missing_keys=missing if strict else (),
            unexpected_keys=unexpected if strict else (),
            mismatched=mismatched,
            remedy=remedy,
        )
    return LoadReport(missing_keys=missing, unexpected_keys=unexpected)


def check_coverage(
    model: Any, targets: dict[str, torch.Tensor], program: Program, report: LoadReport, *, strict: bool
) -> None:
    """Every byte of every parameter that a weight loader fills is written, and by one transfer."""
    for name, target in targets.items():
        if target.device.type != "cpu" or not target.numel() or not is_dense(target):
            continue
        gaps, doubles = program.coverage(target)
        report.gaps += _regions(name, target, gaps)
        report.double_writes += _regions(name, target, doubles)
    if report.double_writes:
        logger.warning("written by more than one tensor of the checkpoint: %s", listed(report.double_writes))
    if report.gaps and strict:
        raise CheckpointMismatchError(
            type(model).__name__,
            gaps=report.gaps,
            remedy="The weight loaders of these parameters left parts of them unset; pass strict=False to accept that.",
        )


def _regions(name: str, target: torch.Tensor, ranges: list[tuple[int, int]]) -> list[str]:
    """What to call these ranges of the bytes: by rows, `weight[512:768]`, where rows lie one after the other."""
    if ranges and not target.is_contiguous():
        return [f"{name} ({sum(end - begin for begin, end in ranges)} of {target.nbytes} bytes)"]
    return [f"{name}[{_rows(target, begin, end)}]" for begin, end in _merge_rows(target, ranges)]


def _merge_rows(target: torch.Tensor, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges of bytes, where all lie in different places of consecutive rows, as one."""
    row = _row_bytes(target)
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin // row <= (merged[-1][1] - 1) // row + 1:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _rows(target: torch.Tensor, begin: int, end: int) -> str:
    row = _row_bytes(target)
    return f"{begin // row}:{-(-end // row)}"


def _row_bytes(target: torch.Tensor) -> int:
    rows = target.shape[0] if target.dim() else 1
    return target.numel() // rows * target.element_size()
