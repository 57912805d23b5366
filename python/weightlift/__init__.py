"""weightlift: lifts model weights from storage into an inference engine's parameters.

`fast_load(model, checkpoint)` is the one call. `open_checkpoint` gives tensors whose bytes are still on disk, to record
copies from; `load_file` loads a whole file or folder; `iter_weights` streams one.
"""

from . import filters, ops
from ._logging import set_up_logging
from ._version import __version__
from .checkpoint import CheckpointSource
from .config import LoadConfig
from .engines.safetensors import load, load_model, patch_safetensors, safe_open
from .entries import CheckpointFiles, Shard, TensorEntry
from .errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, CheckpointReadError
from .hub import download
from .loading import Checkpoint, load_file, open_checkpoint
from .model.loader import fast_load
from .model.mapping import WeightsMapper
from .model.router import AutoWeightsLoader
from .report import FileReport, LoadReport
from .stream import iter_weights
from .tensor import CheckpointTensor

__all__ = [
    "AutoWeightsLoader",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFiles",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointReadError",
    "CheckpointSource",
    "CheckpointTensor",
    "FileReport",
    "LoadConfig",
    "LoadReport",
    "Shard",
    "TensorEntry",
    "WeightsMapper",
    "__version__",
    "download",
    "fast_load",
    "filters",
    "iter_weights",
    "load",
    "load_file",
    "load_model",
    "open_checkpoint",
    "ops",
    "patch_safetensors",
    "safe_open",
]

set_up_logging()
