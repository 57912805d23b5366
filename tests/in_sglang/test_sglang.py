"""SGLang's models hold the same, loaded by its default loader and by weightlift; and which settings it takes.

They run where SGLang is installed, and need no GPU: python -m pytest tests/in_sglang
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **MODELS[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, max_shard_size="1MB")
    return path


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_those_of_the_default_loader(folder: Path, world_size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("compare.py")),
                str(folder),
                *map(str, (rank, world_size, port)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        result = json.loads(out.strip().splitlines()[-1])
        assert (result["loaded"], result["reloaded"], result["forced"]) == ([], [], 0)
        assert result["bytes_read"] < (1.0 if world_size == 1 else 0.75) * result["bytes_there"]


def loader(load_format: str = "weightlift", **options: Any) -> Any:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.plugins.hook_registry import HookRegistry

    [plugin] = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "weightlift"]
    register = plugin.load()
    register()
    register()
    HookRegistry.apply_hooks()
    return get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=options))


def test_sglang_finds_the_plugin() -> None:
    assert type(loader()).__name__ == "WeightliftModelLoader"
    assert type(loader("auto")).__name__ == "DefaultModelLoader"
    with pytest.raises(ValueError, match="no_such_format"):
        loader("no_such_format")

    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES

    assert LOAD_FORMAT_CHOICES.count("weightlift") == 1


def test_command_line_takes_the_load_format(folder: Path) -> None:
    loader()  # registers it
    from sglang.srt.server_args import prepare_server_args

    arguments = ["--model-path", str(folder), "--device", "cpu", "--load-format", "weightlift"]
    assert prepare_server_args(arguments).load_format == "weightlift"


def test_settings_are_those_of_load_config() -> None:
    made = loader(queue_depth=4, strategy="buffered", report_dir="reports")
    assert (made._config.queue_depth, made._config.strategy, made._report_dir) == (4, "buffered", "reports")
    with pytest.raises(ValueError, match=r"unknown keys: queue_dept \(accepted: backend"):
        loader(queue_dept=4)
    with pytest.raises(ValueError, match="report_dir must be the path of a folder"):
        loader(report_dir=3)
    with pytest.raises(ValueError, match="queue_depth"):
        loader(queue_depth=0)
