"""Gate 6: what the checkpoint has against what the model declares, by names and by regions."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import devices
from .._logging import logger
from ..entries import TensorEntry
from ..errors import CheckpointMismatchError, folded
from ..names import natural_key
from ..program import Program
from ..regions import is_dense
from ..report import LoadReport
from ..source import CheckpointSource

# Parameters that vLLM's layers set from the quantisation config.
_SET_BY_CONFIG = ("input_scale_ub",)


def weight_loader(target: torch.Tensor) -> Callable[..., object] | None:
    return getattr(target, "weight_loader", None)


def size_mismatches(whole: Iterable[tuple[str, torch.Tensor, TensorEntry]]) -> list[str]:
    """Clauses for `reconcile`, for tensors that do not have the shape of what they are copied to.

    Args:
        whole: (name in the model, parameter or buffer, tensor of the checkpoint) for each that is copied whole. Not for
            those with a weight loader, which knows what it cuts.
    """
    return [
        size_mismatch(name, target, entry.shape) for name, target, entry in whole if tuple(target.shape) != entry.shape
    ]


def size_mismatch(name: str, target: torch.Tensor, shape: Sequence[int]) -> str:
    """The clause for one of them; `shape` is that of the checkpoint."""
    return (
        f"{name}: copying a param with shape {torch.Size(shape)} from checkpoint, "
        f"the shape in current model is {target.shape}."
    )


def exempt_names(model: Any) -> dict[str, str]:
    """Parameters that no checkpoint has to fill, and why: those of quantised layers that vLLM exempts, and no others.

    A layer is known by its `quant_method`, whichever engine it is of. Online quantization makes its parameters itself
    (`uses_meta_device`); scales of the KV cache have defaults (`BaseKVCacheMethod`); of other methods that process
    weights after loading, placeholders without elements, `input_scale_ub`, which the config sets, and parameters that
    say that they are `made_of` another, are exempt.

    vLLM, for models that are not quantised, exempts every parameter of a layer whose method processes weights, so all
    linear layers and embeddings: it would run with uninitialised weights. Here these are missing.

    Returns:
        Name to reason. Empty for a mapping, which has no layers.
    """
    exempt: dict[str, str] = {}
    if not isinstance(model, torch.nn.Module):
        return exempt
    for prefix, module in model.named_modules(remove_duplicate=False):
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False):
            reason = "made by online quantization"
        elif not hasattr(method, "process_weights_after_loading"):
            continue
        elif any(kind.__name__ == "BaseKVCacheMethod" for kind in type(method).__mro__):
            reason = "has a default"
        else:
            reason = ""
        for name, parameter in module.named_parameters(prefix, remove_duplicate=False):
            if reason:
                exempt[name] = reason
            elif hasattr(parameter, "made_of"):
                exempt[name] = f"made of {parameter.made_of}"
            elif not parameter.numel():
                exempt[name] = "has no elements"
            elif name.rpartition(".")[2] in _SET_BY_CONFIG:
                exempt[name] = "set by the config"
    return exempt


def missing_names(
    targets: Mapping[str, torch.Tensor], loaded: Collection[str], exempt: Collection[str] = ()
) -> list[str]:
    """Names of `targets` that are neither loaded nor exempt, in natural order.

    A tied parameter is loaded when one of its names is: `state_dict()` has an alias of it under each.
    """
    absent = [name for name in targets if name not in loaded and name not in exempt]
    filled = {_place(targets[name]) for name in loaded if name in targets} if absent else set()
    return sorted((name for name in absent if _place(targets[name]) not in filled), key=natural_key)


def reconcile(
    model: Any,
    targets: Mapping[str, torch.Tensor],
    loaded: Collection[str],
    *,
    unexpected: Iterable[str] = (),
    skipped: Mapping[str, str] | None = None,
    mismatched: Iterable[str] = (),
    path: Any = None,
    hint: str = "",
    strict: bool,
) -> LoadReport:
    """Compares what the model declares with what is loaded, by names.

    Where names are known before recording, it is called then, with `strict` as the user says. Where they are known only
    afterwards (modules that load themselves), it is called then with `strict=False`; `check_coverage`, which follows,
    raises for names and gaps in one error.

    Args:
        model: a module, or a mapping; for exemptions, and for what errors call it.
        targets: what can be loaded: parameters and persistent buffers, tied ones under each of their names.
        loaded: names of `targets` that the checkpoint fills, wholly or in part. A set, when there are many.
        unexpected: names in the checkpoint, of tensors that have no place in the model.
        skipped: names in the checkpoint, of tensors that are not wanted, with the rule that says so.
        mismatched: clauses of `size_mismatches`.
        path: the checkpoint, as the user knows it.
        hint: what to do about unexpected names, a sentence.
        strict: whether missing and unexpected names are errors. Mismatched sizes, and parameters without memory, are in
            any case.

    Returns:
        A report with missing_keys, unexpected_keys and skipped, each in natural order.

    Raises:
        CheckpointMismatchError: with all differences.
    """
    skipped = skipped or {}
    report = LoadReport(
        missing_keys=missing_names(targets, loaded, exempt_names(model)),
        unexpected_keys=sorted(unexpected, key=natural_key),
        skipped={name: skipped[name] for name in sorted(skipped, key=natural_key)},
    )
    mismatched = sorted(mismatched, key=natural_key)
    remedy = hint if strict and report.unexpected_keys else ""
    on_meta = [name for name, target in targets.items() if target.device.type == "meta" and name in loaded]
    if on_meta:
        remedy = (
            f"{len(on_meta)} parameters are on the meta device and have no memory, {on_meta[0]} is one: "
            'allocate them with model.to_empty(device="cpu") first, or use '
            "model.load_state_dict(weightlift.load_file(path), assign=True). Either way, buffers that are not "
            "persistent (rotary frequencies) are in no checkpoint: the model has to make them again."
        )
    if mismatched or on_meta or (strict and (report.missing_keys or report.unexpected_keys)):
        raise _mismatch(model, report, path, strict=strict, mismatched=mismatched, remedy=remedy)
    return report


def check_coverage(
    model: Any,
    targets: Mapping[str, torch.Tensor],
    program: Program,
    report: LoadReport,
    *,
    path: Any = None,
    strict: bool,
) -> None:
    """Finds what of the parameters that weight loaders fill nothing writes, and what is written twice.

    Args:
        model, path: as for `reconcile`.
        targets: the parameters to look at, by name; those not dense or not in CPU memory are passed over.
        program: what was recorded, with its coverage tracked.
        report: of `reconcile`; gets `gaps` and `double_writes`, as `qkv_proj.weight[512:768]`: rows of the parameter.
        strict: whether gaps are an error, and names that the report has missing or unexpected.

    Raises:
        CheckpointMismatchError: with all of these.
    """
    missing = set(report.missing_keys)
    for name, target in targets.items():
        if name in missing or devices.index_of(target) is None or not target.numel() or not is_dense(target):
            continue
        gaps, doubles = program.coverage(target)
        report.gaps += _regions(name, target, gaps)
        report.double_writes += _regions(name, target, doubles)
    report.gaps.sort(key=natural_key)
    report.double_writes.sort(key=natural_key)
    if report.double_writes:
        logger.warning("written by more than one tensor of the checkpoint: %s", folded(report.double_writes))
    if strict and (report.gaps or report.missing_keys or report.unexpected_keys):
        remedy = ""
        if report.gaps:
            remedy = (
                "The weight loaders of these parameters left parts of them unset; pass strict=False to accept that."
            )
        raise _mismatch(model, report, path, strict=True, remedy=remedy)


def _mismatch(
    model: Any, report: LoadReport, path: Any, *, strict: bool, mismatched: Iterable[str] = (), remedy: str
) -> CheckpointMismatchError:
    if isinstance(path, CheckpointSource):
        path = path.path
    return CheckpointMismatchError(
        type(model).__name__,
        path=os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None,
        missing_keys=report.missing_keys if strict else (),
        unexpected_keys=report.unexpected_keys if strict else (),
        mismatched=mismatched,
        gaps=report.gaps,
        remedy=remedy,
    )


def _place(tensor: torch.Tensor) -> object:
    """The same for tensors that are one: tied parameters, which `state_dict()` gives as an alias for each name."""
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    if not address:  # empty, or without memory of its own
        return id(tensor)
    return tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype


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
    first, last = begin // row, -(-end // row)
    if target.dim() > 2 and last - first == 1 and end - begin < row:  # of one expert among many, a part
        return f"{first}, {_rows(target[first], begin - first * row, end - first * row)}"
    return f"{first}:{last}"


def _row_bytes(target: torch.Tensor) -> int:
    rows = target.shape[0] if target.dim() else 1
    return target.numel() // rows * target.element_size()
