"""Arguments that say in which form quantised parameters shall be."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from weightlift.cli import parallel
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.base import Target
from weightlift.model.quantization.online import SCHEMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", choices=get_args(Target), help="layout of quantised parameters of the model (default: plain)"
    )
    parser.add_argument(
        "--quantization", choices=tuple(SCHEMES), help="quantise the model's weights like this (default: as they are)"
    )


def layout_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that `load_model` takes for it."""
    return {"target": options.target, "quantization": options.quantization}


def rank_of(options: argparse.Namespace) -> ParallelConfig | None:
    """As `parallel_of`; where a form is asked for, one rank of one is meant, and not tensors without a model."""
    rank = parallel.parallel_of(options)
    return ParallelConfig() if rank is None and any(layout_of(options).values()) else rank
