"""weightlift: lifts model weights from storage into an inference engine's parameters.

`fast_load(model, checkpoint)` is the one call. `open_checkpoint` gives tensors whose bytes are still on disk, to record
copies from; `load_file` loads a whole file or folder.
"""

from ._logging import set_up_logging
from ._version import __version__
from .config import LoadConfig
from .entries import CheckpointFiles, Shard, TensorEntry
from .errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, CheckpointReadError
from .loading import Checkpoint, load_file, open_checkpoint
from .model.loader import fast_load
from .report import FileReport, LoadReport
from .tensor import CheckpointTensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFiles",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointReadError",
    "CheckpointTensor",
    "FileReport",
    "LoadConfig",
    "LoadReport",
    "Shard",
    "TensorEntry",
    "__version__",
    "fast_load",
    "load_file",
    "open_checkpoint",
]

set_up_logging()
