"""The golden data: inputs and results of upstream's own functions, one safetensors file a topic; see its GOLDEN.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

GOLDEN = Path(os.environ.get("WEIGHTLIFT_TEST_GOLDEN") or Path(__file__).resolve().parents[2] / "shared" / "golden")
NO_GOLDEN = f"no golden data at {GOLDEN}; WEIGHTLIFT_TEST_GOLDEN can name another folder"


@dataclasses.dataclass(frozen=True)
class Case:
    """One case: its parameters, and its tensors by their suffix: `case["weight"]`."""

    topic: str
    name: str
    parameters: dict[str, Any]

    def __getitem__(self, suffix: str) -> Tensor:
        return golden_file(self.topic).get_tensor(f"{self.name}.{suffix}")

    def __contains__(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in _names(self.topic)


@functools.cache
def golden_file(topic: str) -> Any:
    return safe_open(GOLDEN / f"{topic}.safetensors", framework="pt")


def golden_cases(topic: str) -> dict[str, dict[str, Any]]:
    """Case to parameters."""
    cases: dict[str, dict[str, Any]] = json.loads(golden_file(topic).metadata()["cases"])
    return cases


@functools.cache
def _names(topic: str) -> frozenset[str]:
    return frozenset(golden_file(topic).keys())


def cases(topic: str, **wanted: Any) -> list[Any]:
    """The cases of a topic that have these parameters, for a test's parametrize(); without the data, one to skip."""
    if not GOLDEN.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason=NO_GOLDEN))]
    return [
        pytest.param(Case(topic, name, parameters), id=name)
        for name, parameters in golden_cases(topic).items()
        if all(parameters.get(key) == value for key, value in wanted.items())
    ]
