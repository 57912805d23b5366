"""Which class fills a shell, by `load_format`; and what such classes have in common."""

from __future__ import annotations

import abc
import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

from ..checkpoint import CheckpointSource, locate
from ..config import LoadConfig
from ..entries import CheckpointFiles
from ..errors import CheckpointMismatchError
from ..loading import resolved_config
from ..program import Program
from ..report import LoadReport
from ..watch import watching
from .loader import fast_load
from .mapping import WeightsMapper
from .model_config import ModelConfig, is_tied
from .parallel import ParallelConfig
from .reconcile import check_coverage, reconcile, weight_loader
from .router import AutoWeightsLoader, tied_mismatch


class BaseModelLoader(abc.ABC):
    """Fills the shell of a model from one format. Made for one load.

    Args:
        source: where the weights are.
        model_config: of the model.
        parallel: which part of it.
        strict, load_config, progress, on_module_loaded: as `fast_load` takes them; a loader may leave the last one out.

    Attributes:
        pre_processed: whether layers have their final form when their weights are loaded.
    """

    pre_processed = False

    def __init__(
        self,
        source: CheckpointSource,
        model_config: ModelConfig,
        *,
        parallel: ParallelConfig,
        strict: bool = True,
        load_config: LoadConfig | None = None,
        progress: bool = False,
        on_module_loaded: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.source = source
        self.model_config = model_config
        self.parallel = parallel
        self.strict = strict
        self.load_config = load_config
        self.progress = progress
        self.on_module_loaded = on_module_loaded

    def dtype_of_weights(self) -> torch.dtype | None:
        """The dtype of most of the weights; None: it is not known."""
        return None

    def check(self) -> None:  # noqa: B027
        """Raises what is known to be wrong before anything is allocated."""

    @abc.abstractmethod
    def load_weights(self, model: nn.Module) -> LoadReport:
        """Fills every parameter and persistent buffer of a shell.

        Raises:
            CheckpointError: they cannot be filled.
        """


class StreamModelLoader(BaseModelLoader):
    """Base of loaders for formats that give whole tensors one after the other: `iter_weights` is all they need.

    When the stream has ended, names are compared, and of parameters in CPU memory whether all of them was written.

    Example:
        >>> @register_loader("npz")
        ... class NpzLoader(StreamModelLoader):
        ...     def iter_weights(self):
        ...         for name, array in numpy.load(self.source.path).items():
        ...             yield name, torch.from_numpy(array)
    """

    @abc.abstractmethod
    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs, as they come."""

    def load_weights(self, model: nn.Module) -> LoadReport:
        started = time.perf_counter()
        router = AutoWeightsLoader(model, ignore_unexpected_prefixes=None if self.strict else ("",))
        program = Program(CheckpointFiles((), {}), resolved_config(self.load_config))
        program.track_coverage()
        with watching(program):
            loaded = router.load_weights(self.iter_weights(), mapper=mapper_of(model))
        targets = model.state_dict(keep_vars=True)
        report = reconcile(model, targets, loaded, path=self.source, strict=False)
        cut = {name: targets[name] for name in loaded & targets.keys() if weight_loader(targets[name]) is not None}
        check_coverage(model, cut, program, report, path=self.source, strict=self.strict)
        report.seconds["total"] = time.perf_counter() - started
        return report


class DefaultModelLoader(BaseModelLoader):
    """Files of safetensors or torch, by `fast_load`: only what this rank needs is read."""

    @functools.cached_property
    def files(self) -> CheckpointFiles:
        return locate(self.source)

    def dtype_of_weights(self) -> torch.dtype | None:
        sizes: Counter[torch.dtype] = Counter()
        for entry in self.files.tensors.values():
            if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:  # others are those of quantised weights
                sizes[entry.dtype] += entry.nbytes
        return sizes.most_common(1)[0][0] if sizes else None

    def check(self) -> None:
        if not is_tied(self.model_config):
            return
        names = "lm_head.weight", "model.embed_tokens.weight"
        entries = [self.files.tensors.get(name) for name in names]
        head, embedding = (None if entry is None else torch.Size(entry.shape) for entry in entries)
        if head is not None and embedding is not None and head != embedding:
            raise CheckpointMismatchError(
                self.model_config.architectures[0], mismatched=[tied_mismatch(names[0], head, names[1], embedding)]
            )

    def load_weights(self, model: nn.Module) -> LoadReport:
        return fast_load(
            model,
            self.source,
            mapper=mapper_of(model),
            strict=self.strict,
            config=self.load_config,
            progress=self.progress,
            on_module_loaded=self.on_module_loaded,
        )


Loader = TypeVar("Loader", bound=type[BaseModelLoader])

_loaders: dict[str, type[BaseModelLoader] | str] = {
    **dict.fromkeys(("auto", "hf", "safetensors", "mistral", "pt"), DefaultModelLoader),
    "dummy": "weightlift.model.dummy:DummyModelLoader",
    "sharded_state": "weightlift.model.sharded_state:ShardedStateLoader",
    "packed": "weightlift.model.packed_image:PackedImageLoader",
}


def register_loader(load_format: str) -> Callable[[Loader], Loader]:
    """Decorates the class that loads a format; one that is registered already is replaced.

    Args:
        load_format: what `load_model(load_format=...)` calls it.

    Raises:
        TypeError: the class is no BaseModelLoader.
    """

    def register(cls: Loader) -> Loader:
        if not (isinstance(cls, type) and issubclass(cls, BaseModelLoader)):
            raise TypeError(f"load_format {load_format!r}: expected a subclass of BaseModelLoader, found {cls!r}")
        _loaders[load_format] = cls
        return cls

    return register


def loader_class(load_format: str) -> type[BaseModelLoader]:
    """The class that loads a format. Raises ValueError where none is registered."""
    cls = _loaders.get(load_format)
    if cls is None:
        raise ValueError(
            f"load_format is {load_format!r}; accepted is one of {', '.join(sorted(_loaders))}, "
            "or one that register_loader() has registered"
        )
    if isinstance(cls, str):
        module, _, name = cls.partition(":")
        cls = _loaders[load_format] = getattr(importlib.import_module(module), name)
    return cls


def mapper_of(model: object) -> WeightsMapper | None:
    """From names of the checkpoint to those of a model, or of its class; None: they are the same."""
    mapper: WeightsMapper | None = getattr(model, "hf_to_weightlift_mapper", None)
    return mapper
