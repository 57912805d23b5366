"""The package's logger. It stays silent unless the application, or WEIGHTLIFT_LOG_TO_STDERR, says otherwise."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("weightlift")


def set_up_logging() -> None:
    """Called once, when the package is imported. WEIGHTLIFT_LOG_TO_STDERR=1 shows INFO and above on stderr.

    Raises:
        ValueError: WEIGHTLIFT_LOG_TO_STDERR is neither 0 nor 1.
    """
    logger.addHandler(logging.NullHandler())
    wanted = os.environ.get("WEIGHTLIFT_LOG_TO_STDERR", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"WEIGHTLIFT_LOG_TO_STDERR is {wanted!r}; accepted is 0 or 1")
    if wanted == "1":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
