"""Python's garbage collector, which looks at every object again and again while many are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """For our own loops over all tensors, which make no cyclic garbage: collections would take up to half of their
    time. Not around code of others, whose garbage would pile up.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
