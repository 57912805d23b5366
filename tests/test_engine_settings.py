"""What the load format `weightlift` takes and writes, whichever engine it is in; without one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import weightlift
from weightlift.engines.load_format import ExtraConfig, tell


def test_settings_are_dealt_to_those_whom_they_are_for() -> None:
    given = {"queue_depth": 4, "enable_weights_track": False, "report_dir": "reports"}
    extra = ExtraConfig.read(given, upstream_keys=["enable_weights_track", "other"])
    assert extra == ({"queue_depth": 4}, {"enable_weights_track": False}, "reports")
    assert given.keys() == {"queue_depth", "enable_weights_track", "report_dir"}  # the engine's own, unchanged
    assert ExtraConfig.read({}) == ({}, {}, None)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("{}", "model_loader_extra_config must be a dict, found str"),
        ({"report_dir": 3}, "report_dir must be the path of a folder, found 3"),
        ({"queue_dept": 4, "foo": 1}, r"unknown keys: foo, queue_dept \(accepted: backend, .*, theirs, report_dir\)"),
        ({"enable_multithread_load": True}, "enable_multithread_load; reads are always parallel here"),
    ],
)
def test_settings_that_nobody_takes_are_refused(extra: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExtraConfig.read(extra, upstream_keys=["theirs"])


def test_each_source_has_its_report(tmp_path: Path, caplog: pytest.LogCaptureFixture, write_checkpoint: Any) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": torch.zeros(1024)})
    with weightlift.open_checkpoint(folder) as checkpoint:
        checkpoint["w"].clone()
    logger = logging.getLogger("engine")
    with caplog.at_level(logging.INFO, logger="engine"):
        tell([checkpoint.report] * 2, report_dir=str(tmp_path / "new" / "reports"), logger=logger)
        tell([checkpoint.report], report_dir=None, logger=logger)
    assert [record.message for record in caplog.records] == [f"rank 0: {checkpoint.report.summary()}"] * 3
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "new" / "reports").iterdir()}
    assert written == dict.fromkeys(["rank-0.json", "rank-0-source-1.json"], checkpoint.report.to_dict())
