"""The load format `weightlift` in any engine: its name, the settings that it takes, and the reports that it gives."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..config import OPTIONS
from ..report import LoadReport

LOAD_FORMAT = "weightlift"


class ExtraConfig(NamedTuple):
    """`model_loader_extra_config`, taken apart.

    Attributes:
        options: fields of `weightlift.LoadConfig`.
        upstream: what is for the engine's own loader.
        report_dir: a folder for the reports of all ranks; None: they are not written down.
    """

    options: dict[str, Any]
    upstream: dict[str, Any]
    report_dir: str | None

    @classmethod
    def read(cls, extra: Any, *, upstream_keys: Sequence[str] = ()) -> ExtraConfig:
        """Raises ValueError: it is no dict, has a key that nobody takes, or its `report_dir` is no path."""
        if not isinstance(extra, dict):
            raise ValueError(f"model_loader_extra_config must be a dict, found {type(extra).__name__}")
        options = dict(extra)
        upstream = {key: options.pop(key) for key in upstream_keys if key in options}
        report_dir = options.pop("report_dir", None)
        if not isinstance(report_dir, (str, type(None))):
            raise ValueError(f"report_dir must be the path of a folder, found {report_dir!r}")
        if unknown := options.keys() - OPTIONS.keys():
            hint = "; reads are always parallel here" if "enable_multithread_load" in unknown else ""
            raise ValueError(
                f"model_loader_extra_config of load format {LOAD_FORMAT} has unknown keys: "
                f"{', '.join(sorted(unknown))}{hint} (accepted: {', '.join((*OPTIONS, *upstream_keys, 'report_dir'))})"
            )
        return cls(options, upstream, report_dir)


def tell(reports: Sequence[LoadReport], *, report_dir: str | None, logger: logging.Logger) -> None:
    """Logs what this rank has read, a report for each source of the model, and writes it into the folder."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for number, report in enumerate(reports):
        logger.info("rank %d: %s", rank, report.summary())
        if report_dir is not None:
            os.makedirs(report_dir, exist_ok=True)
            name = f"rank-{rank}.json" if number == 0 else f"rank-{rank}-source-{number}.json"
            with open(os.path.join(report_dir, name), "w") as file:
                json.dump(report.to_dict(), file, indent=2)
