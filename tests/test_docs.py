"""Every example of the documentation runs, as its page has it and in the page's order; and what pages name is there.

A page's Python blocks share one namespace, its `sh` blocks one folder with them. weightlift's own commands run,
measurements on a small file. Of others (pip, vllm, make, ...) it is checked what can be: targets, modules, scripts. The
folder has what pages may rely on: `llama/`, a small Llama as transformers writes it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKPOINTS, NO_CHECKPOINTS, WriteCheckpoint
from doc_pages import ROOT, Block, Page, all_pages
from quant_models import tensors_of

from examples import house_engine
from weightlift import cli
from weightlift.config import OPTIONS, environment_variable
from weightlift.model.quantization import base

PAGES = all_pages()

# Commands of others: pip, make and python are looked into below; these can't be run here.
FOREIGN_COMMANDS = {".", "apt-get", "bash", "docker", "kubectl", "lfs", "mount", "sglang", "sysctl", "ulimit", "vllm"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    folder = tmp_path_factory.mktemp("docs") / "llama"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


# ---- examples run


@pytest.mark.parametrize("page", [page for page in PAGES.values() if page.blocks], ids=lambda page: page.name)
def test_examples_run(
    page: Page, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    for path in llama.iterdir():
        (tmp_path / "llama" / path.name).write_bytes(path.read_bytes())
    namespace: dict[str, Any] = {}
    if page.name == "docs/quantization.md":
        namespace = request.getfixturevalue("quantised")
    for block in page.blocks:
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, page.path, "exec")
            exec(code, namespace)
        elif block.language == "sh":
            run_commands(page, block)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in ("", "yaml"), f"{page.name}:{block.line}: nothing checks {block.language}"


def run_commands(page: Page, block: Block) -> None:
    for words in block.commands():
        where = f"{page.name}:{block.line}: {' '.join(words)}"
        with pytest.MonkeyPatch.context() as patch:
            while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                variable, value = words.pop(0).split("=", 1)
                patch.setenv(variable, value)
            command, *arguments = words
            if command == "weightlift":
                if arguments[0] == "bench":
                    arguments += ["--size", "16MiB", "--rounds", "1"]
                assert cli.main(arguments) == 0, where
            elif command == "make":
                targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert arguments[0] in targets, where
            elif command in ("python", "python3", "torchrun") and "-m" in arguments:
                assert importlib.util.find_spec(arguments[arguments.index("-m") + 1]) is not None, where
            elif command in ("python", "bash"):
                assert (ROOT / arguments[0]).is_file(), where
            elif command == "pip":
                assert arguments[0] == "install", where
            else:
                assert command in FOREIGN_COMMANDS, where


@pytest.fixture
def quantised(tmp_path: Path, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What docs/quantization.md speaks of: real checkpoints, and one of a kind of its own."""
    if not CHECKPOINTS.is_dir():
        pytest.skip(NO_CHECKPOINTS)
    monkeypatch.setattr(base, "_configs", dict(base._configs))  # its own kind is forgotten afterwards
    source = CHECKPOINTS / "llama128"
    scaled = {}
    for name, tensor in tensors_of(source).items():
        scaled[name] = tensor
        if "_proj." in name:
            scaled[name] = (tensor * 8).half()
            scaled[f"{name}_scale"] = torch.tensor(1 / 8)
    folder = write_checkpoint(tmp_path / "scaled", scaled)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "scaled"}}
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "fp8_checkpoint": CHECKPOINTS / "fp8",
        "hf_checkpoint": source,
        "image": tmp_path / "image",
        "scaled_checkpoint": folder,
    }


def test_the_engine_loads_the_same_by_hand_and_by_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    house_engine.main()
    assert capsys.readouterr().out == "equal; 12.0 of 24.0 MiB were read\n"


# ---- what pages name is there


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_links_lead_somewhere(page: Page) -> None:
    broken = []
    for link in page.links:
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        other = PAGES.get(str(path.relative_to(ROOT)))
        if not path.exists() or (anchor and (other is None or anchor not in other.anchors)):
            broken.append(link)
    assert not broken


def test_index_has_all_pages() -> None:
    index = PAGES["docs/README.md"]
    linked = {str((index.path.parent / link).resolve().relative_to(ROOT)) for link in index.links}
    assert {name for name in PAGES if name.startswith("docs/")} - {index.name} <= linked


def test_the_table_of_settings_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_table.py"))
    table = PAGES["docs/settings.md"].text.split(script["BEGIN"])[1].split(script["END"])[0]
    assert table == script["table"](), "run: python scripts/config_table.py --write"


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_commands_have_the_options_that_pages_name(page: Page) -> None:
    [commands] = [a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    mentions = [code for code in page.inline_code if code.startswith("weightlift ")]
    shell = [block for block in page.blocks if block.language in ("", "yaml")]  # those of `sh` run
    mentions += [line.split("#")[0] for block in shell for line in re.findall("weightlift .*", block.text)]
    for mention in mentions:
        words = mention.split()
        # `weightlift` may also be the name of the package: pip install weightlift
        if len(words) < 2 or not re.fullmatch(r"[a-z][a-z-]+", words[1]):
            continue
        assert words[1] in commands.choices, mention
        known = {option for action in commands.choices[words[1]]._actions for option in action.option_strings}
        assert {word.partition("=")[0] for word in words if re.match(r"--\w", word)} <= known, mention


def source_text() -> str:
    """All that is in the repository but the pages."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = []
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in (".py", ".h", ".cpp", ".c", ".toml", ".txt", ".sh", "") and path.is_file():
            texts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join([*texts, listed.stdout])


# Names that belong to others: kernels, file systems, containers, other libraries.
FOREIGN_NAMES = {"SGLANG_PLUGINS", "VLLM_PLUGINS", "manylinux_2_35", "max_read", "read_ahead_kb"}


@pytest.fixture(scope="module")
def words_of_sources() -> set[str]:
    return set(re.findall(r"\w+", source_text()))


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_names_in_code_exist(page: Page, words_of_sources: set[str]) -> None:
    """Every word of inline code with an underscore: fields, functions, variables, files, constants."""
    named = {word for code in page.inline_code for word in re.findall(r"\w+", code) if "_" in word.strip("_")}
    assert named - words_of_sources - FOREIGN_NAMES == set()


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_attributes_of_the_package_exist(page: Page) -> None:
    for code in page.inline_code:
        for dotted in re.findall(r"\bweightlift((?:\.\w+)+)", code):
            found: Any = importlib.import_module("weightlift")
            for name in dotted.strip(".").split("."):
                if not hasattr(found, name):
                    found = importlib.import_module(f"{found.__name__}.{name}")
                else:
                    found = getattr(found, name)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_files_that_pages_name_exist(page: Page) -> None:
    """Paths with a folder in them: from the root, from the page, or in one of the places where sources lie."""
    roots = [ROOT, page.path.parent, ROOT / "python" / "weightlift", ROOT / "csrc"]
    texts = [*page.inline_code, *(block.text for block in page.blocks if not block.language)]
    paths = {
        path for text in texts for path in re.findall(r"(?<![\w/*.])(?:[\w.]+/)+[\w.]+\.(?:py|h|cpp|md|sh)\b", text)
    }
    missing = {path for path in paths if not any((root / path).exists() for root in roots)}
    assert not missing


def test_every_setting_has_its_row() -> None:
    text = PAGES["docs/settings.md"].text
    assert all(f"| `{name}` | `{environment_variable(name)}` |" in text for name in OPTIONS)
