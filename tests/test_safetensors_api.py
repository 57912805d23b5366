"""The drop-in: the same calls to safetensors and to weightlift give the same values, or errors of the same type."""

from __future__ import annotations

import collections
import copy
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile
import numpy
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

import weightlift
from weightlift.engines import safetensors as dropin

THEIRS = SimpleNamespace(
    safe_open=safetensors.safe_open, load_model=safetensors.torch.load_model, load=safetensors.torch.load
)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.int64,
    torch.uint64,
    torch.float64,
    torch.complex64,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return values[..., 0] > 127
    return values.reshape(-1).view(dtype).view(shape)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives: values as bytes, or the exception."""
    try:
        return comparable(call())
    except Exception as error:
        return error


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items()}
    if isinstance(value, torch.Tensor):
        flat = value.clone(memory_format=torch.contiguous_format).reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return "torch", value.dtype, tuple(value.shape), value.device, content
    if isinstance(value, numpy.ndarray):
        return "numpy", value.dtype, value.shape, value.tobytes()
    return value


def assert_same(call: Callable[[Any], Any], or_raises: tuple[type[Exception], ...] = ()) -> None:
    """`call` is given one module, then the other. `or_raises`: what weightlift's error may be too."""
    theirs = outcome(lambda: call(THEIRS))
    ours = outcome(lambda: call(dropin))
    if isinstance(theirs, Exception):
        accepted = (type(theirs), *or_raises)
        assert isinstance(ours, accepted), f"safetensors raises {theirs!r}, weightlift gives {ours!r}"
    else:
        assert not isinstance(ours, Exception), f"safetensors gives {theirs!r}, weightlift raises {ours!r}"
        assert ours == theirs


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every dtype, small and large (more than 64 KiB), with a scalar and an empty tensor."""
    path = tmp_path_factory.mktemp("api") / "model.safetensors"
    tensors = {str(dtype).removeprefix("torch."): random_tensor((2, 3, 4), dtype) for dtype in DTYPES}
    tensors |= {f"layer.{i}": random_tensor((300, 200), torch.bfloat16, seed=i) for i in range(20)}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "vector": torch.arange(70_000)}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


# ---- opening


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy"])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_names_and_metadata_are_those_of_safetensors(file, framework, backend):
    for method in ("keys", "offset_keys", "metadata"):
        assert_same(lambda api: getattr(api.safe_open(file, framework, backend=backend), method)())  # noqa: B023


@pytest.mark.parametrize("name", ["safe_open", "load_model", "load"])
def test_signatures_are_those_of_safetensors(name):
    ours, theirs = (inspect.signature(getattr(api, name)).parameters.values() for api in (dropin, THEIRS))
    assert [(p.name, p.kind, p.default is p.empty) for p in ours] == [
        (p.name, p.kind, p.default is p.empty) for p in theirs
    ]


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_empty_metadata_is_not_missing_metadata(tmp_path, metadata):
    hostile.write(tmp_path / "f", {} if metadata is None else {"__metadata__": metadata})
    assert_same(lambda api: api.safe_open(tmp_path / "f", "pt").metadata())
    assert dropin.safe_open(tmp_path / "f", "pt").metadata() == metadata


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((), {}),
        (("{file}",), {}),
        (("{file}", "pt", "cpu", "mmap"), {}),
        (("{file}", "pt"), {"no_such": 1}),
        (("{file}", "PT"), {}),
        (("{file}", ""), {}),
        (("{file}", None), {}),
        (("{file}", 1), {}),
        (("{file}", "no_such"), {"device": "no_such"}),
        (("{file}", "pt"), {"backend": "no_such"}),
        (("{file}", "pt"), {"backend": None}),
        (("{file}.gone", "pt"), {}),
        (("{file}.gone", "no_such"), {}),
        (("{file}.gone", "pt", "no_such"), {}),
        (("{file}.gone", "np", "cuda"), {}),
        (("", "pt"), {}),
        (("\0", "pt"), {}),
        ((1, "pt"), {}),
        ((None, "pt"), {}),
        ((b"bytes", "pt"), {}),
        (("/dev/null", "pt"), {}),
        (("/", "pt"), {}),
        ((), {"filename": "{file}", "framework": "np", "device": "cpu", "backend": "pread"}),
    ],
)
def test_arguments_are_taken_and_refused_as_by_safetensors(file, arguments, keywords):
    def filled(value: Any) -> Any:
        return value.replace("{file}", str(file)) if isinstance(value, str) else value

    arguments = [filled(value) for value in arguments]
    keywords = {name: filled(value) for name, value in keywords.items()}
    assert_same(lambda api: api.safe_open(*arguments, **keywords).keys())


DEVICES = [
    None,
    "cpu",
    "cpu:0",
    "meta",
    "CPU",
    "",
    "0",
    "disk",
    "auto",
    "cuda0",
    "rocm",
    -1,
    1.5,
    2**64,
    2**70,
    b"cpu",
    {},
]
DEVICES += [torch.device("cpu"), torch.device("meta"), torch.device("cuda:0")]
DEVICES += [
    "cuda:",
    "cuda:a",
    "cuda:-1",
    "cuda: 1",
    "cuda:1_0",
    "cuda:0:1",
    "cuda:99999999999999999999",
    "xpu:a",
    "cuda:\uff11",  # a digit, but not an ASCII one
]
DEVICES += ["mps:1", "mps:", "mps:a"]
OPENED_DEVICES = [
    "cuda",
    "cuda:0",
    "cuda:1",
    "cuda:+1",
    "cuda:01",
    "mps",
    "mps:0",
    "xpu",
    "npu:3",
    "hpu",
    "mlu",
    "musa",
    "xla",
]
OPENED_DEVICES += [0, 1, True, numpy.int64(2)]


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_devices_are_refused_as_by_safetensors(file, device):
    for framework in ("pt", "np"):
        assert_same(lambda api: api.safe_open(file, framework, device).get_tensor("float32"))  # noqa: B023


@pytest.mark.parametrize("device", OPENED_DEVICES, ids=repr)
def test_files_open_for_devices_that_this_machine_may_lack(file, device):
    for framework in ("pt", "np"):
        assert_same(lambda api: api.safe_open(file, framework, device).keys())  # noqa: B023


def test_tensors_go_to_the_device(file):
    # Stands for an accelerator that every machine has.
    handle = dropin.safe_open(file, "pt")
    handle._device = "meta"
    assert handle.get_tensor("layer.0").device.type == "meta"
    assert handle.get_slice("layer.0")[:1].device.type == "meta"
    assert {tensor.device.type for tensor in handle.get_tensors().values()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_tensors_go_to_cuda(file, device):
    assert_same(lambda api: api.safe_open(file, "pt", device).get_tensor("layer.0").cpu())
    with dropin.safe_open(file, "pt", device) as handle:
        assert handle.get_slice("layer.0")[3:5].device == torch.device("cuda:0")
        assert handle.get_tensors()["layer.1"].device == torch.device("cuda:0")


@pytest.mark.parametrize("case", [*hostile.REFUSED, *hostile.STRICTER])
def test_malformed_files_are_safetensors_errors(tmp_path, case):
    content = (hostile.REFUSED | hostile.STRICTER)[case][0]
    (tmp_path / "f").write_bytes(content)
    for call in (
        lambda: dropin.safe_open(tmp_path / "f", "pt"),
        lambda: dropin.safe_open(tmp_path / "f", "np"),
        lambda: dropin.load_model(torch.nn.Linear(1, 1), tmp_path / "f"),
        lambda: dropin.load(content),
        lambda: weightlift.load_file(tmp_path / "f"),
    ):
        with pytest.raises(safetensors.SafetensorError) as caught:
            call()
        assert isinstance(caught.value, weightlift.CheckpointError)
        assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)


@pytest.mark.parametrize("case", hostile.ACCEPTED)
def test_odd_but_valid_files_read_as_by_safetensors(tmp_path, case):
    (tmp_path / "f").write_bytes(hostile.ACCEPTED[case])
    assert_same(lambda api: api.safe_open(tmp_path / "f", "pt").get_tensors())
    if "F4" not in case and "F8_E8M0" not in case:
        assert_same(lambda api: api.load(hostile.ACCEPTED[case]))


def test_other_frameworks_go_to_safetensors(file):
    for framework in ("tf", "tensorflow", "jax", "flax", "mlx"):
        handle = dropin.safe_open(file, framework)
        assert type(handle) is safetensors.safe_open
        assert isinstance(handle, dropin.safe_open)


def test_a_file_without_read_permission_is_an_os_error(file, tmp_path):
    (tmp_path / "f").write_bytes(file.read_bytes())
    (tmp_path / "f").chmod(0)
    if os.access(tmp_path / "f", os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(PermissionError):
        dropin.safe_open(tmp_path / "f", "pt")


# ---- whole tensors


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_every_tensor_is_that_of_safetensors(file, framework):
    theirs = safetensors.safe_open(file, framework)
    with dropin.safe_open(file, framework) as ours:
        for name in [*ours.keys(), *ours.offset_keys(), *reversed(ours.offset_keys())]:
            assert_same(lambda api: {THEIRS: theirs, dropin: ours}[api].get_tensor(name))  # noqa: B023


def test_all_tensors_at_once_are_those_of_safetensors(file, tmp_path):
    assert_same(lambda api: api.safe_open(file, "pt").get_tensors())
    assert list(dropin.safe_open(file, "pt").get_tensors()) == safetensors.safe_open(file, "pt").offset_keys()
    assert_same(lambda api: api.safe_open(file, "np").get_tensors())  # it holds what numpy has not
    safetensors.numpy.save_file({"a": numpy.arange(40_000), "b": numpy.array(2.0)}, tmp_path / "np")
    assert_same(lambda api: api.safe_open(tmp_path / "np", "np").get_tensors())


@given(
    shape=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    framework=st.sampled_from(["pt", "np"]),
)
@settings(deadline=None, max_examples=60)
def test_any_shape_and_dtype_reads_as_by_safetensors(tmp_path_factory, shape, dtype, framework):
    path = tmp_path_factory.mktemp("shape") / "f"
    safetensors.torch.save_file({"w": random_tensor(shape, dtype), "x": torch.ones(3)}, path)
    assert_same(lambda api: api.safe_open(path, framework).get_tensor("w"))
    assert_same(lambda api: api.safe_open(path, framework).get_slice("w").get_shape())
    assert_same(lambda api: api.safe_open(path, framework).get_slice("w").get_dtype())
    assert_same(lambda api: api.load(path.read_bytes()) if dtype is not torch.float8_e8m0fnu else None)


@pytest.mark.parametrize("name", ["layer.0", "float32", "vector"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_tensors_are_owned_by_the_caller(file, framework, name):
    if framework == "np" and name == "layer.0":
        pytest.skip("numpy has no bfloat16")
    with dropin.safe_open(file, framework) as handle:
        first = handle.get_tensor(name)
        expected = comparable(first)
        first[...] = 0
        assert comparable(handle.get_tensor(name)) == expected
        assert comparable(handle.get_slice(name)[...]) == expected
        if framework == "pt":
            assert first.untyped_storage().nbytes() == first.nbytes


@pytest.mark.parametrize("name", ["gone", "", 1, None, b"scalar"])
def test_names_are_refused_as_by_safetensors(file, name):
    assert_same(lambda api: api.safe_open(file, "pt").get_tensor(name))
    assert_same(lambda api: api.safe_open(file, "np").get_slice(name))


def test_names_may_be_given_by_keyword(file):
    assert_same(lambda api: api.safe_open(file, "pt").get_tensor(name="scalar"))
    assert_same(lambda api: api.safe_open(file, "pt").get_slice(name="scalar").get_shape())


def test_f4_is_read_and_sliced_in_the_shape_of_torch(tmp_path):
    values = torch.arange(8, dtype=torch.uint8).view(2, 4)
    safetensors.torch.save_file({"w": values.view(torch.float4_e2m1fn_x2)}, tmp_path / "f")
    with dropin.safe_open(tmp_path / "f", "pt") as handle:
        part = handle.get_slice("w")
        assert (part.get_dtype(), part.get_shape()) == ("F4", [2, 8])  # as safetensors says
        assert torch.equal(part[1:].view(torch.uint8), values[1:])
        assert torch.equal(handle.get_tensor("w").view(torch.uint8), values)
    assert torch.equal(dropin.load((tmp_path / "f").read_bytes())["w"].view(torch.uint8), values)


# ---- slices

_BIG = [2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**70, -(2**70)]
_integers = st.integers(-6, 6) | st.sampled_from([*_BIG, True, False, numpy.int64(1), numpy.array(1), torch.tensor(0)])
_bounds = st.none() | st.integers(-6, 6) | st.sampled_from([2**40, -(2**40), 2**70, True, numpy.int64(1), 1.0, "a"])
_slices = st.builds(slice, _bounds, _bounds, st.sampled_from([None, None, 1, 1, 2, 3, 0, -1, 1.5]))
_others = st.sampled_from([None, 1.0, "a", b"", [], [0], [0, 1], [[0], [1]], [True, False], (), {}])
_items = st.one_of(_integers, _slices, _slices, st.just(...), _others)
_indices = _items | st.lists(_items, max_size=4).map(tuple)


def _is_empty(index: Any) -> bool:
    """Whether there is an empty slice in it, of which safetensors refuses some and not others."""
    return any(
        isinstance(item, slice)
        and type(item.start) in (int, bool, numpy.int64)
        and type(item.stop) in (int, bool, numpy.int64, type(None))
        and (item.stop is None or 0 <= item.stop <= item.start)
        for item in (index if isinstance(index, tuple) else [index])
    )


def _first_fault_of(index: Any) -> tuple[type[Exception], ...]:
    """Of several faults in one index, either may be told."""
    several = isinstance(index, tuple) and len(index) > 1
    return (safetensors.SafetensorError, OverflowError, TypeError) if several else ()


@given(index=_indices, name=st.sampled_from(["float32", "scalar", "uint8", "layer.3", "float8_e4m3fn", "empty"]))
@settings(deadline=None, max_examples=300)
def test_slices_for_torch_mean_what_they_mean_to_safetensors(file, index, name):
    assert_same(lambda api: api.safe_open(file, "pt").get_slice(name)[index])


@given(index=_indices, name=st.sampled_from(["float32", "scalar", "uint8", "int64", "vector"]))
@settings(deadline=None, max_examples=300)
def test_slices_for_numpy_mean_what_they_mean_to_safetensors(file, index, name):
    if not _is_empty(index):
        assert_same(lambda api: api.safe_open(file, "np").get_slice(name)[index], _first_fault_of(index))


@given(index=_indices, name=st.sampled_from(["float32", "scalar", "bfloat16", "layer.3"]))
@settings(deadline=None, max_examples=300)
def test_slices_of_the_pread_backend_mean_what_they_mean_to_safetensors(file, index, name):
    if not _is_empty(index):
        assert_same(
            lambda api: api.safe_open(file, "pt", backend="pread").get_slice(name)[index], _first_fault_of(index)
        )


def test_empty_slices_for_numpy_are_empty(file):
    with dropin.safe_open(file, "np") as handle:
        assert handle.get_slice("float32")[2:].shape == (0, 3, 4)
        assert handle.get_slice("float32")[:, 1:1].shape == (2, 0, 4)
        assert handle.get_slice("float32")[[]].shape == (0, 3, 4)
        assert handle.get_slice("empty")[...].shape == (0, 4)
        assert handle.get_slice("empty")[:, 1:3].shape == (0, 2)
        for outside in (slice(3, 3), slice(3, None), slice(2, 1)):
            with pytest.raises(safetensors.SafetensorError):
                handle.get_slice("float32")[outside]


def test_slices_can_be_iterated_over_as_those_of_safetensors(file):
    assert_same(lambda api: {str(i): row for i, row in enumerate(api.safe_open(file, "pt").get_slice("float32"))})


def test_a_slice_reads_what_is_asked_for_and_no_more(tmp_path, monkeypatch):
    safetensors.torch.save_file({"w": torch.arange(1 << 20).view(1024, 1024)}, tmp_path / "f")
    monkeypatch.setenv("WEIGHTLIFT_STRATEGY", "buffered")
    handle = dropin.safe_open(tmp_path / "f", "pt")
    assert torch.equal(handle.get_slice("w")[100:102], torch.arange(100 << 10, 102 << 10).view(2, 1024))
    assert handle._file.program._pipeline.stats()["bytes_read"] == 2 * 1024 * 8


# ---- a handle's life


def test_closed_handles_refuse_and_their_slices_go_on(file):
    def calls(api: Any) -> dict[str, Any]:
        with api.safe_open(file, "pt") as handle:
            part, large = handle.get_slice("float32"), handle.get_slice("layer.0")
        results: dict[str, Any] = {"small": part[1], "large": large[...]}
        for name in ("keys", "offset_keys", "metadata", "get_tensors", "get_tensor", "get_slice"):
            method = getattr(handle, name)
            arguments = ("scalar",) if name in ("get_tensor", "get_slice") else ()
            results[name] = isinstance(outcome(lambda: method(*arguments)), safetensors.SafetensorError)  # noqa: B023
        assert handle.__enter__() is handle
        assert handle.__exit__(None, None, None) is None
        return results

    assert_same(calls)


def test_closing_ends_threads_and_files(file):
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    with dropin.safe_open(file, "pt") as handle:
        handle.get_tensor("layer.0")
        assert len(os.listdir("/proc/self/task")) > before[2]
        part = handle.get_slice("layer.1")
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    part[...]
    del part, handle
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_few_of_many_open_files_keep_threads(file, tmp_path):
    before = len(os.listdir("/proc/self/task"))
    handles = []
    for i in range(12):
        (tmp_path / str(i)).write_bytes(file.read_bytes())
        handles.append(dropin.safe_open(tmp_path / str(i), "pt"))
    expected = safetensors.torch.load_file(file)
    first = handles[0].get_tensor("layer.0")
    of_one = len(os.listdir("/proc/self/task")) - before
    slices = [handle.get_slice("layer.1") for handle in handles]
    for part in slices * 2:
        assert comparable(part[...]) == comparable(expected["layer.1"])
    assert comparable(first) == comparable(expected["layer.0"])
    assert len(os.listdir("/proc/self/task")) - before <= 4 * of_one


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_each_of_many_open_files_is_read_whole_once(file, tmp_path, monkeypatch, strategy):
    monkeypatch.setenv("WEIGHTLIFT_STRATEGY", strategy)
    read: list[str] = []
    monkeypatch.setattr("weightlift.prefetch.read_into_cache", lambda path, **_: read.append(path))
    paths = [tmp_path / str(i) for i in range(12)]
    handles = []
    for path in paths:
        path.write_bytes(file.read_bytes())
        handles.append(dropin.safe_open(path, "pt"))
    for name in ("layer.0", "layer.1", "layer.2"):
        for handle in handles:
            handle.get_tensor(name)
    for handle in handles:
        handle.__exit__(None, None, None)
    assert sorted(read) == sorted(map(str, paths))


def test_many_files_may_be_read_by_many_threads(monkeypatch):
    """Each thread's file may be the one that another takes for idle just then."""

    class OpenFile:
        def release(self, *, wait: bool) -> None:
            pass

    files: list[Any] = [OpenFile() for _ in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    monkeypatch.setattr(dropin, "_active", collections.OrderedDict())
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda start: [dropin._make_active(files[(start + i) % 6]) for i in range(20000)], range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(dropin._active) <= dropin._MAX_ACTIVE


def test_handles_need_no_with(file):
    part = dropin.safe_open(file, "pt").get_slice("layer.0")
    assert_same(lambda api: part[...] if api is dropin else api.safe_open(file, "pt").get_slice("layer.0")[...])


def test_handles_are_neither_pickled_nor_copied(file):
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        assert_same(lambda api: action(api.safe_open(file, "pt")))  # noqa: B023
        assert_same(lambda api: action(api.safe_open(file, "pt").get_slice("scalar")))  # noqa: B023


def test_a_handle_may_be_shared_by_threads(file):
    expected = {name: comparable(tensor) for name, tensor in safetensors.torch.load_file(file).items()}
    handle = dropin.safe_open(file, "pt")
    slices = {name: handle.get_slice(name) for name in handle.offset_keys()}

    def read(job: tuple[int, str]) -> tuple[str, Any, Any]:
        number, name = job
        if number % 3 == 0:
            return name, comparable(handle.get_tensor(name)), None
        return name, comparable(slices[name][...]), comparable(slices[name][:1]) if slices[name].get_shape() else None

    with ThreadPoolExecutor(8) as pool:
        for name, whole, first in pool.map(read, enumerate(list(slices) * 6)):
            assert whole == expected[name]
            if first is not None:
                assert whole[4].startswith(first[4])


def test_closing_waits_for_readers_in_other_threads(file):
    for _ in range(20):
        handle = dropin.safe_open(file, "pt")
        slices = [handle.get_slice(f"layer.{i}") for i in range(20)]
        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(part.__getitem__, ...) for part in slices]
            handle.__exit__(None, None, None)
        assert all(result.result().shape == (300, 200) for result in results)


def test_a_forked_child_reads_through_its_parents_handle(file):
    code = """
        import os, sys, warnings
        from weightlift.engines.safetensors import safe_open
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        handle = safe_open(sys.argv[1], "pt")
        part = handle.get_slice("layer.3")
        for i in range(10):
            handle.get_tensor(f"layer.{i}")  # starts threads, and reads ahead
        child = os.fork()
        if child == 0:
            total = part[...].view(dtype=__import__("torch").uint8).sum() + handle.get_tensor("int8").sum()
            handle.__exit__(None, None, None)
            del handle, part
            print(int(total), flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(int(part[...].view(dtype=__import__("torch").uint8).sum() + handle.get_tensor("int8").sum()))
    """
    of_child, of_parent = run_python(code, file).split()
    assert of_child == of_parent


def test_a_handle_that_is_open_at_exit_is_no_trouble(file):
    code = """
        import sys
        from weightlift.engines.safetensors import safe_open
        handle = safe_open(sys.argv[1], "pt")
        for i in range(10):
            handle.get_tensor(f"layer.{i}")
    """
    assert run_python(code, file) == ""


def test_a_changed_file_is_an_error_and_no_wrong_value(file, tmp_path):
    (tmp_path / "f").write_bytes(file.read_bytes())
    handle = dropin.safe_open(tmp_path / "f", "pt")
    (tmp_path / "f").unlink()
    (tmp_path / "f").write_bytes(bytes(file.stat().st_size))
    for call in (lambda: handle.get_tensor("layer.0"), lambda: handle.get_slice("vector")[:9], handle.get_tensors):
        with pytest.raises(weightlift.CheckpointReadError, match="has changed since its header was read"):
            call()
    (tmp_path / "f").write_bytes(file.read_bytes()[: 1 << 20])
    with pytest.raises(weightlift.CheckpointReadError):
        handle.get_tensor("layer.0")


# ---- reading ahead


def test_tensors_asked_for_in_order_are_read_ahead(file):
    handle = dropin.safe_open(file, "pt")
    names = [name for name in handle.offset_keys() if name.startswith("layer")]
    for name in names[:12]:
        handle.get_tensor(name)
    ahead = set(handle._file._ahead)
    assert names[12] in ahead
    assert ahead <= set(names[12:])
    address = handle._file._ahead[names[12]][1].data_ptr()
    assert handle.get_tensor(names[12]).data_ptr() == address


def test_random_order_reads_nothing_ahead(tmp_path):
    tensors = {f"w.{i:03}": torch.full((200, 200), float(i)) for i in range(60)}
    safetensors.torch.save_file(tensors, tmp_path / "f")
    handle = dropin.safe_open(tmp_path / "f", "pt")
    for i in (0, 30, 10, 50, 20, 40):
        assert torch.equal(handle.get_tensor(f"w.{i:03}"), tensors[f"w.{i:03}"])
    assert not handle._file._ahead
    assert handle._file.program._pipeline.stats()["bytes_needed"] == 6 * 200 * 200 * 4


def test_memory_read_ahead_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(dropin, "_AHEAD_BYTES", 1 << 20)
    tensors = {f"w.{i:03}": torch.full((200, 200), float(i)) for i in range(120)}
    safetensors.torch.save_file(tensors, tmp_path / "f")
    handle = dropin.safe_open(tmp_path / "f", "pt")
    most = 0
    # Forward, then a jump and forward again: what was left behind has to go.
    for i in [*range(40), *range(80, 120), *range(40, 80), *range(120)]:
        assert torch.equal(handle.get_tensor(f"w.{i:03}"), tensors[f"w.{i:03}"])
        held = sum(tensor.nbytes for _, tensor in handle._file._ahead.values())
        assert held == handle._file._ahead_bytes
        most = max(most, held)
    assert 0 < most <= 1 << 20


def test_what_fails_while_reading_ahead_does_not_fail_the_tensor_asked_for(file, monkeypatch):
    handle = dropin.safe_open(file, "pt")
    real = weightlift.program.Program.finish
    failed = []

    def finish(program: Any, number: int) -> None:
        if len(handle._file._ahead) and not failed:
            failed.append(number)
            raise weightlift.CheckpointReadError("a read failed", reason="ReadFailed")
        real(program, number)

    monkeypatch.setattr(weightlift.program.Program, "finish", finish)
    expected = safetensors.torch.load_file(file)
    for name in handle.offset_keys():
        assert comparable(handle.get_tensor(name)) == comparable(expected[name])
    assert failed


# ---- models


class Tied(torch.nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4, bias=False)
        self.c = torch.nn.BatchNorm1d(4)
        if tied:
            self.b.weight = self.a.weight


def _file_of(path: Path, change: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: None) -> Path:
    torch.manual_seed(1)
    tensors = {name: tensor.clone() for name, tensor in Tied().state_dict().items() if name != "b.weight"}
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: None,
        lambda tensors: tensors.pop("a.weight"),
        lambda tensors: tensors.update({"b.weight": tensors.pop("a.weight")}),
        lambda tensors: tensors.update({"b.weight": tensors["a.weight"].clone()}),
        lambda tensors: tensors.update(extra=torch.ones(1)),
        lambda tensors: tensors.pop("c.weight"),
        lambda tensors: (tensors.pop("c.bias"), tensors.update(extra=torch.ones(1))),
        lambda tensors: tensors.update({"c.bias": torch.ones(5)}),
        lambda tensors: tensors.update({"c.bias": torch.ones(4, dtype=torch.float16)}),
        lambda tensors: tensors.clear(),
    ],
    ids=["exact", "tied missing", "other name", "both names", "extra", "missing", "both", "size", "dtype", "none"],
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_load_model_is_that_of_safetensors(tmp_path, change, strict, tied):
    path = _file_of(tmp_path / "f", change)

    def call(api: Any) -> Any:
        torch.manual_seed(2)
        model = Tied(tied)
        missing, unexpected = api.load_model(model, path, strict)
        return {**model.state_dict(), "missing": missing, "unexpected": unexpected}

    assert_same(call)


def test_load_model_leaves_the_model_alone_when_names_differ(tmp_path):
    path = _file_of(tmp_path / "f", lambda tensors: tensors.pop("c.weight"))
    model = Tied()
    before = comparable({name: tensor.clone() for name, tensor in model.state_dict().items()})
    with pytest.raises(weightlift.CheckpointMismatchError, match=r'Missing key\(s\) in state_dict: "c.weight"'):
        dropin.load_model(model, path)
    assert comparable(dict(model.state_dict())) == before


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [(("gone",), {}), (("{file}",), {"device": "no_such"}), (("{file}",), {"backend": "no_such"}), ((1,), {})],
)
def test_load_model_refuses_as_safetensors(tmp_path, arguments, keywords):
    path = _file_of(tmp_path / "f")
    arguments = [str(path) if value == "{file}" else value for value in arguments]
    assert_same(lambda api: api.load_model(Tied(), *arguments, **keywords))


@pytest.mark.parametrize("data", [b"", b"{}", "text", None, 1, bytearray(8), memoryview(b"")])
def test_load_refuses_as_safetensors(data):
    assert_same(lambda api: api.load(data))


def test_loaded_bytes_are_owned_by_the_caller(file):
    data = file.read_bytes()
    first = dropin.load(data)
    first["layer.0"].zero_()
    assert comparable(dropin.load(data)["layer.0"]) != comparable(first["layer.0"])


# ---- without safetensors


def test_the_drop_in_works_where_safetensors_is_not_installed(file):
    code = """
        import sys
        sys.modules["safetensors"] = None
        import weightlift
        from weightlift.engines import safetensors as dropin
        with dropin.safe_open(sys.argv[1], "pt") as handle:
            assert isinstance(handle, dropin.safe_open) and not isinstance(1, dropin.safe_open)
            assert handle.get_tensor("scalar") == 3.5
        for call in (lambda: dropin.safe_open(sys.argv[1], "tf"), lambda: handle.keys()):
            try:
                call()
            except weightlift.CheckpointError as error:
                print(error.reason)
        try:
            dropin.patch_safetensors()
        except ImportError as error:
            print("ImportError")
    """
    assert run_python(code, file).split() == ["InvalidFramework", "Closed", "ImportError"]
