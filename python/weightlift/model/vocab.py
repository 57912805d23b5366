"""Gate 4, vocabulary layers: cut by tokens, and padded so that every rank has as many rows."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from .linear import QuantizationConfig, QuantizeMethodBase, UnquantizedLinearMethod, divide
from .mapping import ShardId
from .parallel import ParallelConfig
from .parameter import BasevLLMParameter, ColumnvLLMParameter, Cut, name_in_errors

DEFAULT_VOCAB_PADDING_SIZE = 64


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    """One parameter, `weight` `[rows, embedding_dim]`."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """The rows of that number: `[...]` to `[..., embedding_dim]`."""
        return F.embedding(input_, layer.weight)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class VocabParallelEmbeddingShardIndices:
    """The tokens of one rank, and the same with the padding that its rows have; ends are exclusive.

    Its rows are those of the original tokens, their padding, those of the added tokens, and their padding.
    """

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @property
    def num_org_elements(self) -> int:
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_added_elements(self) -> int:
        return self.added_vocab_end_index - self.added_vocab_start_index

    @property
    def num_org_elements_padded(self) -> int:
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index


def pad_vocab_size(vocab_size: int, pad_to: int = DEFAULT_VOCAB_PADDING_SIZE) -> int:
    """The next multiple of `pad_to`."""
    return -(-vocab_size // pad_to) * pad_to


class VocabParallelEmbedding(torch.nn.Module):
    """An embedding cut by tokens.

    A checkpoint has the rows of the original tokens. Their number is padded, and each rank has an equal part of that;
    after it comes its part of the rows of added tokens (LoRA), which are padded too. All rows that are in no checkpoint
    are set to 0.

    Args:
        num_embeddings: tokens, with the added ones.
        embedding_dim: size of a row.
        params_dtype: None: torch's default dtype.
        org_num_embeddings: tokens in the checkpoint; None: all.
        padding_size: both numbers are padded to a multiple of it.
        quant_config: gives the layer its `quant_method`, if it has one for it; None: not quantised.
        prefix: the name of the layer in the model.
        disable_tp: every rank has the whole layer.
        parallel: which part is this rank's; None: as torch.distributed says.

    Raises:
        ValueError: the padded numbers can't be divided among the ranks, or there are less tokens than original ones.
        NotImplementedError: the quant method has no `embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        parallel = ParallelConfig.current() if parallel is None else parallel
        self.parallel = parallel.without_tp() if disable_tp else parallel
        self.tp_rank, self.tp_size = self.parallel.tp_rank, self.parallel.tp_size
        self.disable_tp = disable_tp
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_size = padding_size
        self.prefix = prefix
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.weight_block_size: list[int] | None = None
        self.org_vocab_size = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.num_added_embeddings = num_embeddings - self.org_vocab_size
        if self.num_added_embeddings < 0:
            raise ValueError(
                f"{prefix}: num_embeddings {num_embeddings} is less than org_num_embeddings {self.org_vocab_size}"
            )
        self.org_vocab_size_padded = pad_vocab_size(self.org_vocab_size, padding_size)
        self.num_embeddings_padded = pad_vocab_size(
            self.org_vocab_size_padded + self.num_added_embeddings, padding_size
        )
        self.num_embeddings_per_partition = divide(
            self.num_embeddings_padded, self.tp_size, f"{prefix}: padded num_embeddings by tp_size"
        )
        self.shard_indices = self._indices_of(self.tp_rank)
        self.quant_method = self._quant_method(quant_config)
        self.quant_method.create_weights(
            self,
            embedding_dim,
            [self.num_embeddings_per_partition],
            embedding_dim,
            self.num_embeddings_padded,
            self.params_dtype,
            weight_loader=self.weight_loader,
        )

    def _quant_method(self, quant_config: QuantizationConfig | None) -> QuantizeMethodBase:
        method = None if quant_config is None else quant_config.get_quant_method(self, self.prefix)
        if method is None:
            return UnquantizedEmbeddingMethod()
        if not hasattr(method, "embedding") and not isinstance(self, ParallelLMHead):
            raise NotImplementedError(
                f"{self.prefix}: the class {type(method).__name__} must implement the 'embedding' method, see "
                "UnquantizedEmbeddingMethod."
            )
        return method

    def _indices_of(self, rank: int) -> VocabParallelEmbeddingShardIndices:
        org, vocab = self.org_vocab_size, self.num_embeddings
        what = f"{self.prefix}: padded org_num_embeddings by tp_size"
        org_rows = divide(self.org_vocab_size_padded, self.tp_size, what)
        added_rows = self.num_embeddings_per_partition - org_rows
        org_begin, added_begin = rank * org_rows, org + rank * added_rows
        return VocabParallelEmbeddingShardIndices(
            org_begin,
            org_begin + org_rows,
            added_begin,
            added_begin + added_rows,
            min(org_begin, org),
            min(org_begin + org_rows, org),
            min(added_begin, vocab),
            min(added_begin + added_rows, vocab),
        )

    def weight_loader(
        self, param: BasevLLMParameter, loaded_weight: torch.Tensor, shard_id: ShardId | None = None
    ) -> None:
        """Fills this rank's part of a parameter from a tensor that has the original tokens; the rest is set to 0.

        Raises:
            CheckpointMismatchError: it does not have that size, or can't be cut there.
            ValueError: there is a shard id; the layer has no parts.
        """
        if shard_id is not None:
            raise ValueError(f"{self.prefix}: {type(self).__name__} has no parts. Got shard id {shard_id}.")
        with name_in_errors(self, param):
            dim = param.output_dim
            if dim is None:
                param.load_whole(loaded_weight)
                return
            size = self.shard_indices.num_org_elements
            start = self.shard_indices.org_vocab_start_index if size else 0
            block = None if self.weight_block_size is None else self.weight_block_size[0]
            end = param.load_cut(loaded_weight, dim, Cut(self.org_vocab_size, start, size, block=block))
            param.clear_from(dim, end)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Token ids, integers `[...]`, to rows, `[..., embedding_dim]`."""
        indices = self.shard_indices
        of_org = (input_ >= indices.org_vocab_start_index) & (input_ < indices.org_vocab_end_index)
        of_added = (input_ >= indices.added_vocab_start_index) & (input_ < indices.added_vocab_end_index)
        added_rows = input_ - indices.added_vocab_start_index + indices.num_org_elements_padded
        rows = torch.where(of_org, input_ - indices.org_vocab_start_index, torch.where(of_added, added_rows, 0))
        output: torch.Tensor = self.quant_method.embedding(self, rows)  # type: ignore[attr-defined]
        # Of other ranks' tokens: the sum is that of one row and zeros.
        return self.parallel.tp_all_reduce(output.masked_fill(~(of_org | of_added).unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, "
            f"num_embeddings_per_partition={self.num_embeddings_per_partition}, "
            f"embedding_dim={self.embedding_dim}, org_vocab_size={self.org_vocab_size}, "
            f"num_embeddings_padded={self.num_embeddings_padded}, tp_size={self.tp_size}"
        )


class ParallelLMHead(VocabParallelEmbedding):
    """The layer from hidden states to logits, cut and padded as `VocabParallelEmbedding` is.

    Args:
        bias: whether there is one.
        others: as for `VocabParallelEmbedding`.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype,
            org_num_embeddings,
            padding_size,
            quant_config,
            prefix,
            disable_tp=disable_tp,
            parallel=parallel,
        )
        if bias:
            data = torch.empty(self.num_embeddings_per_partition, dtype=self.params_dtype)
            self.bias = ColumnvLLMParameter(data=data, output_dim=0, weight_loader=self.weight_loader)
        else:
            self.register_parameter("bias", None)

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> ParallelLMHead:
        """Takes the weight of an embedding, as the same parameter, in the place of its own.

        Raises:
            ValueError: they are not of the same size.
        """
        weight = embed_tokens.get_parameter("weight")
        if weight.shape != self.weight.shape:
            raise ValueError(
                f"{self.prefix}: of size {self.weight.shape}, but tied to {embed_tokens.prefix} of size {weight.shape}"
            )
        self.weight = weight
        return self

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., embedding_dim]` to logits of all tokens, `[..., num_embeddings]`, without padding."""
        logits = self.parallel.tp_all_gather(self.quant_method.apply(self, hidden_states, self.bias))
        if not self.num_added_embeddings:  # then all padding comes last
            return logits[..., : self.org_vocab_size]
        return logits.index_select(-1, self._rows_of_tokens().to(logits.device))

    def _rows_of_tokens(self) -> torch.Tensor:
        """For each token, the row that it has in the weight of all ranks."""
        org: list[int] = []
        added: list[int] = []
        for rank in range(self.tp_size):
            indices, begin = self._indices_of(rank), rank * self.num_embeddings_per_partition
            org += range(begin, begin + indices.num_org_elements)
            begin += indices.num_org_elements_padded
            added += range(begin, begin + indices.num_added_elements)
        return torch.tensor(org + added)
