"""README's examples run, in order and in one namespace, and its table of settings is current."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from conftest import CHECKPOINTS, NO_CHECKPOINTS

from examples import house_engine

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def test_the_table_of_settings_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_table.py"))
    table = README.read_text().split(script["BEGIN"])[1].split(script["END"])[0]
    assert table == script["table"](), "run: python scripts/config_table.py --write"


def test_the_engine_loads_the_same_by_hand_and_by_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    house_engine.main()
    assert capsys.readouterr().out == "equal; 12.0 of 24.0 MiB were read\n"


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=NO_CHECKPOINTS)
def test_the_examples_run(tmp_path: Path, write_checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = write_checkpoint(tmp_path / "model", state)
    engine = house_engine.Model(rank=1, world_size=2)
    house_engine.write_checkpoint(tmp_path)
    opening, *examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 8

    namespace: dict[str, Any] = {
        "checkpoint": checkpoint,
        "model": model,
        "engine": engine,
        "engine_checkpoint": tmp_path,
        "safetensors": safetensors,
        "hf_checkpoint": CHECKPOINTS / "llama128",
    }
    exec(opening.replace('"Qwen2-7B/"', "checkpoint"), namespace)
    for example in examples:
        exec(example, namespace)

    out = capsys.readouterr().out
    assert out.count("Loaded ") == 3
    assert "1.weight (8, 32)" in out
    assert f"{8 * 64 * 4} of {32 * 64 * 4} bytes were needed" in out
    assert namespace["report"].bytes_needed == 64 * 4 + 6 * 32 * 64 * 4  # of the engine, its half
    dequantised = namespace["weight"].float() * namespace["scales"]
    assert torch.allclose(dequantised, state["0.weight"], rtol=1 / 16, atol=1e-3)
    assert torch.equal(namespace["rows"], state["0.weight"][8:16])
    assert all(torch.equal(tensor, state[name]) for name, tensor in namespace["model"].state_dict().items())
