"""README's examples run, in order and in one namespace, and its table of settings is current."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def test_the_table_of_settings_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_table.py"))
    table = README.read_text().split(script["BEGIN"])[1].split(script["END"])[0]
    assert table == script["table"](), "run: python scripts/config_table.py --write"


def test_the_examples_run(tmp_path: Path, write_checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = write_checkpoint(tmp_path, state, shards=2)
    opening, *examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 3

    namespace: dict[str, Any] = {"checkpoint": checkpoint, "model": model}
    exec(opening.replace('"Qwen2-7B/"', "checkpoint"), namespace)
    for example in examples:
        exec(example, namespace)

    out = capsys.readouterr().out
    assert out.count("Loaded ") == 2
    assert f"{8 * 64 * 4} of {32 * 64 * 4} bytes were needed" in out
    assert torch.equal(namespace["rows"], state["0.weight"][8:16])
    assert all(torch.equal(tensor, state[name]) for name, tensor in namespace["model"].state_dict().items())
