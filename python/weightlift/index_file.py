"""The index of a checkpoint in several shards: which file holds which tensor. Read without trust, like a header."""

from __future__ import annotations

import os
import posixpath
import reprlib
from typing import Any

from .errors import CheckpointError
from .files import open_regular, read_at
from .safetensors_file import IMPOSTORS, MAX_JSON_BYTES, parse_json


def read_index(index: str) -> dict[str, str]:
    """The weight map of an index: names of tensors to normalised paths of shards, relative to the index's folder.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointReadError: it cannot be opened or read.
        CheckpointError: it is not an index, or names a file outside its folder.
    """
    fd, status = open_regular(index)
    try:
        if status.st_size > MAX_JSON_BYTES:
            problem = f"expected an index of {MAX_JSON_BYTES} bytes at most, found {status.st_size}"
            raise CheckpointError(problem, path=index, reason="InvalidIndex")
        text = read_at(fd, index, 0, status.st_size)
    finally:
        os.close(fd)
    for pattern, kind, remedy in IMPOSTORS[:2]:  # a pointer or a page
        if pattern.match(text):
            raise CheckpointError(f"expected an index, found {kind}; {remedy}", path=index, reason="InvalidIndex")
    weight_map = parse_json(text, index, "index", ("InvalidIndex", "InvalidIndex")).get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        found = "none" if weight_map is None else reprlib.repr(weight_map)
        problem = f'expected a "weight_map" from tensor names to files, found {found}'
        raise CheckpointError(problem, path=index, reason="InvalidIndex")
    shards: dict[Any, str] = {}
    for name, shard in weight_map.items():
        if type(shard) is not str:
            problem = f"expected the name of a file in the weight_map, found {reprlib.repr(shard)}"
            raise CheckpointError(problem, path=index, tensor=name, reason="InvalidIndex")
        if shard not in shards:
            normal = posixpath.normpath(shard)
            # By the text, not by where symlinks lead: in a hub cache each shard is a symlink out of the folder.
            if not shard or "\0" in shard or normal == "." or normal.startswith("/") or ".." in shard.split("/"):
                problem = (
                    f"expected a file inside the index's folder, found {reprlib.repr(shard)}; this is not safe to open"
                )
                raise CheckpointError(problem, path=index, tensor=name, reason="UnsafePath")
            shards[shard] = normal
    return {name: shards[shard] for name, shard in weight_map.items()}
