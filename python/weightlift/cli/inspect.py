"""``weightlift inspect``: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import torch

from weightlift.checkpoint import locate
from weightlift.errors import printable
from weightlift.report import format_bytes

NAME = "inspect"
HELP = "Show the shards, tensors, dtypes and sizes of a checkpoint. Reads and checks headers; no weights are read."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def run(options: argparse.Namespace) -> int:
    files = locate(options.path)
    tensors = sorted(files.tensors.values(), key=lambda entry: entry.name)
    num_by_shard = Counter(entry.shard.path for entry in tensors)
    bytes_by_dtype: Counter[str] = Counter()
    num_by_dtype: Counter[str] = Counter()
    for entry in tensors:
        bytes_by_dtype[_name(entry.dtype)] += entry.nbytes
        num_by_dtype[_name(entry.dtype)] += 1
    document: dict[str, Any] = {
        "path": str(options.path),
        "num_tensors": len(tensors),
        "tensor_bytes": sum(entry.nbytes for entry in tensors),
        "shards": [
            {
                "path": shard.path,
                "bytes": shard.size,
                "num_tensors": num_by_shard[shard.path],
                "metadata": shard.metadata,
            }
            for shard in files.shards
        ],
        "dtypes": {
            dtype: {"num_tensors": num_by_dtype[dtype], "bytes": num_bytes}
            for dtype, num_bytes in bytes_by_dtype.most_common()
        },
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
    print(json.dumps(document, indent=2) if options.json else _text(document))
    return 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(document: dict[str, Any]) -> str:
    num_shards = len(document["shards"])
    lines = [
        f"{printable(document['path'])}: {document['num_tensors']} tensors, {format_bytes(document['tensor_bytes'])}, "
        f"{num_shards} shard{'' if num_shards == 1 else 's'}"
    ]
    lines += [
        f"  {dtype:<18}{counts['num_tensors']:>8} tensors {format_bytes(counts['bytes']):>12}"
        for dtype, counts in document["dtypes"].items()
    ]
    for shard in document["shards"]:
        lines.append(f"  {printable(shard['path'])}: {shard['num_tensors']} tensors, {format_bytes(shard['bytes'])}")
        lines += [f"    {printable(key)}: {printable(value)}" for key, value in shard["metadata"].items()]
    if "tensors" in document:
        names = [printable(entry["name"]) for entry in document["tensors"]]
        width = max(map(len, names), default=0)
        lines += [
            f"  {name:<{width}}  {entry['dtype']:<16} {entry['shape']!s:<20} {format_bytes(entry['bytes'])}"
            for name, entry in zip(names, document["tensors"], strict=True)
        ]
    return "\n".join(lines)
