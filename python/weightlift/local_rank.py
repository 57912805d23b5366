"""This process among those of its machine that load the same model."""

from __future__ import annotations

import os
from collections.abc import Mapping


def local_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """This process among those of its machine, as torchrun says: LOCAL_RANK and LOCAL_WORLD_SIZE; else (0, 1)."""
    try:
        rank, size = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)
