"""Quantised layers: the method of a layer says which parameters it has, and in which layout they are.

What others build on is here by name, and imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import QuantizationConfig as QuantizationConfig
    from .base import QuantizedLinearMethod as QuantizedLinearMethod
    from .base import read_quantization as read_quantization
    from .base import register_quantization_config as register_quantization_config
    from .base import registered_quantization_configs as registered_quantization_configs

__all__ = [
    "QuantizationConfig",
    "QuantizedLinearMethod",
    "read_quantization",
    "register_quantization_config",
    "registered_quantization_configs",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".base", __name__), name)
