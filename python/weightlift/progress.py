"""The byte bar that ``progress=True`` shows."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class ProgressBar:
    """Shows bytes done, of how many, and GB/s, on stderr. A context manager; used by one thread.

    Args:
        enabled: False shows nothing, and costs nothing.
    """

    def __init__(self, *, enabled: bool = True, description: str = "Loading weights") -> None:
        self._bar: Any = None
        if enabled:
            from tqdm import tqdm  # imported when first needed, so that `import weightlift` does not pay for it

            self._bar = tqdm(total=0, desc=description, unit="B", unit_scale=True)

    def update_to(self, done_bytes: int, total_bytes: int) -> None:
        """Moves the bar to `done_bytes` of the `total_bytes` that are known to be needed so far."""
        if self._bar is not None:
            self._bar.total = total_bytes
            self._bar.update(done_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
