"""Vocabulary layers: the tokens of each rank, the padding around them, and what the ranks compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import WriteCheckpoint
from golden import golden, load_both_ways, parents, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import weightlift
from weightlift.model.linear import LinearMethodBase
from weightlift.model.parallel import ParallelConfig
from weightlift.model.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from weightlift.model.vocab import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding


def rank(number: int, tp_size: int) -> ParallelConfig:
    return ParallelConfig(tp_rank=number, tp_size=tp_size)


def load(layer: VocabParallelEmbedding, tensor: torch.Tensor, *shard: Any, name: str = "weight") -> torch.Tensor:
    parameter = layer.get_parameter(name)
    parameter.data.view(torch.uint8).fill_(0xA5)  # padding has to be written
    parameter.weight_loader(parameter, tensor, *shard)
    return parameter.data


class Method(LinearMethodBase):
    """Parameters of classes that are given, with data that is given."""

    def __init__(self, block: list[int] | None = None, **parameters: Any) -> None:
        self._block = block
        self._parameters = parameters

    def create_weights(self, layer: torch.nn.Module, *args: Any, **loader: Any) -> None:
        layer.weight_block_size = self._block
        for name, (kind, arguments) in self._parameters.items():
            parameter: BasevLLMParameter = kind(**arguments, **loader)
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase:
        return self


@pytest.mark.parametrize("parent", parents("vocab_parallel"))
def test_rows_and_padding_are_those_of_the_reference(parent: str) -> None:
    topic = golden("vocab_parallel")
    info = topic.cases[parent]
    for case, child in topic.children(parent):
        parallel = rank(child["rank"], child["tp"])

        def make(parallel: ParallelConfig = parallel) -> VocabParallelEmbedding:
            kind, options = VocabParallelEmbedding, {}
            if info["class"] == "lm_head":
                kind, options = ParallelLMHead, {"bias": True}
            return kind(
                info["num_embeddings"],
                info["dim"],
                org_num_embeddings=info["org_vocab"],
                padding_size=info["padding_size"],
                params_dtype=torch.bfloat16,
                parallel=parallel,
                **options,
            )

        loaded = load_both_ways(topic, parent, make)
        expected = topic.expected(case)
        assert loaded.keys() == expected.keys()
        for name, value in expected.items():
            assert same_bits(loaded[name], value), f"{case}.{name}"
        layer = make()
        for name, value in child["shard_indices"].items():
            assert getattr(layer.shard_indices, name) == value
        for name in ("org_vocab_size_padded", "num_embeddings_padded", "num_embeddings_per_partition"):
            assert getattr(layer, name) == child[name]


@pytest.mark.parametrize(
    ("number", "expected"), [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (2, [8, 9, 0, 0]), (3, [0] * 4)]
)
def test_rows_beyond_the_vocabulary_are_zero(number: int, expected: list[int]) -> None:
    layer = VocabParallelEmbedding(10, 1, padding_size=8, parallel=rank(number, 4))
    assert load(layer, torch.arange(10.0)[:, None]).flatten().tolist() == expected


@pytest.mark.parametrize("size", [9, 11])
def test_a_checkpoint_with_another_vocabulary_is_refused(size: int) -> None:
    layer = VocabParallelEmbedding(10, 1, padding_size=8, prefix="model.embed_tokens", parallel=rank(3, 4))
    with pytest.raises(weightlift.CheckpointMismatchError, match=rf"model\.embed_tokens\.weight: .*\[{size}, 1\]"):
        load(layer, torch.zeros(size, 1))


def test_added_tokens_come_after_the_padding_of_the_original_ones() -> None:
    layer = VocabParallelEmbedding(1010 + 16, 1, org_num_embeddings=1010, parallel=rank(1, 2))
    assert layer.num_embeddings_per_partition == 544
    indices = layer.shard_indices
    assert (indices.org_vocab_start_index, indices.org_vocab_end_index, indices.num_added_elements) == (512, 1010, 0)


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="embed: padded num_embeddings by tp_size: 64 is not divisible by 3"):
        VocabParallelEmbedding(10, 1, prefix="embed", parallel=rank(0, 3))


def test_less_tokens_than_original_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="num_embeddings 10 is less than org_num_embeddings 11"):
        VocabParallelEmbedding(10, 1, org_num_embeddings=11)


def test_a_shard_id_is_refused() -> None:
    with pytest.raises(ValueError, match=r"VocabParallelEmbedding has no parts\. Got shard id 0\."):
        load(VocabParallelEmbedding(64, 1), torch.zeros(64, 1), 0)


def test_without_tensor_parallelism_all_rows_are_here() -> None:
    layer = VocabParallelEmbedding(10, 1, padding_size=8, disable_tp=True, parallel=rank(3, 4))
    assert load(layer, torch.arange(10.0)[:, None]).flatten().tolist() == [*range(10), *[0] * 6]


# ---- quantised


def test_words_packed_along_the_tokens_are_cut_and_padded() -> None:
    packed = {"input_dim": 0, "output_dim": 1, "packed_dim": 1, "packed_factor": 8}
    method = Method(
        weight=(PackedvLLMParameter, {"data": torch.empty(2, 2, dtype=torch.int32), **packed}),
        scales=(GroupQuantScaleParameter, {"data": torch.empty(1, 16), "input_dim": 0, "output_dim": 1}),
        factor=(PerTensorScaleParameter, {"data": torch.empty(1)}),
    )
    layer = ParallelLMHead(24, 2, padding_size=16, quant_config=method, parallel=rank(1, 2))
    words = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert load(layer, words).tolist() == [[2, 0], [5, 0]]
    scales = torch.arange(24.0)[None]
    assert load(layer, scales, name="scales").tolist() == [[*range(16, 24), *[0] * 8]]
    assert load(layer, torch.tensor(0.5), name="factor").tolist() == [0.5]


@pytest.mark.parametrize("number", range(4))
def test_tokens_that_are_no_whole_words_are_refused_or_right(number: int) -> None:
    packed = {"input_dim": 0, "output_dim": 1, "packed_dim": 1, "packed_factor": 8}
    method = Method(weight=(PackedvLLMParameter, {"data": torch.empty(1, 1, dtype=torch.int32), **packed}))
    layer = ParallelLMHead(12, 1, padding_size=16, quant_config=method, prefix="lm_head", parallel=rank(number, 4))
    words = torch.tensor([[7, 8]], dtype=torch.int32)
    if number == 3:  # has padding only
        assert load(layer, words).tolist() == [[0]]
    elif number == 2:  # its last four are a word that is not full, and end what is on disk
        assert load(layer, words).tolist() == [[8]]
    else:
        with pytest.raises(weightlift.CheckpointMismatchError, match="packed 8 to a word, these are not whole words"):
            load(layer, words)


def test_block_scales_of_tokens() -> None:
    arguments = {"data": torch.empty(4, 1), "input_dim": 1, "output_dim": 0}
    method = Method(block=[4, 4], weight=(BlockQuantScaleParameter, arguments))
    layer = ParallelLMHead(22, 4, padding_size=32, quant_config=method, parallel=rank(1, 2))
    assert load(layer, torch.arange(6.0)[:, None]).flatten().tolist() == [4, 5, 0, 0]


def test_an_embedding_needs_a_method_that_looks_up_rows() -> None:
    method = Method(weight=(PerTensorScaleParameter, {"data": torch.empty(1)}))
    with pytest.raises(NotImplementedError, match="embed: the class Method must implement the 'embedding' method"):
        VocabParallelEmbedding(64, 2, quant_config=method, prefix="embed")


def test_a_quant_config_may_leave_the_vocabulary_alone() -> None:
    class Config:
        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
            return None

    layer = VocabParallelEmbedding(64, 2, quant_config=Config())
    assert type(layer.quant_method) is UnquantizedEmbeddingMethod


# ---- what they compute


@pytest.mark.parametrize("added", [0, 5])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_together_look_up_every_token_and_give_its_logit(tp_size: int, added: int) -> None:
    torch.manual_seed(0)
    org, tokens = 13, 13 + added
    weight, bias, added_rows = torch.randn(org, 6), torch.randn(org), torch.randn(added, 6)
    whole = torch.cat([weight, added_rows])
    x = torch.randn(2, 6)

    def compute(parallel: ParallelConfig) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = VocabParallelEmbedding(tokens, 6, org_num_embeddings=org, padding_size=8, parallel=parallel)
        head = ParallelLMHead(tokens, 6, bias=True, org_num_embeddings=org, padding_size=8, parallel=parallel)
        for layer in (embedding, head):
            load(layer, weight)
            indices = layer.shard_indices
            mine = added_rows[indices.added_vocab_start_index - org : indices.added_vocab_end_index - org]
            layer.weight.data.narrow(0, indices.num_org_elements_padded, len(mine)).copy_(mine)
        load(head, bias, name="bias")
        return embedding(torch.arange(tokens)[None]), head(x)

    for rows, logits in run_ranks(tp_size, compute):
        assert torch.equal(rows[0], whole)
        torch.testing.assert_close(logits, F.linear(x, whole, torch.cat([bias, torch.zeros(added)])))


def test_a_tied_head_has_the_parameter_of_the_embedding() -> None:
    embedding = VocabParallelEmbedding(10, 4, parallel=rank(1, 2))
    head = ParallelLMHead(10, 4, parallel=rank(1, 2))
    assert head.tie_weights(embedding) is head
    assert head.weight is embedding.weight


def test_a_head_of_another_size_cannot_be_tied() -> None:
    embedding = VocabParallelEmbedding(100, 4, prefix="model.embed_tokens")
    with pytest.raises(
        ValueError, match=r"lm_head: of size .*\[64, 4\].*, but tied to model\.embed_tokens .*\[128, 4\]"
    ):
        ParallelLMHead(10, 4, prefix="lm_head").tie_weights(embedding)


# ---- a whole load


def test_padding_is_no_gap(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    model = torch.nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(100, 8, parallel=rank(1, 2))})
    tensor = torch.randn(100, 8)
    report = weightlift.fast_load(model, write_checkpoint(tmp_path, {"embed_tokens.weight": tensor}))
    assert (report.gaps, report.double_writes, report.num_forced) == ([], [], 0)
    weight = model["embed_tokens"].weight
    assert torch.equal(weight[:36], tensor[64:])
    assert not weight[36:].any()


@settings(max_examples=100, deadline=None)
@given(
    org=st.integers(1, 40),
    added=st.integers(0, 10),
    tp_size=st.sampled_from([1, 2, 4]),
    padding=st.sampled_from([4, 8, 16]),
)
def test_every_row_is_on_one_rank_and_all_others_are_zero(org: int, added: int, tp_size: int, padding: int) -> None:
    found: list[float] = []
    for number in range(tp_size):
        layer = VocabParallelEmbedding(
            org + added, 1, org_num_embeddings=org, padding_size=padding, parallel=rank(number, tp_size)
        )
        values = load(layer, torch.arange(1.0, org + 1)[:, None]).flatten().tolist()
        size = layer.shard_indices.num_org_elements
        assert not any(values[size:])
        found += values[:size]
    assert found == [float(row) for row in range(1, org + 1)]
