"""What fuzzing found once stays found: the committed corpus, and a few fresh mutants. `make fuzz` runs more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("fuzz")))
import fuzz_headers
from fuzz_headers import TARGETS, Finding, corpus_of, fuzz, run


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_refused_or_read_alike(name: str, tmp_path: Path) -> None:
    inputs = corpus_of(name)
    assert inputs, "the corpus is committed"
    for file in inputs:
        try:
            run(TARGETS[name], file.read_bytes(), tmp_path / "file")
        except Finding as finding:
            pytest.fail(f"{file}: {finding}")


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_mutants_are_refused_or_read_alike(name: str, tmp_path: Path) -> None:
    assert fuzz(name, seconds=1.0, seed=0, keep=False, folder=tmp_path) == 0


def test_a_parser_that_fails_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(path: Path) -> None:
        if b"[2" in Path(path).read_bytes():
            raise ZeroDivisionError("broken")

    monkeypatch.setattr(fuzz_headers, "read_shard", read)
    monkeypatch.setattr(fuzz_headers, "shard_of_bytes", lambda data: None)
    monkeypatch.setattr(fuzz_headers, "CORPUS", tmp_path)
    (tmp_path / "safetensors").mkdir()
    assert fuzz("safetensors", seconds=2.0, seed=0, keep=False, folder=tmp_path) == 1
    assert "ZeroDivisionError at test_fuzz_corpus.py" in capsys.readouterr().out
    assert len(corpus_of("safetensors")) == 1
