"""The package's logger. Where the application sets up no logging, Python shows warnings on stderr, and nothing else."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("weightlift")


def set_up_logging() -> None:
    """Called once, when the package is imported. WEIGHTLIFT_LOG_TO_STDERR=1 shows INFO and above on stderr."""
    if _setting() == "1":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def bad_setting() -> str | None:
    """What is wrong with WEIGHTLIFT_LOG_TO_STDERR. Importing the package is not the time to say it."""
    wanted = _setting()
    return None if wanted in ("0", "1") else f"WEIGHTLIFT_LOG_TO_STDERR is {wanted!r}; accepted is 0 or 1"


def _setting() -> str:
    return os.environ.get("WEIGHTLIFT_LOG_TO_STDERR", "").strip() or "0"
