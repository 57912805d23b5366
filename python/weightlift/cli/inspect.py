"""``weightlift inspect``: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections import Counter, defaultdict
from typing import Any

import torch

from weightlift.audit import Audit, audit
from weightlift.cli import source
from weightlift.entries import Shard, TensorEntry
from weightlift.errors import CheckpointError, folded, listed, printable
from weightlift.names import fold, natural_key
from weightlift.report import format_bytes
from weightlift.source import TORCH_SUFFIXES

NAME = "inspect"
HELP = (
    "Show which files of a folder are read and which are not, and the tensors, dtypes and sizes in them. "
    "Reads and checks headers; no weights are read."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", action="store_true", help="list every tensor, instead of layers folded into one")


def run(options: argparse.Namespace) -> int:
    result = audit(source.source_of(options))
    if not result.shards:
        raise _nothing_to_show(result)
    tensors = sorted(result.tensors.values(), key=lambda entry: natural_key(entry.name))
    num_by_shard = Counter(entry.shard.path for entry in tensors)
    bytes_by_dtype: Counter[str] = Counter()
    num_by_dtype: Counter[str] = Counter()
    for entry in tensors:
        bytes_by_dtype[_name(entry.dtype)] += entry.nbytes
        num_by_dtype[_name(entry.dtype)] += 1
    document: dict[str, Any] = {
        "path": str(options.path),
        "format": _format(result.shards),
        "index": result.index,
        "num_tensors": len(tensors),
        "tensor_bytes": sum(entry.nbytes for entry in tensors),
        "shards": [
            {
                "path": shard.path,
                "bytes": shard.size,
                "num_tensors": num_by_shard[shard.path],
                "metadata": shard.metadata or {},
            }
            for shard in result.shards
        ],
        "dtypes": {
            dtype: {"num_tensors": num_by_dtype[dtype], "bytes": num_bytes}
            for dtype, num_bytes in bytes_by_dtype.most_common()
        },
        "aliases": _aliases(result.shards, result.tensors),
        "ignored": result.ignored,
        "problems": [" ".join(str(problem).split()) for problem in result.problems],
        "warnings": [" ".join(str(warning).split()) for warning in result.warnings],
    }
    if options.tensors:
        document["tensors"] = [
            {
                "name": entry.name,
                "dtype": _name(entry.dtype),
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "offset": entry.offset,
                "shard": entry.shard.path,
            }
            for entry in tensors
        ]
    else:
        document["names"] = _folded_names(tensors)
    print(json.dumps(document, indent=2) if options.json else _text(document, result.folder))
    return 1 if result.problems else 0


def _nothing_to_show(result: Audit) -> CheckpointError:
    first, *others = result.problems
    if not others:
        return first
    problems = "; ".join(map(str, result.problems[:10]))
    return CheckpointError(f"{len(result.problems)} problems: {problems}", path=result.folder, reason=first.reason)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format(shards: list[Shard]) -> str:
    kinds = {"torch.save" if shard.path.lower().endswith(TORCH_SUFFIXES) else "safetensors" for shard in shards}
    return " and ".join(sorted(kinds))


def _aliases(shards: list[Shard], tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Names of tied tensors, each with the first name of the same data."""
    aliases: dict[str, str] = {}
    for shard in shards:
        # `safetensors.torch.save_model` notes there what it left out.
        aliases |= {
            alias: name for alias, name in (shard.metadata or {}).items() if name in tensors and alias not in tensors
        }
        first: dict[object, str] = {}
        for entry in shard.tensors:
            if entry.nbytes:
                name = first.setdefault((entry.offset, entry.dtype, entry.shape, entry.strides), entry.name)
                if name != entry.name:
                    aliases[entry.name] = name
    return aliases


def _folded_names(tensors: list[TensorEntry]) -> list[dict[str, Any]]:
    names_of: defaultdict[tuple[torch.dtype, tuple[int, ...]], list[str]] = defaultdict(list)
    for entry in tensors:
        names_of[entry.dtype, entry.shape].append(entry.name)
    rows = [
        {
            "names": pattern,
            "num_tensors": count,
            "dtype": _name(dtype),
            "shape": list(shape),
            "bytes": count * math.prod(shape) * dtype.itemsize,
        }
        for (dtype, shape), names in names_of.items()
        for pattern, count in fold(names)
    ]
    return sorted(rows, key=lambda row: natural_key(re.sub(r"\{([0-9]+)[^}]*\}", r"\1", str(row["names"]))))


def _text(document: dict[str, Any], folder: str) -> str:
    num_shards = len(document["shards"])
    index = f", by {printable(os.path.relpath(document['index'], folder))}" if document["index"] is not None else ""
    lines = [
        f"{printable(document['path'])}: {document['num_tensors']} tensors, {format_bytes(document['tensor_bytes'])}, "
        f"{num_shards} shard{'' if num_shards == 1 else 's'} of {document['format']}{index}"
    ]
    lines += [f"  problem     {problem}" for problem in document["problems"]]
    lines += [f"  warning     {warning}" for warning in document["warnings"]]
    lines += [
        f"  {dtype:<18}{counts['num_tensors']:>8} tensors {format_bytes(counts['bytes']):>12}"
        for dtype, counts in document["dtypes"].items()
    ]
    for shard in document["shards"]:
        path = os.path.relpath(shard["path"], folder)
        lines.append(f"  {printable(path)}: {shard['num_tensors']} tensors, {format_bytes(shard['bytes'])}")
        lines += [f"    {printable(key)}: {printable(value)}" for key, value in shard["metadata"].items()]
    if "tensors" in document:
        rows = [(printable(entry["name"]), entry) for entry in document["tensors"]]
    else:
        rows = [
            (printable(entry["names"]) + (f" ({entry['num_tensors']})" if entry["num_tensors"] > 1 else ""), entry)
            for entry in document["names"]
        ]
    width = max((len(name) for name, _ in rows), default=0)
    lines += [
        f"  {name:<{width}}  {entry['dtype']:<16} {entry['shape']!s:<20} {format_bytes(entry['bytes'])}"
        for name, entry in rows
    ]
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for alias, name in document["aliases"].items():
        names_of[name].append(alias)
    lines += [f"  tied        {folded(aliases)} to {printable(name)}" for name, aliases in names_of.items()]
    files_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in document["ignored"].items():
        files_by_reason[reason].append(name)
    lines += [f"  ignored     {listed(names)}: {printable(reason)}" for reason, names in files_by_reason.items()]
    return "\n".join(lines)
