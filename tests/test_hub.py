"""Checkpoints on a hub, against a server on loopback: which files are fetched, and what is told where it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import hostile
import pytest
from hub_server import COMMIT, HubServer

import weightlift
from weightlift.checkpoint import CheckpointSource, locate
from weightlift.errors import CheckpointError, CheckpointNotFoundError, CheckpointReadError
from weightlift.hub import download

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def hub(cache, monkeypatch):
    """A hub that `huggingface_hub` talks to; it has read its environment long ago."""
    from huggingface_hub import constants

    with HubServer().running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield server


@pytest.fixture
def go_offline(monkeypatch):
    return lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def file_of(tmp_path, *names) -> bytes:
    return hostile.write_tensors(tmp_path / "made.safetensors", *names).read_bytes()


def sharded(tmp_path) -> dict[str, bytes]:
    """Three shards with an index, and beside them what must not be fetched."""
    files = {f"model-{i}.safetensors": file_of(tmp_path, f"layers.{i}.w") for i in range(3)}
    index = hostile.write_index(tmp_path / "index.json", {f"layers.{i}.w": f"model-{i}.safetensors" for i in range(3)})
    return files | {
        "model.safetensors.index.json": index.read_bytes(),
        "consolidated.safetensors": b"x",
        "pytorch_model.bin": b"x",
        "original/consolidated.00.pth": b"x",
        "original/model.safetensors": b"x",
        "README.md": b"x",
        ".gitattributes": b"x",
        "._model.safetensors": b"x",
    }


def refusal(source) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        locate(source)
    return caught.value


# ---- which files are fetched


def test_only_the_index_and_its_shards_are_fetched(hub, tmp_path):
    hub.repositories["org/name"] = sharded(tmp_path)
    files = locate("org/name")
    assert list(files.tensors) == [f"layers.{i}.w" for i in range(3)]
    assert sorted(hub.fetched) == [*(f"model-{i}.safetensors" for i in range(3)), "model.safetensors.index.json"]
    assert weightlift.load_file("org/name").keys() == files.tensors.keys()


def test_what_is_in_the_cache_is_not_fetched_again(hub, tmp_path, cache):
    hub.repositories["org/name"] = sharded(tmp_path)
    folder = download("org/name")
    assert Path(folder) == cache / "models--org--name" / "snapshots" / COMMIT
    hub.fetched.clear()
    assert download("org/name") == folder
    locate("org/name")
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("names", "load_format", "expected"),
    [
        (["model.safetensors", "pytorch_model.bin", "x.pt"], "auto", ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin", "x.pt"], "pt", ["x.pt"]),
        (["pytorch_model.bin", "optimizer.bin", "training_args.bin"], "auto", ["pytorch_model.bin"]),
        (["consolidated.safetensors", "model.safetensors"], "auto", ["model.safetensors"]),
        (["consolidated.safetensors", "model.safetensors"], "mistral", ["consolidated.safetensors"]),
        (["a.safetensors", "original/b.safetensors"], "auto", ["a.safetensors"]),
        (["a[1].safetensors", "a1.safetensors.md"], "auto", ["a[1].safetensors"]),
    ],
)
def test_files_are_chosen_as_in_a_local_folder(names, load_format, expected, hub):
    hub.repositories["org/name"] = dict.fromkeys(names, b"x")
    folder = download(CheckpointSource("org/name", load_format=load_format))
    assert sorted(os.listdir(folder)) == hub.fetched == expected


def test_patterns_and_subfolders_are_respected(hub, tmp_path, cache):
    hub.repositories["org/name"] = {
        "vae/a.safetensors": file_of(tmp_path, "a"),
        "vae/b.safetensors": file_of(tmp_path, "b"),
        "a.safetensors": b"x",
    }
    source = CheckpointSource("org/name", subfolder="vae", allow_patterns=["a.*"], prefix="vae.", revision="main")
    files = locate(source)
    assert list(files.tensors) == ["vae.a"]
    assert Path(files.shards[0].path) == cache / "models--org--name" / "snapshots" / COMMIT / "vae" / "a.safetensors"
    assert hub.fetched == ["vae/a.safetensors"]
    source = CheckpointSource("org/name", allow_patterns=["v*/b.*"], download_dir=str(tmp_path / "elsewhere"))
    assert download(source).startswith(str(tmp_path / "elsewhere"))
    assert hub.fetched == ["vae/a.safetensors", "vae/b.safetensors"]


@pytest.mark.parametrize("subfolder", ["vae/", "./vae", "vae//."])
def test_subfolder_may_be_written_as_here(hub, tmp_path, subfolder):
    hub.repositories["org/name"] = {"vae/a.safetensors": file_of(tmp_path, "a"), "b.safetensors": b"x"}
    assert list(locate(CheckpointSource("org/name", subfolder=subfolder)).tensors) == ["a"]


def test_shard_that_no_tensor_is_wanted_of_is_not_fetched(hub, tmp_path):
    hub.repositories["org/name"] = sharded(tmp_path)
    files = locate("org/name", filters=[lambda name: None if "1" in name else "another stage's"])
    assert list(files.tensors) == ["layers.1.w"]
    assert files.skipped == {"layers.0.w": "another stage's", "layers.2.w": "another stage's"}
    assert hub.fetched == ["model.safetensors.index.json", "model-1.safetensors"]
    assert len(locate("org/name").tensors) == 3


def test_folder_here_is_preferred_to_a_repository(hub, tmp_path, monkeypatch):
    hub.repositories["org/name"] = sharded(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    hostile.write_tensors(tmp_path / "org" / "name" / "model.safetensors", "here")
    monkeypatch.chdir(tmp_path)
    assert list(locate("org/name").tensors) == ["here"]
    assert download("org/name") == "org/name"
    assert hub.num_requests == 0


@pytest.mark.parametrize(
    "path",
    [
        "./org/name",
        "../name",
        "~/name",
        "/org/name",
        "org/name/more",
        "name",
        "org/",
        "-org/name",
        "org/model.safetensors",
        "org/model.safetensors.index.json",
        "org/q4.gguf",
        "or g/name",
        "org/na\0me",
        Path("org/name"),
    ],
)
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(path, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal(path)
    assert isinstance(error, CheckpointNotFoundError)
    assert hub.num_requests == 0


# ---- without a connection


@pytest.fixture
def forget_listing(cache, tmp_path):
    """Gives a source in a copy of the cache that knows no list of files, as if they had been fetched one by one."""

    def copy(id: str) -> CheckpointSource:
        plain = tmp_path / "plain"
        shutil.copytree(cache, plain, symlinks=True)
        shutil.rmtree(plain / f"models--{id.replace('/', '--')}" / "trees")
        return CheckpointSource(id, download_dir=str(plain))

    return copy


def test_cached_checkpoint_is_found_offline(hub, tmp_path, go_offline, forget_listing):
    hub.repositories["org/name"] = sharded(tmp_path)
    locate("org/name")
    num_requests = hub.num_requests
    go_offline()
    assert len(locate("org/name").tensors) == 3
    assert len(locate(forget_listing("org/name")).tensors) == 3
    assert hub.num_requests == num_requests


def test_half_of_a_checkpoint_in_the_cache_is_refused_offline(hub, tmp_path, go_offline, forget_listing):
    hub.repositories["org/name"] = sharded(tmp_path)
    hub.repositories["org/no-index"] = {f"model-{i}.safetensors": file_of(tmp_path, f"w{i}") for i in range(2)}
    locate("org/name", filters=[lambda name: None if "1" in name else "another stage's"])
    (Path(download("org/no-index")) / "model-1.safetensors").unlink()
    go_offline()
    for id in ("org/name", "org/no-index"):
        error = refusal(id)
        assert isinstance(error, CheckpointNotFoundError)
        assert "cannot be reached for what its cache lacks" in str(error)
        assert "model-" in str(error)
    assert "2 of the 3 shards that it names are missing" in str(refusal(forget_listing("org/name")))


def test_hub_that_is_down_leaves_the_cache(hub, tmp_path, caplog):
    hub.repositories["org/name"] = sharded(tmp_path)
    locate("org/name")
    hub.broken = True
    with caplog.at_level("WARNING", logger="weightlift"):
        assert len(locate("org/name").tensors) == 3
    assert "org/name: the hub cannot be reached, taking what is in its cache" in caplog.text
    error = refusal("org/other")
    assert isinstance(error, CheckpointNotFoundError)
    assert "500 Internal Server Error" in str(error)
    assert "\n" not in str(error)


def test_connection_that_is_lost_on_the_way_is_a_read_error(hub):
    hub.repositories["org/name"] = {"model.safetensors": None}
    error = refusal("org/name")
    assert isinstance(error, CheckpointReadError)
    assert "did not give it" in str(error)


def test_mistyped_path_without_a_connection_is_told_at_once(hub, go_offline):
    go_offline()
    error = refusal("models/lama")
    assert isinstance(error, CheckpointNotFoundError)
    assert str(error).startswith("models/lama: no such file or folder here, and the hub at http://127.0.0.1:")


# ---- errors


def test_neither_a_folder_nor_a_repository_is_told_as_both(hub):
    error = refusal("models/lama")
    assert isinstance(error, CheckpointNotFoundError)
    found = f"neither a file or folder here nor a repository of the hub at {hub.url}"
    assert str(error).startswith(f"models/lama: {found}; check the path, or log in with")


def test_id_that_the_hub_would_not_allow_is_not_found(hub):
    assert "neither a file or folder here" in str(refusal("org/a--b"))
    assert hub.num_requests == 0


def test_unknown_revision_and_folder_are_named(hub, tmp_path):
    hub.repositories["org/name"] = sharded(tmp_path)
    assert "the repository has no revision 'v2'" in str(refusal(CheckpointSource("org/name", revision="v2")))
    assert "the repository has no folder 'vae'" in str(refusal(CheckpointSource("org/name", subfolder="vae")))


def test_gated_repository_says_where_to_ask(hub):
    hub.gated.add("org/name")
    error = refusal("org/name")
    assert isinstance(error, CheckpointReadError)
    assert f"ask for it at the hub at {hub.url}, then log in with `hf auth login`" in str(error)


def test_repository_without_weights_lists_what_it_has(hub):
    hub.repositories["org/name"] = {"README.md": b"x", "onnx/model.onnx": b"x", "q4.gguf": b"x"}
    error = refusal("org/name")
    assert isinstance(error, CheckpointNotFoundError)
    assert str(error).startswith("org/name: expected *.safetensors, *.bin or *.pt, found q4.gguf; GGUF is not read")
    hub.repositories["org/name"].pop("q4.gguf")
    assert "found README.md, onnx/; pass the folder" in str(refusal("org/name"))
    assert hub.fetched == []


def test_shard_that_the_repository_lacks_is_named(hub, tmp_path):
    hub.repositories["org/name"] = sharded(tmp_path)
    del hub.repositories["org/name"]["model-2.safetensors"]
    error = refusal("org/name")
    assert error.reason == "ShardsMissing"
    assert "model-2.safetensors" in str(error)


def test_index_that_leads_out_of_the_repository_is_refused(hub, tmp_path):
    index = hostile.write_index(tmp_path / "index.json", {"w": "../../x.safetensors"})
    hub.repositories["org/name"] = {"model.safetensors.index.json": index.read_bytes()}
    assert refusal("org/name").reason == "UnsafePath"


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = refusal("models/lama")
    assert isinstance(error, CheckpointNotFoundError)
    assert "no such file or folder; to look for it on the Hugging Face hub, `pip install huggingface_hub`" in str(error)


def test_list_of_files_is_not_downloaded():
    with pytest.raises(TypeError, match="expected one path or the id of a repository, found list"):
        download(CheckpointSource(["a.safetensors"]))


# ---- settings of the environment


@pytest.mark.slow
def test_settings_of_huggingface_hub_count(tmp_path):
    script = "import weightlift.checkpoint as c, sys; print(*c.locate('org/name').tensors)"
    with HubServer().running() as server:
        server.repositories["org/name"] = sharded(tmp_path)
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            environment.pop(name, None)

        def names(**settings):
            command = [sys.executable, "-c", script]
            return subprocess.run(command, env=environment | settings, capture_output=True, text=True, timeout=120)

        assert names().stdout.split() == [f"layers.{i}.w" for i in range(3)]
        assert (tmp_path / "home" / "hub" / "models--org--name").is_dir()
        num_requests = server.num_requests
        assert names(HF_HUB_OFFLINE="1").stdout.split() == [f"layers.{i}.w" for i in range(3)]
        assert server.num_requests == num_requests


class _FakeModelScope:
    """Has the two functions of `modelscope` that are used, over a dictionary of files."""

    def __init__(self, files: dict[str, bytes], folder: Path) -> None:
        self.files = files
        self.folder = folder
        self.fetched: list[str] = []
        self.is_down = False

    def get_model_files(self, id, revision=None, recursive=False):
        if self.is_down:
            raise ConnectionError("no route")
        if id != "org/name":
            raise RuntimeError(f"404 Client Error: {id}")
        assert recursive
        return [{"Path": path, "Type": "blob"} for path in self.files] + [{"Path": "original", "Type": "tree"}]

    def snapshot_download(self, id, revision=None, cache_dir=None, allow_patterns=None, local_files_only=False):
        if local_files_only and not self.folder.exists():
            raise ValueError("not in the cache")
        if not local_files_only:
            for path in allow_patterns:
                self.fetched.append(path)
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / path).write_bytes(self.files[path])
        return str(self.folder)


@pytest.fixture
def modelscope(tmp_path, monkeypatch):
    fake = _FakeModelScope(sharded(tmp_path), tmp_path / "modelscope")
    modules = {
        "modelscope": types.ModuleType("modelscope"),
        "modelscope.hub": types.ModuleType("modelscope.hub"),
        "modelscope.hub.api": types.SimpleNamespace(HubApi=lambda: fake),
        "modelscope.hub.snapshot_download": types.SimpleNamespace(snapshot_download=fake.snapshot_download),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.mark.parametrize("variable", ["WEIGHTLIFT_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE"])
def test_modelscope_is_asked_where_the_environment_wants_it(variable, modelscope, hub, monkeypatch):
    monkeypatch.setenv(variable, "True")
    assert len(locate("org/name").tensors) == 3
    assert modelscope.fetched[0] == "model.safetensors.index.json"
    assert sorted(set(modelscope.fetched)) == sorted(os.listdir(modelscope.folder))
    assert hub.num_requests == 0


def test_modelscope_that_is_down_leaves_its_cache(modelscope, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    locate("org/name")
    modelscope.is_down = True
    assert len(locate("org/name").tensors) == 3
    shutil.rmtree(modelscope.folder)
    assert "ModelScope did not give it: ConnectionError: no route" in str(refusal("org/name"))


def test_setting_of_weightlift_goes_before_that_of_vllm(modelscope, hub, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    monkeypatch.setenv("WEIGHTLIFT_USE_MODELSCOPE", "0")
    refusal("org/name")
    assert hub.num_requests > 0
    assert modelscope.fetched == []


def test_missing_modelscope_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", None)
    assert "VLLM_USE_MODELSCOPE asks, `pip install modelscope`" in str(refusal("org/name"))
