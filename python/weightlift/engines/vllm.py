"""vLLM: `--load-format weightlift`.

vLLM's models and their weight loaders run unchanged, on tensors whose bytes are still on disk: what they copy is what
is read, so that each worker reads its slices and its experts and nothing else. Which files a model has, and which
filters apply to them, vLLM's own code decides. Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from ..config import LoadConfig
from ..loading import Checkpoint, open_checkpoint, progress_bar
from ..model.loader import land_leftovers
from ..report import LoadReport
from ..source import CheckpointSource
from .load_format import LOAD_FORMAT, ExtraConfig, tell

# Under one of vLLM's own names: loggers of others are not shown.
logger = init_logger("vllm.plugins.weightlift")


def register() -> None:
    """Makes `--load-format weightlift` known to vLLM: the entry point in its plugin group `vllm.general_plugins`.

    vLLM calls it in each of its processes. Further calls do nothing.
    """
    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not WeightliftModelLoader:
        model_loader.register_model_loader(LOAD_FORMAT)(WeightliftModelLoader)


class WeightliftModelLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's default loader, its stream of tensors replaced by one of recorded tensors.

    `model_loader_extra_config` takes the fields of `weightlift.LoadConfig`, vLLM's `enable_weights_track`, and
    `report_dir`, a folder where each rank writes its LoadReport as `rank-0.json`. `safetensors_load_strategy` and its
    options are followed.

    Raises:
        ValueError: a key or value that is not accepted, or a strategy given both ways.
    """

    def __init__(self, load_config: Any) -> None:
        extra = ExtraConfig.read(load_config.model_loader_extra_config, upstream_keys=["enable_weights_track"])
        self._report_dir = extra.report_dir
        self._config = _read_options(extra.options, load_config)
        self._checkpoint: Checkpoint | None = None
        # None outside of load_weights: copies are carried out at once then.
        self._block: contextlib.ExitStack | None = None
        self.report = LoadReport()  # of what was loaded last
        # Of the formats that vLLM knows, auto is the one whose choice of files we take over.
        super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=extra.upstream))

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        try:
            return super().load_model(*args, **kwargs)  # type: ignore[no-any-return]
        finally:  # not before: online quantisation keeps tensors until their layer is complete
            if self._checkpoint is not None:
                self._checkpoint.close()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        with contextlib.ExitStack() as self._block:
            try:
                super().load_weights(model, model_config)
                land_leftovers(model)
            finally:
                self._block = None
        if self._checkpoint is not None:
            self.report = self._checkpoint.report
            tell([self.report], report_dir=self._report_dir, logger=logger)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """All (name, tensor) of the model, in the order of vLLM's default loader.

        Outside of `load_weights`, where vLLM reloads the weights of a model that runs, nobody says when the last tensor
        has been used: each copy is carried out at once there.
        """
        if self._is_torchao:
            logger.warning("torchao: its tensors are put together by vLLM's own iterator, which reads them whole")
            return super().get_all_weights(model_config, model)  # type: ignore[no-any-return]
        # Before the first tensor is asked for: recording begins here, and ends in load_weights.
        chosen, sources = zip(*super().get_all_weights(model_config, model), strict=True)
        self._checkpoint = open_checkpoint(sources, config=self._config)
        if self._block is not None:
            self._block.enter_context(self._checkpoint.recording())
            shows_progress = weight_utils.enable_tqdm(self.load_config.use_tqdm_on_load)
            self._block.enter_context(progress_bar(self._checkpoint, shows_progress))
        return self._stream(self._checkpoint, {os.path.realpath(path) for paths in chosen for path in paths})

    def _get_weights_iterator(self, source: Any) -> Iterator[Any]:
        """What vLLM asks for each source of the model. One item: the files it chooses, and where they lie."""
        return super()._get_weights_iterator(source) if self._is_torchao else iter([self._locate(source)])

    @property
    def _is_torchao(self) -> bool:
        return bool(self.load_config.safetensors_load_strategy == "torchao")

    def _locate(self, source: Any) -> tuple[list[str], CheckpointSource]:
        folder, files, are_safetensors, index_name = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        index = os.path.join(folder, index_name)
        if are_safetensors:
            if self._encoder_only_lm_prefixes is not None:
                files = weight_utils.filter_mm_encoder_only_safetensors_files(
                    files,
                    folder,
                    index_name,
                    self._encoder_only_lm_prefixes,
                    weights_mapper=self._encoder_only_weights_mapper,
                )
                if not files:
                    raise RuntimeError(
                        f"mm_encoder_only leaves no weight file of {source.model_or_path}: all their tensors start "
                        f"with {self._encoder_only_lm_prefixes}"
                    )
            if source.is_unused_weight is not None:
                files = weight_utils.filter_safetensors_files_by_weight_name(files, source.is_unused_weight)
        # Where there is an index, it says which tensors of its files are the checkpoint's.
        has_index = are_safetensors and source.allow_patterns_overrides is None and os.path.isfile(index)
        return files, CheckpointSource(index if has_index else files, prefix=source.prefix)

    def _stream(self, checkpoint: Checkpoint, chosen: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self.counter_before_loading_weights = time.perf_counter()
        for shard in checkpoint.files.shards:
            if os.path.realpath(shard.path) not in chosen:
                continue
            for name in sorted(entry.name for entry in shard.tensors):
                is_assigned = checkpoint.files.tensors[name].shard is shard
                if is_assigned and not should_skip_weight(name, self.local_expert_ids):
                    yield name, checkpoint[name]
        if self._block is not None:
            checkpoint.run()  # already here, so that the time that vLLM reports is that of the whole load


def _read_options(options: dict[str, Any], load_config: Any) -> LoadConfig:
    """vLLM's settings as ours."""
    strategy = load_config.safetensors_load_strategy
    if strategy is not None and strategy != "torchao":
        if options.get("strategy") is not None:
            raise ValueError(
                f"safetensors_load_strategy is {strategy!r} and strategy in model_loader_extra_config is "
                f"{options['strategy']!r}: both say how to read, give one of them"
            )
        options["strategy"] = strategy
        if strategy == "prefetch":
            options.setdefault("prefetch_num_threads", load_config.safetensors_prefetch_num_threads)
            options.setdefault("prefetch_block_bytes", load_config.safetensors_prefetch_block_size)
    return LoadConfig(**options)
