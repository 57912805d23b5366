"""The command line as a script meets it: output, exit codes, errors without tracebacks."""

from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import weightlift
from weightlift.cli import main

Output = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path, write_checkpoint: Any) -> Path:
    torch.manual_seed(0)
    tensors = {
        "a.weight": torch.randn(300, 64).to(torch.bfloat16),
        "b.weight": torch.randn(16, 8),
        "b.scale": torch.tensor(0.5),
        "none": torch.empty(0, 4),
    }
    return write_checkpoint(tmp_path / "model", tensors, shards=2)


def test_inspect_shows_shards_dtypes_and_sizes(checkpoint: Path, capsys: Output) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "4 tensors" in out.splitlines()[0]
    assert "2 shards" in out.splitlines()[0]
    assert "bfloat16" in out
    assert "by model.safetensors.index.json" in out.splitlines()[0]
    assert "  model-00002-of-00002.safetensors: 2 tensors, 164 B" in out.splitlines()


def test_inspect_folds_layers(tmp_path: Path, write_checkpoint: Any, capsys: Output) -> None:
    tensors = {f"layers.{i}.w": torch.zeros(4, 2) for i in range(12)} | {
        "layers.12.w": torch.zeros(3),
        "a": torch.ones(1),
    }
    folder = write_checkpoint(tmp_path / "model", tensors)
    assert main(["inspect", str(folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["a", "layers.{0-11}.w", "layers.12.w"]
    assert rows[1] == ["layers.{0-11}.w", "(12)", "float32", "[4,", "2]", "384", "B"]
    assert main(["inspect", "--json", str(folder)]) == 0
    names = json.loads(capsys.readouterr().out)["names"]
    assert sum(entry["num_tensors"] for entry in names) == 14
    assert sum(entry["bytes"] for entry in names) == 12 * 32 + 12 + 4


def test_inspect_shows_tied_tensors(tmp_path: Path, capsys: Output) -> None:
    embedding = torch.arange(12.0).view(4, 3)
    torch.save({"embed.weight": embedding, "head.weight": embedding, "part": embedding[:2]}, tmp_path / "model.bin")
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["aliases"]) == ("torch.save", {"head.weight": "embed.weight"})
    path = tmp_path / "model.safetensors"
    save_file({"embed.weight": embedding}, path, metadata={"head.weight": "embed.weight", "format": "pt"})
    assert main(["inspect", str(path)]) == 0
    assert "  tied        head.weight to embed.weight" in capsys.readouterr().out.splitlines()


def test_inspect_shows_a_broken_folder_as_far_as_it_goes(checkpoint: Path, capsys: Output) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    assert main(["inspect", str(checkpoint)]) == 1
    out = capsys.readouterr().out
    assert "  problem     " in out
    assert "2 tensors" in out.splitlines()[0]


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A folder as one finds it: the weights three times, a trainer's state, an adapter, other formats."""
    folder = tmp_path / "everything"
    (folder / "original").mkdir(parents=True)
    tensors = {f"layers.{i}.w": torch.full((2, 2), float(i)) for i in range(4)}
    for number, names in enumerate((("layers.0.w", "layers.1.w"), ("layers.2.w", "layers.3.w")), start=1):
        save_file({name: tensors[name] for name in names}, folder / f"model-0000{number}-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + i // 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    torch.save(tensors, folder / "pytorch_model.bin")
    save_file(tensors, folder / "consolidated.safetensors")
    save_file({"lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    torch.save({"state": torch.zeros(1)}, folder / "optimizer.pt")
    torch.save({"lr": torch.zeros(1)}, folder / "training_args.bin")
    for name in ("model.gguf", "config.json", "._model.safetensors", "original/consolidated.00.pth"):
        (folder / name).write_bytes(b"{}")
    return folder


def test_inspect_says_why_each_other_file_is_not_read(everything: Path, capsys: Output) -> None:
    assert main(["inspect", "--json", str(everything)]) == 0
    document = json.loads(capsys.readouterr().out)
    index = "model.safetensors.index.json"
    assert (document["num_tensors"], document["format"]) == (4, "safetensors")
    assert document["index"] == str(everything / index)
    assert document["ignored"] == {
        "adapter_model.safetensors": f"not named by {index}",
        "config.json": "not weights",
        "consolidated.safetensors": f"not named by {index}",
        "model.gguf": "GGUF, is not read",
        "optimizer.pt": "state of training",
        "original": "a subfolder",
        "pytorch_model.bin": f"{index} comes first",
        "training_args.bin": "state of training",
    }
    assert main(["inspect", str(everything)]) == 0
    assert f"  ignored     pytorch_model.bin: {index} comes first" in capsys.readouterr().out.splitlines()


def test_the_load_format_decides_what_is_read(everything: Path, capsys: Output) -> None:
    for load_format, shard in (("pt", "pytorch_model.bin"), ("mistral", "consolidated.safetensors")):
        (everything / "optimizer.pt").unlink(missing_ok=True)
        assert main(["inspect", "--json", "--load-format", load_format, str(everything)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [Path(entry["path"]).name for entry in document["shards"]] == [shard]
        assert "model-00001-of-00002.safetensors" in document["ignored"]
        assert main(["load", "--verify", "--json", "--load-format", load_format, str(everything)]) == 0
        assert json.loads(capsys.readouterr().out)["verify"] == {"num_compared": 4, "different": []}


def test_the_verify_command_passes_a_folder_with_everything(everything: Path, capsys: Output) -> None:
    assert main(["verify", "--json", str(everything)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["problems"], document["warnings"]) == (True, [], [])


def test_inspect_lists_tensors_when_asked(checkpoint: Path, capsys: Output) -> None:
    assert main(["inspect", "--tensors", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "a.weight" in out
    assert "[300, 64]" in out


def test_inspect_as_json(checkpoint: Path, capsys: Output) -> None:
    assert main(["inspect", "--json", "--tensors", str(checkpoint)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_tensors"] == 4
    assert document["tensor_bytes"] == 300 * 64 * 2 + 16 * 8 * 4 + 4
    assert document["dtypes"]["float32"] == {"num_tensors": 3, "bytes": 16 * 8 * 4 + 4}
    assert [shard["num_tensors"] for shard in document["shards"]] == [2, 2]
    assert {entry["name"]: entry["shape"] for entry in document["tensors"]}["none"] == [0, 4]


def test_inspect_shows_hostile_names_harmlessly(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w\x1b[2J": torch.zeros(1)}, path, metadata={"key\x1b[1A": "two\nlines"})
    assert main(["inspect", "--tensors", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    for shown in (r"'w\x1b[2J'", r"'key\x1b[1A'", r"'two\nlines'"):
        assert shown in out


def test_load_verifies_every_byte(checkpoint: Path, capsys: Output) -> None:
    assert main(["load", "--verify", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Loaded ")
    assert "4 tensors, every byte as safetensors read it" in out


def test_load_as_json_is_the_report(checkpoint: Path, capsys: Output) -> None:
    assert main(["load", "--verify", "--json", "--strategy", "buffered", str(checkpoint)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes_needed"] == 300 * 64 * 2 + 16 * 8 * 4 + 4
    assert {file["strategy"] for file in document["files"]} == {"buffered"}
    assert document["verify"] == {"num_compared": 4, "different": []}


def test_load_whose_bytes_differ_fails(checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    real = weightlift.fast_load

    def spoiled(state: Any, path: Any, **options: Any) -> Any:
        report = real(state, path, **options)
        state["b.weight"][3, 3] += 1
        return report

    monkeypatch.setattr(weightlift, "fast_load", spoiled)
    assert main(["load", "--verify", str(checkpoint)]) == 1
    assert "1 tensors differ: b.weight" in capsys.readouterr().out
    assert main(["load", "--verify", "--json", str(checkpoint)]) == 1
    assert json.loads(capsys.readouterr().out)["verify"]["different"] == ["b.weight"]


def test_verify_compares_tensors_of_any_strides(tmp_path: Path, capsys: Output) -> None:
    column = torch.arange(6.0).view(2, 3)[:, 1]
    tensors = {"expanded": torch.ones(1).expand(3), "transposed": torch.rand(2, 3).T, "one": column[:1].clone()}
    torch.save(tensors | {"of one": column[1:]}, tmp_path / "x.pt")
    assert main(["load", "--verify", str(tmp_path / "x.pt")]) == 0
    assert "4 tensors, every byte as torch.load read it" in capsys.readouterr().out


def test_verify_without_safetensors_says_so_before_loading(
    checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "safetensors":
            raise ImportError(name)
        return real_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(weightlift, "fast_load", lambda *_, **__: pytest.fail("loaded first"))
    assert main(["load", "--verify", str(checkpoint)]) == 2
    assert "pip install safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "load"])
def test_a_bad_checkpoint_is_one_line_and_code_1(tmp_path: Path, capsys: Output, command: str) -> None:
    bad = tmp_path / "model.safetensors"
    bad.write_bytes(b"<!DOCTYPE html><html></html>")
    assert main([command, str(bad)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("weightlift: error: ")
    assert captured.err.count("\n") == 1
    assert str(bad) in captured.err


def test_a_bad_checkpoint_as_json(tmp_path: Path, capsys: Output) -> None:
    missing = tmp_path / "nowhere"
    assert main(["inspect", "--json", str(missing)]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    error = json.loads(captured.out)["error"]
    assert error["type"] == "CheckpointNotFoundError"
    assert str(missing) in error["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["inspect"],
        ["load", "x", "--strategy", "psychic"],
        ["load", "x", "--device", "abacus"],
        ["verify", "x", "--manifest", "a", "--write-manifest", "b"],
        ["verify", "x", "--algorithm", "md5"],
        ["inspect", "x", "--subfolder", "../y"],
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments: list[str], capsys: Output) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("weightlift: error: ")
    assert captured.err.count("\n") == 1


def test_a_bad_variable_is_wrong_usage(checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLIFT_QUEUE_DEPTH", "deep")
    assert main(["load", "--json", str(checkpoint)]) == 2
    assert "WEIGHTLIFT_QUEUE_DEPTH" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_help_documents_the_exit_codes(capsys: Output) -> None:
    for arguments in (["--help"], ["load", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert "exit codes:" in capsys.readouterr().out


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weightlift", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_runs_as_a_module(checkpoint: Path) -> None:
    with _start("inspect", str(checkpoint)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "4 tensors" in out


@pytest.mark.parametrize("command", ["inspect", "load"])
def test_a_bad_log_variable_is_one_line_and_code_2(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("WEIGHTLIFT_LOG_TO_STDERR", "loud")
    with _start(command, str(checkpoint)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "weightlift: error: WEIGHTLIFT_LOG_TO_STDERR is 'loud'; accepted is 0 or 1\n"


def test_a_closed_pipe_ends_quietly(tmp_path: Path, write_checkpoint: Any) -> None:
    # More output than a pipe holds, so that the write meets the closed end.
    folder = write_checkpoint(tmp_path, {f"layer.{i}.{'x' * 60}": torch.zeros(1) for i in range(2000)})
    with _start("inspect", "--tensors", str(folder)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_ctrl_c_ends_with_130(capsys: Output, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setattr(weightlift, "fast_load", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert main(["load", str(checkpoint)]) == 130
    assert capsys.readouterr().err == "weightlift: interrupted\n"
