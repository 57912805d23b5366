"""How the load format is known to vLLM, and which settings it takes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, in a virtual environment of its own: make test-vllm", allow_module_level=True)


def loader(extra: Any = None, **settings: Any) -> Any:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from weightlift.engines.vllm import register

    register()
    settings = {"load_format": "weightlift", "model_loader_extra_config": extra or {}, **settings}
    return get_model_loader(LoadConfig(**settings))


def test_vllm_finds_the_plugin() -> None:
    [plugin] = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "weightlift"]
    register = plugin.load()
    register()
    register()  # vLLM may call it again, in each of its processes
    assert type(loader()).__name__ == "WeightliftModelLoader"


def test_other_formats_are_left_alone() -> None:
    assert type(loader(load_format="dummy")).__name__ == "DummyModelLoader"
    assert type(loader(load_format="auto")).__name__ == "DefaultModelLoader"


def test_registering_starts_nothing() -> None:
    program = (
        "import threading, torch\n"
        "from weightlift.engines.vllm import register\n"
        "before = threading.active_count()\n"
        "register()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_settings_are_those_of_load_config() -> None:
    made = loader({"queue_depth": 4, "strategy": "buffered", "enable_weights_track": False, "report_dir": "reports"})
    assert made._config.queue_depth == 4
    assert made._config.strategy == "buffered"
    assert made.enable_weights_track is False


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"queue_dept": 4, "foo": 1}, r"unknown keys: foo, queue_dept \(accepted: backend, strategy, "),
        ({"enable_multithread_load": True}, "unknown keys: enable_multithread_load; reads are always parallel here"),
        ({"queue_depth": 0}, "queue_depth is 0; accepted is a whole number from 1"),
        ({"enable_weights_track": True, "report_dir": 3}, "report_dir must be the path of a folder, found 3"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(extra)


@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch"])
def test_vllms_strategies_are_followed(strategy: str) -> None:
    assert loader(safetensors_load_strategy=strategy)._config.strategy == strategy


def test_options_of_prefetch_are_followed() -> None:
    config = loader(safetensors_load_strategy="prefetch", safetensors_prefetch_num_threads=3)._config
    assert (config.prefetch_num_threads, config.prefetch_block_bytes) == (3, 16 << 20)


def test_two_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"safetensors_load_strategy is 'lazy' and strategy .* is 'direct'"):
        loader({"strategy": "direct"}, safetensors_load_strategy="lazy")
