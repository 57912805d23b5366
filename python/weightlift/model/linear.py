"""Gate 4, linear layers: each rank has its part, and its weight loader takes that part of a checkpoint's tensor.

With vLLM's class names, arguments and attributes; `parallel=` is what vLLM takes from its global groups. Where vLLM
looks only whether there is enough of a tensor, one that does not have the size of all ranks' parts is refused.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .mapping import ShardId
from .parallel import ParallelConfig
from .parameter import BasevLLMParameter, ColumnvLLMParameter, Cut, ModelWeightParameter, name_in_errors

# What `forward` returns: with `return_bias`, the bias that was not added, too.
LinearOutput = torch.Tensor | tuple[torch.Tensor, torch.nn.Parameter | None]


class QuantizeMethodBase(abc.ABC):
    """How a layer's weights are stored and applied; what its kind of layer passes is said there.

    Attributes:
        supports_pre_processed_weights: whether `process_weights_after_loading` may be called with weights that it has
            processed in another process; see `postprocess.is_weights_pre_processed`.
        requires_device_loading: whether it needs the layer's parameters on the model's device, where the layer is
            offloaded to the CPU.
    """

    supports_pre_processed_weights: bool = False
    requires_device_loading: bool = True

    @abc.abstractmethod
    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Registers the layer's parameters, not yet set. `extra_weight_attrs` has their `weight_loader`."""

    @abc.abstractmethod
    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called when all weights of the layer are there; those of others may be missing.

        It may change the parameters, by `replace_parameter` where their geometry changes.
        """
        return


class LinearMethodBase(QuantizeMethodBase):
    """That of a linear layer, or of one for the vocabulary."""

    @abc.abstractmethod
    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the layer's parameters, of `model.parameter`'s classes, not yet set.

        Args:
            layer: gets the parameters; and `weight_block_size`, (rows, columns), where scales are those of blocks.
            input_size_per_partition: of this rank.
            output_partition_sizes: of this rank, for each part of a fused layer.
            input_size, output_size: of all ranks.
            params_dtype: of what is not quantised.
            extra_weight_attrs: `weight_loader`, the parameters'.
        """

    @abc.abstractmethod
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's output, `[..., sum(output_partition_sizes)]`."""


class QuantizationConfig(Protocol):
    """What a checkpoint's quantisation says of each layer."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of the layer with that name; None: layers of its kind are not quantised."""


class UnquantizedLinearMethod(LinearMethodBase):
    """One parameter, `weight` `[outputs, inputs]`."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, **extra_weight_attrs)
        layer.register_parameter("weight", weight)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)  # type: ignore[arg-type]


def divide(numerator: int, denominator: int, what: str) -> int:
    """The quotient. Raises ValueError with `what` was to be divided where there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not divisible by {denominator}; choose another tp_size")
    return numerator // denominator


class LinearBase(torch.nn.Module, abc.ABC):
    """Base of the linear layers.

    Args:
        input_size, output_size: of all ranks together.
        skip_bias_add: `forward` does not add the bias.
        params_dtype: None: torch's default dtype.
        quant_config: gives the layer its `quant_method`; None: not quantised.
        prefix: the name of the layer in the model.
        return_bias: `forward` returns `(output, bias that was not added or None)`, else the output.
        disable_tp: every rank has the whole layer.
        parallel: which part is this rank's; None: as torch.distributed says.

    Raises:
        ValueError: sizes can't be divided among the ranks; `quant_config` has no method for this layer.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        return_bias: bool,
        disable_tp: bool,
        parallel: ParallelConfig | None,
    ) -> None:
        super().__init__()
        parallel = ParallelConfig.current() if parallel is None else parallel
        self.parallel = parallel.without_tp() if disable_tp else parallel
        self.tp_rank, self.tp_size = self.parallel.tp_rank, self.parallel.tp_size
        self.disable_tp = disable_tp
        self.input_size = self.input_size_per_partition = input_size
        self.output_size = self.output_size_per_partition = output_size
        self.output_partition_sizes = [output_size]
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config = quant_config
        self.prefix = prefix
        self.return_bias = return_bias
        self.weight_block_size: Sequence[int] | None = None
        if quant_config is None:
            self.quant_method: QuantizeMethodBase = UnquantizedLinearMethod()
        else:
            method = quant_config.get_quant_method(self, prefix)
            if method is None:
                raise ValueError(f"{self._label}: {type(quant_config).__name__} has no quant method for a linear layer")
            self.quant_method = method

    @abc.abstractmethod
    def weight_loader(
        self, param: BasevLLMParameter, loaded_weight: torch.Tensor, shard_id: ShardId | None = None
    ) -> None:
        """Fills this rank's part of a parameter from a tensor as it is on disk, of all ranks.

        Args:
            param: one of this layer's.
            loaded_weight: real, or a CheckpointTensor.
            shard_id: which part of a fused layer it is. None: all of them, one after the other.

        Raises:
            CheckpointMismatchError: it does not have that size, or can't be cut there.
            ValueError: the layer has no part of that id.
        """

    def validate_shard_id(self, shard_id: object) -> Sequence[int]:
        """The positions in the layer of the parts that it names; None: all of them. Raises ValueError."""
        if shard_id is not None:
            raise ValueError(f"{self._label}: {type(self).__name__} has no parts. Got shard id {shard_id}.")
        return (0,)

    def _create_parameters(self, *, bias: bool) -> None:
        """When all sizes are set: the parameters, by the quant method, and the bias."""
        self.quant_method.create_weights(
            self,
            self.input_size_per_partition,
            self.output_partition_sizes,
            self.input_size,
            self.output_size,
            self.params_dtype,
            weight_loader=self.weight_loader,
        )
        if bias:
            data = torch.empty(sum(self.output_partition_sizes), dtype=self.params_dtype)
            self.bias = ColumnvLLMParameter(data=data, output_dim=0, weight_loader=self.weight_loader)
        else:
            self.register_parameter("bias", None)

    def _with_bias(self, output: torch.Tensor) -> LinearOutput:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def _block(self, dim: int) -> int | None:
        return None if self.weight_block_size is None else self.weight_block_size[dim]

    @property
    def _label(self) -> str:
        return self.prefix or type(self).__name__

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size_per_partition}, output_features={self.output_size_per_partition}, "
            f"bias={self.bias is not None}, tp_size={self.tp_size}"
        )


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank has whole. Arguments as for `LinearBase`, and whether there is a `bias`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
            parallel=parallel,
        )
        self._create_parameters(bias=bias)

    def weight_loader(
        self, param: BasevLLMParameter, loaded_weight: torch.Tensor, shard_id: ShardId | None = None
    ) -> None:
        self.validate_shard_id(shard_id)
        with name_in_errors(self, param):
            param.load_whole(loaded_weight)

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """`x @ weight.T + bias`: `[..., input_size]` to `[..., output_size]`."""
        return self._with_bias(self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias))


class ColumnParallelLinear(LinearBase):
    """A linear layer cut along its outputs: rank r of p has rows `[r * N / p, (r + 1) * N / p)` of the weight's N.

    Args:
        input_size, output_size: of all ranks.
        bias: whether there is one; it is cut as the rows are.
        gather_output: `forward` returns the outputs of all ranks.
        others: as for `LinearBase`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
            parallel=parallel,
        )
        self.gather_output = gather_output
        self._shards = self._make_shards()
        self.output_partition_sizes = [shard.size for shard in self._shards]
        self.output_size_per_partition = sum(self.output_partition_sizes)
        self.output_size = self.output_size_per_partition * self.tp_size
        self._create_parameters(bias=bias)

    def _make_shards(self) -> list[Cut]:
        return self._shards_of([self.output_size], "output_size")

    def _shards_of(self, output_sizes: Sequence[int], what: str) -> list[Cut]:
        sizes = [divide(size, self.tp_size, f"{self._label}: {what} by tp_size") for size in output_sizes]
        offsets = itertools.accumulate(sizes, initial=0)
        return [
            Cut(total, self.tp_rank * size, size, offset)
            for total, size, offset in zip(output_sizes, sizes, offsets, strict=False)
        ]

    def weight_loader(
        self, param: BasevLLMParameter, loaded_weight: torch.Tensor, shard_id: ShardId | None = None
    ) -> None:
        cuts = self._cuts(self.validate_shard_id(shard_id))
        with name_in_errors(self, param):
            param.load_column_parallel_weight(loaded_weight, cuts)

    def _cuts(self, positions: Sequence[int]) -> Mapping[int, Cut]:
        """What to take for each of these parts, of a tensor in which they are one after the other."""
        total = sum(self._shards[position].total for position in positions)
        block = self._block(0)
        cuts, begin = {}, 0
        for position in positions:
            shard = self._shards[position]
            cuts[position] = shard._replace(total=total, start=begin + shard.start, block=block)
            begin += shard.total
        return cuts

    def forward(self, input_: torch.Tensor) -> LinearOutput:
        """`[..., input_size]` to `[..., this rank's outputs]`, or those of all ranks with `gather_output`."""
        output = self.quant_method.apply(self, input_, None if self.skip_bias_add else self.bias)
        if self.gather_output:
            output = self.parallel.tp_all_gather(output)
        return self._with_bias(output)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input (gate and up) as one. A rank has its rows of each, in their order.

    Shard ids are positions in `output_sizes`, or a tuple of consecutive ones that are one tensor on disk; None: all of
    them are one. With `disable_tp` it is vLLM's replicated merged layer.

    vLLM loads a tuple as if it began at 0; here it is loaded where it belongs.

    Args:
        output_sizes: of each, of all ranks.
        others: as for `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.output_sizes = list(output_sizes)
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
            parallel=parallel,
        )

    def _make_shards(self) -> list[Cut]:
        return self._shards_of(self.output_sizes, "output_sizes")

    def validate_shard_id(self, shard_id: object) -> Sequence[int]:
        last = len(self._shards) - 1
        if shard_id is None:
            return range(last + 1)
        problem = ""
        if isinstance(shard_id, int):
            if 0 <= shard_id <= last:
                return (shard_id,)
            problem = f"Shard id should be between 0 and {last}."
        elif not isinstance(shard_id, tuple) or not shard_id or not all(isinstance(i, int) for i in shard_id):
            problem = "Shard id should be a number, a tuple of numbers or None."
        else:
            outside = [i for i in shard_id if not 0 <= i <= last]
            if outside:
                problem = f"Shard id index {outside[0]} should be between 0 and {last}."
            elif shard_id != tuple(range(shard_id[0], shard_id[-1] + 1)):
                problem = "Shard id with multiple indices should be consecutive."
            else:
                return shard_id
        raise ValueError(f"{self._label}: {problem} Got shard id {shard_id}.")


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value layers of attention as one, cut by heads.

    Where there are more ranks than key/value heads, several ranks have the same of these. Shard ids are "q", "k" and
    "v"; None: all of them are one tensor on disk.

    Args:
        hidden_size: of the input.
        head_size: of a query or key head.
        total_num_heads: query heads of all ranks; divided by tp_size.
        total_num_kv_heads: key heads, and value heads, of all ranks; divides tp_size, or is divided by it. None: as
            many as query heads.
        v_head_size: of a value head; None: as `head_size`.
        others: as for `ColumnParallelLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        super().__init__(
            hidden_size,
            total_num_heads * head_size + self.total_num_kv_heads * (head_size + self.v_head_size),
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
            parallel=parallel,
        )

    def _make_shards(self) -> list[Cut]:
        rank, size = self.tp_rank, self.tp_size
        self.num_heads = divide(self.total_num_heads, size, f"{self._label}: total_num_heads by tp_size")
        if size >= self.total_num_kv_heads:
            what = f"{self._label}: tp_size by total_num_kv_heads"
            self.num_kv_heads, self.num_kv_head_replicas = 1, divide(size, self.total_num_kv_heads, what)
        else:
            what = f"{self._label}: total_num_kv_heads by tp_size"
            self.num_kv_heads, self.num_kv_head_replicas = divide(self.total_num_kv_heads, size, what), 1
        kv_rank = rank // self.num_kv_head_replicas
        heads = [  # (of all ranks, of this one, which part of them, size of each)
            (self.total_num_heads, self.num_heads, rank, self.head_size),
            (self.total_num_kv_heads, self.num_kv_heads, kv_rank, self.head_size),
            (self.total_num_kv_heads, self.num_kv_heads, kv_rank, self.v_head_size),
        ]
        offsets = itertools.accumulate((number * width for _, number, _, width in heads), initial=0)
        # As vLLM has them: of all ranks, heads that several ranks have counted for each.
        self.output_sizes = [number * width * size for _, number, _, width in heads]
        return [
            Cut(total * width, part * number * width, number * width, offset)
            for (total, number, part, width), offset in zip(heads, offsets, strict=False)
        ]

    def validate_shard_id(self, shard_id: object) -> Sequence[int]:
        if shard_id is None:
            return range(3)
        if shard_id not in ("q", "k", "v"):
            raise ValueError(
                f"{self._label}: Shard id for QKVParallelLinear should be 'q', 'k', or 'v', got shard id {shard_id}."
            )
        return ("qkv".index(str(shard_id)),)


class RowParallelLinear(LinearBase):
    """A linear layer cut along its inputs: rank r of p has columns `[r * K / p, (r + 1) * K / p)` of the weight's K.

    Args:
        input_size, output_size: of all ranks.
        bias: whether there is one. Every rank has it; rank 0 adds it.
        input_is_parallel: `forward` is given this rank's inputs, not those of all ranks.
        reduce_results: `forward` returns the sum over the ranks.
        others: as for `LinearBase`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
            parallel=parallel,
        )
        if bias and not (reduce_results or skip_bias_add):
            raise ValueError(
                f"{self._label}: When not reduce the results, adding bias to the results can lead to incorrect results"
            )
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.input_size_per_partition = divide(input_size, self.tp_size, f"{self._label}: input_size by tp_size")
        self._create_parameters(bias=bias)

    def weight_loader(
        self, param: BasevLLMParameter, loaded_weight: torch.Tensor, shard_id: ShardId | None = None
    ) -> None:
        self.validate_shard_id(shard_id)
        size = self.input_size_per_partition
        with name_in_errors(self, param):
            param.load_row_parallel_weight(
                loaded_weight, Cut(self.input_size, self.tp_rank * size, size, block=self._block(1))
            )

    def forward(self, input_: torch.Tensor) -> LinearOutput:
        """`[..., this rank's inputs]`, or `[..., input_size]`, to `[..., output_size]`."""
        if not self.input_is_parallel:
            size = self.input_size_per_partition
            input_ = input_.narrow(-1, self.tp_rank * size, size)
        # Once in the sum of all ranks.
        bias = None if self.skip_bias_add or self.tp_rank else self.bias
        output = self.quant_method.apply(self, input_, bias)
        if self.reduce_results:
            output = self.parallel.tp_all_reduce(output)
        return self._with_bias(output)
