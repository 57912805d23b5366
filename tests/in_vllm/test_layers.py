"""Layer by layer, vLLM's own classes: they cut tensors as ours do, and take tensors that are still on disk.

One process is every rank in turn. Needs a virtual environment with vLLM: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from golden import make_layer, same_bits
from quant_methods import Method, awq, fp8, gptq

import weightlift
from weightlift.model import parameter, vocab
from weightlift.model.parallel import ParallelConfig

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, in a virtual environment of its own: make test-vllm", allow_module_level=True)

Tensors = Mapping[tuple[str, Any], torch.Tensor]  # by name of the parameter and shard id
SPECS: dict[str, dict[str, Any]] = {
    "column": {"in": 256, "out": 512},
    "row": {"in": 512, "out": 128},
    "replicated": {"in": 64, "out": 96},
    "merged": {"in": 128, "sizes": [512, 1024, 512]},
    "qkv": {"in": 128, "heads": 8, "kv": 2, "head": 128},
    "qkv_v_head": {"in": 128, "heads": 8, "kv": 4, "head": 256, "vhead": 128},
}
METHODS: dict[str, Callable[..., Method]] = {
    "fp8-tensor": lambda **classes: fp8("tensor", torch.float32, **classes),
    "fp8-channel": lambda **classes: fp8("channel", torch.float32, **classes),
    "fp8-block": lambda **classes: fp8("block", torch.float32, **classes),
    "mxfp8": lambda **classes: fp8("mxfp8", torch.uint8, **classes),
    "gptq-4-32": lambda **classes: gptq(4, 32, **classes),
    "gptq-8-channel": lambda **classes: gptq(8, -1, **classes),
    "gptq-4-act-order": lambda **classes: gptq(4, 32, whole_groups=True, **classes),
    "awq-4-32": lambda **classes: awq(4, 32, **classes),
    "awq-8-32": lambda **classes: awq(8, 32, **classes),
}
RANKS = [(tp_size, rank) for tp_size in (1, 2, 4) for rank in range(tp_size)]


@pytest.fixture(scope="module")
def vllm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int], None]]:
    """Gives `be(rank, tp_size)`, by which vLLM's layers that are made then are those of that rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

    register_weight_loader_v2_supported_method(Method)
    with set_current_vllm_config(VllmConfig()):
        store = tmp_path_factory.mktemp("vllm") / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1)
        group = parallel_state.get_tp_group()

        def be(rank: int, tp_size: int) -> None:
            group.world_size, group.rank_in_group = tp_size, rank

        yield be
        be(0, 1)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def on_disk(kind: str, spec: dict[str, Any], method: str | None, *, is_fused: bool) -> Tensors:
    """What a checkpoint has for such a layer."""
    generator = torch.Generator().manual_seed(0)

    def like(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(size).numel() * dtype.itemsize
        # Bits at random; not of exponents that make NaN, which no comparison of values could tell apart.
        data = torch.randint(0, 120, (count,), dtype=torch.uint8, generator=generator)
        return data.view(dtype).view(size)

    kind = kind.removesuffix("_v_head")
    parts: dict[Any, int] = {None: spec.get("out", 0)}
    if kind == "merged":
        parts = dict(enumerate(spec["sizes"]))
    elif kind == "qkv":
        heads, kv, size = spec["heads"], spec["kv"], spec["head"]
        parts = {"q": heads * size, "k": kv * size, "v": kv * spec.get("vhead", size)}
    if is_fused:
        parts = {None: sum(parts.values())}
    tensors: dict[tuple[str, Any], torch.Tensor] = {}
    for shard, rows in parts.items():
        # A layer of one rank that has this part alone knows the sizes.
        config = METHODS[method]() if method is not None else None
        sizes = {"in": spec["in"], "out": rows}
        alone = make_layer("replicated", sizes, quant_config=config, params_dtype=torch.bfloat16)
        for name, value in alone.named_parameters():
            tensors[name, shard] = like(tuple(value.shape), value.dtype)
    return tensors


def load_all(layer: torch.nn.Module, tensors: Tensors) -> dict[str, torch.Tensor]:
    for (name, shard), tensor in tensors.items():
        target: Any = layer.get_parameter(name)
        target.weight_loader(target, tensor, *(() if shard is None else (shard,)))
    return {name: value.detach() for name, value in layer.named_parameters()}


def check(
    tmp_path: Path,
    make_ours: Callable[[], torch.nn.Module],
    make_theirs: Callable[[], torch.nn.Module],
    tensors: Tensors,
) -> None:
    """Both layers have the same parameters, from real tensors and from those of a checkpoint."""
    expected = load_all(make_theirs(), tensors)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({f"{name}.{shard}": tensor for (name, shard), tensor in tensors.items()}, path)
    for make in (make_ours, make_theirs):
        layer = make()
        with weightlift.open_checkpoint(path) as checkpoint:
            recorded = load_all(layer, {(name, shard): checkpoint[f"{name}.{shard}"] for name, shard in tensors})
        assert recorded.keys() == expected.keys()
        for name, value in expected.items():
            assert same_bits(recorded[name], value), f"{type(layer).__module__}: {name}"
    ours = load_all(make_ours(), tensors)
    for name, value in expected.items():
        assert same_bits(ours[name], value), name


def combinations() -> list[tuple[str, str | None, bool]]:
    found = []
    for kind, method in itertools.product(SPECS, [None, *METHODS]):
        if kind == "replicated" and method is not None and method != "fp8-tensor":
            continue
        for is_fused in (False, True) if kind.startswith(("merged", "qkv")) else (False,):
            found.append((kind, method, is_fused))
    return found


@pytest.mark.parametrize(("kind", "method", "is_fused"), combinations())
def test_a_layer_cuts_as_that_of_vllm_does(
    tmp_path: Path, vllm_ranks: Callable[[int, int], None], kind: str, method: str | None, is_fused: bool
) -> None:
    from vllm.model_executor import parameter as vllm_parameter
    from vllm.model_executor.layers import linear as vllm_linear

    spec = SPECS[kind]
    tensors = on_disk(kind, spec, method, is_fused=is_fused)
    for tp_size, rank in RANKS:
        vllm_ranks(rank, tp_size)
        parallel = ParallelConfig(tp_rank=rank, tp_size=tp_size)

        def make(classes: Any, **where: Any) -> torch.nn.Module:
            config = METHODS[method](classes=classes) if method is not None else None
            return make_layer(
                kind.removesuffix("_v_head"), spec, quant_config=config, params_dtype=torch.bfloat16, **where
            )

        check(
            tmp_path,
            lambda parallel=parallel, make=make: make(parameter, parallel=parallel),
            lambda make=make: make(vllm_parameter, layers=vllm_linear),
            tensors,
        )


@pytest.mark.parametrize("added", [0, 16])
@pytest.mark.parametrize("kind", ["VocabParallelEmbedding", "ParallelLMHead"])
def test_a_vocabulary_layer_cuts_as_that_of_vllm_does(
    tmp_path: Path, vllm_ranks: Callable[[int, int], None], kind: str, added: int
) -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding as vllm_vocab

    options = {"bias": True} if kind == "ParallelLMHead" else {}
    tensors = {("weight", None): torch.randn(1010, 32)}
    if options:
        tensors["bias", None] = torch.randn(1010)
    for tp_size, rank in RANKS:
        vllm_ranks(rank, tp_size)
        parallel = ParallelConfig(tp_rank=rank, tp_size=tp_size)

        def make(module: Any, **where: Any) -> Any:
            return getattr(module, kind)(1010 + added, 32, org_num_embeddings=1010, **options, **where)

        check(
            tmp_path,
            lambda parallel=parallel, make=make: make(vocab, parallel=parallel),
            lambda make=make: make(vllm_vocab),
            tensors,
        )
