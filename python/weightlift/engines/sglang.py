"""SGLang: `--load-format weightlift`.

SGLang's models and their weight loaders run unchanged, on tensors whose bytes are still on disk: what they copy is what
is read, so that each rank reads its slices and its experts and nothing else. Which files a model has, SGLang's own code
decides. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .._logging import logger
from ..config import LoadConfig
from ..loading import Checkpoint, open_checkpoint
from ..model.loader import land_leftovers
from ..report import LoadReport
from ..source import CheckpointSource
from .load_format import LOAD_FORMAT, ExtraConfig, tell

INDEX_NAME = "model.safetensors.index.json"


def register() -> None:
    """Makes `--load-format weightlift` known to SGLang: the entry point in its plugin group `sglang.srt.plugins`.

    SGLang calls it in each of its processes, before it reads arguments. Further calls do nothing.
    """
    if LOAD_FORMAT not in choices.LOAD_FORMAT_CHOICES:
        choices.add_load_format_choices([LOAD_FORMAT])
        # SGLang takes a class as load format, too. Its own formats are an enumeration, which has no place for others.
        HookRegistry.register(
            "sglang.srt.configs.load_config.LoadConfig._verify_load_format", _choose_loader, HookType.AROUND
        )


def _choose_loader(verify: Callable[[Any], None], load_config: Any) -> None:
    if load_config.load_format == LOAD_FORMAT:
        load_config.load_format = WeightliftModelLoader
    else:
        verify(load_config)


class WeightliftModelLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang is not there when types are checked
    """SGLang's default loader, its stream of tensors replaced by one of recorded tensors.

    `model_loader_extra_config` takes the fields of `weightlift.LoadConfig`, and `report_dir`, a folder where each rank
    writes its LoadReport as `rank-0.json`.

    Raises:
        ValueError: a key or value that is not accepted.
    """

    def __init__(self, load_config: Any) -> None:
        extra = ExtraConfig.read(load_config.model_loader_extra_config)
        self._report_dir = extra.report_dir
        self._config = LoadConfig(**extra.options)
        # None outside of load_weights_and_postprocess: copies are carried out at once then.
        self._block: contextlib.ExitStack | None = None
        self._checkpoints: list[Checkpoint] = []
        self.reports: list[LoadReport] = []  # of what was loaded last: one for each source of the model
        # Of the formats that SGLang knows, auto is the one whose choice of files we take over.
        super().__init__(dataclasses.replace(load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={}))

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        self._checkpoints = []
        try:
            with contextlib.ExitStack() as self._block:
                try:
                    DefaultModelLoader.load_weights_only(model, weights, target_device)
                    land_leftovers(model)
                finally:
                    self._block = None
            self.reports = [checkpoint.report for checkpoint in self._checkpoints]
        finally:
            for checkpoint in self._checkpoints:
                checkpoint.close()
        tell(self.reports, report_dir=self._report_dir, logger=logger)
        DefaultModelLoader.postprocess_weights(model, target_device)

    def _get_weights_iterator(self, source: Any, *, resolved_source: Any = None, **startup: Any) -> Iterator[Any]:
        """All (name, tensor) of one source of the model, in the order of the files."""
        if resolved_source is None:
            folder, files, is_safetensors = self._prepare_weights(
                source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
            )
            if is_safetensors and source.model_config is not None:
                files = maybe_add_mtp_safetensors(files, folder, INDEX_NAME, source.model_config.hf_config)
        else:
            folder, files = resolved_source.hf_folder, list(resolved_source.weight_files)
            is_safetensors = resolved_source.use_safetensors
        index = os.path.join(folder, INDEX_NAME)
        if is_safetensors and source.allow_patterns_overrides is None and os.path.isfile(index):
            # The index says which tensors of its files are the checkpoint's; files beside it are read whole.
            with open(index) as file:
                indexed = set(json.load(file)["weight_map"].values())
            beside = [path for path in files if os.path.basename(path) not in indexed]
            sources = [CheckpointSource(index), *([CheckpointSource(beside)] if beside else [])]
        else:
            sources = [CheckpointSource(files)]
        stream = self._stream(sources)
        if self.load_config.draft_model_idx is not None:
            return self._filter_mtp_weights(  # type: ignore[no-any-return]
                stream, source.prefix, self.load_config.draft_model_idx
            )
        return ((source.prefix + name, tensor) for name, tensor in stream)

    def _stream(self, sources: list[CheckpointSource]) -> Iterator[tuple[str, torch.Tensor]]:
        checkpoint = open_checkpoint(sources, config=self._config)
        if self._block is not None:
            self._checkpoints.append(checkpoint)
            self._block.enter_context(checkpoint.recording())
        for name in checkpoint:
            tensor = checkpoint[name]
            # Recording is for one thread: models hand other tensors of the CPU to a pool of threads, but not these.
            tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
            yield name, tensor
