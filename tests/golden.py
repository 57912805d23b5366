"""The golden data of layers: what their ranks have of given tensors.

A file has cases of two kinds: parents, whose tensors `ckpt_*` are those of a checkpoint, and their children `.tpPrR`,
whose tensors `expected_*` are what rank R of P has of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from golden_data import GOLDEN, NO_GOLDEN, golden_cases, golden_file

import weightlift
from weightlift.model import linear
from weightlift.model.parallel import ParallelConfig


class Golden:
    """One of the files."""

    def __init__(self, topic: str) -> None:
        self.path = GOLDEN / f"{topic}.safetensors"
        self._file = golden_file(topic)
        self.names = set(self._file.keys())
        self.cases = golden_cases(topic)

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def children(self, parent: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Its ranks: (case, what is said of it)."""
        return ((case, info) for case, info in self.cases.items() if case.startswith(f"{parent}."))

    def expected(self, case: str) -> dict[str, torch.Tensor]:
        """Parameter to value."""
        start = f"{case}.expected_"
        return {name[len(start) :]: self.tensor(name) for name in sorted(self.names) if name.startswith(start)}


golden = functools.cache(Golden)


def parents(topic: str) -> list[Any]:
    """Names of the cases that others belong to, as parameters of a test; the test is skipped where there is no file."""
    if not GOLDEN.is_dir():
        return [pytest.param("", marks=pytest.mark.skip(reason=NO_GOLDEN))]
    return [case for case in golden(topic).cases if "." not in case]


def make_layer(
    kind: str, spec: dict[str, Any], parallel: ParallelConfig | None = None, *, layers: Any = linear, **kwargs: Any
) -> Any:
    """The layer of a case; `layers` may be vLLM's module, without `parallel`, which is global there."""
    kwargs["prefix"] = "model.layer"
    if parallel is not None:
        kwargs["parallel"] = parallel
    if kind == "merged":
        return layers.MergedColumnParallelLinear(spec["in"], spec["sizes"], **kwargs)
    if kind == "qkv":
        return layers.QKVParallelLinear(
            spec["in"], spec["head"], spec["heads"], spec["kv"], v_head_size=spec.get("vhead"), **kwargs
        )
    by_kind = {
        "column": layers.ColumnParallelLinear,
        "row": layers.RowParallelLinear,
        "replicated": layers.ReplicatedLinear,
    }
    return by_kind[kind](spec["in"], spec["out"], **kwargs)


def shards_on_disk(case: dict[str, Any], names: Sequence[str], start: str) -> list[tuple[str, Any]]:
    """(name, shard id) of the tensors `{start}`, or `{start}_0` and so on, that are there."""
    found: list[tuple[str, Any]] = [(start, None)] if start in names else []
    found += [(f"{start}_{shard}", shard) for shard in range(len(case.get("spec", {}).get("sizes", ())))]
    found += [(f"{start}_{shard}", shard) for shard in "qkv"]
    return [(name, shard) for name, shard in found if name in names]


def load_case(topic: Golden, parent: str, layer: torch.nn.Module, source: Mapping[str, torch.Tensor]) -> None:
    """Loads all parameters from tensors of that case, real ones or those of a checkpoint."""
    info, names = topic.cases[parent], topic.names
    for name, parameter in layer.named_parameters():
        for on_disk, shard in shards_on_disk(info, names, f"{parent}.ckpt_{name}"):
            arguments = () if shard is None else (shard,)
            parameter.weight_loader(parameter, source[on_disk], *arguments)


def load_both_ways(topic: Golden, parent: str, make: Callable[[], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The parameters after loading; recording and real tensors have to agree bit for bit."""
    eager, recorded = make(), make()
    real = {name: topic.tensor(name) for name in topic.names if name.startswith(f"{parent}.ckpt_")}
    load_case(topic, parent, eager, real)
    with weightlift.open_checkpoint(topic.path) as checkpoint:
        load_case(topic, parent, recorded, checkpoint)
        assert checkpoint.report.num_forced == 0
    loaded = {name: parameter.data for name, parameter in recorded.named_parameters()}
    for name, parameter in eager.named_parameters():
        assert same_bits(loaded[name], parameter.data), name
    return loaded


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
