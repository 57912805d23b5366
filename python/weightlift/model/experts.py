"""Mixture-of-experts layers, and where the checkpoint's tensor of one expert, or of all of them, goes in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F

from ..errors import CheckpointError, CheckpointMismatchError, listed
from ..filters import Placement, local_experts
from .expert_methods import (
    ACTIVATIONS,
    UNGATED,
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    UnquantizedFusedMoEMethod,
)
from .expert_names import expert_names, logical_experts, make_expert_params_mapping
from .expert_placement import determine_expert_map, usable_placement
from .expert_routing import Routing, route
from .parallel import ParallelConfig
from .parameter import UnfitWeightError, copy_weight, name_in_errors

if TYPE_CHECKING:
    from .quantization.arrival import MemoryLayout

# Gate, down and up projection of an expert, as Mixtral has called them.
_SHARD_IDS = ("w1", "w2", "w3")
_TENSOR, _CHANNEL, _GROUP, _BLOCK = (kind.value for kind in FusedMoeWeightScaleSupported)

# What is 1 in scales that are bytes of exponents.
_ONE = {torch.uint8: 127}

# How far the scales of the input of gate and up projection, which have one input, may be apart.
_SCALE_TOLERANCE = 1e-5


class FusedMoE(torch.nn.Module):
    """Experts of which each token goes to a few; with vLLM's constructor arguments, parameters and loader.

    The experts of a rank are stacked: `w13_weight` is [experts, 2 * intermediate, hidden], gate rows before up rows,
    and `w2_weight` [experts, hidden, intermediate], both as this rank holds them. With expert parallelism a rank holds
    some experts, whole; else with tensor parallelism a part of each, a slice of the intermediate size.

    Args:
        num_experts: in the checkpoint, of all ranks.
        top_k: how many experts a token goes to.
        hidden_size, intermediate_size: of one expert, whole.
        params_dtype: of the parameters; None: torch's default dtype.
        renormalize, topk_group, scoring_func, routed_scaling_factor, e_score_correction_bias: as for `route`. The bias
            stays a parameter of whoever has it.
        use_grouped_topk: whether num_expert_group and topk_group are heeded.
        quant_config: gives the layer's method, `get_quant_method(layer, prefix)`; None, or a method that is None:
            parameters are not quantised.
        prefix: the name of the layer in its model.
        custom_routing_function: in the place of `route`, called as
            `custom_routing_function(hidden_states=, gating_output=, topk=, renormalize=)`.
        apply_router_weight_on_input: the weight of an expert multiplies what goes in, not what comes out.
        activation: "silu", "gelu", "gelu_tanh" or "relu2"; with "_no_mul" behind it for experts without a gate.
        enable_eplb, num_redundant_experts: whether experts move between ranks, and how many copies of experts there are
            beside num_experts.
        has_bias: whether projections have a bias.
        reduce_results: whether `forward` sums over the ranks.
        ckpt_names: gate, down and up projection in the checkpoint; no up projection: None.
        is_fused_checkpoint_transposed: tensors of all experts are [experts, in, out] in the checkpoint.
        expert_placement_strategy: see `filters.local_experts`; "round_robin" needs several expert groups.
        parallel: which part this rank holds; None: ParallelConfig.current(). With expert parallelism, tensor
            parallelism does not count for this layer.

    Attributes:
        local_experts: numbers of the experts of this rank, in their order in the parameters. From num_experts on they
            are copies.

    Raises:
        ValueError: sizes that the ranks can't share, unknown names.
    """

    e_score_correction_bias: torch.Tensor | None
    hidden_size: int

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        params_dtype: torch.dtype | None = None,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        prefix: str = "",
        custom_routing_function: Callable[..., Routing] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        reduce_results: bool = True,
        ckpt_names: tuple[str, str, str | None] = ("gate_proj", "down_proj", "up_proj"),
        is_fused_checkpoint_transposed: bool = False,
        expert_placement_strategy: Placement = "linear",
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        self.parallel = ParallelConfig.current() if parallel is None else parallel
        self.prefix = prefix
        label = prefix or type(self).__name__
        self.quant_config = quant_config
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        if activation not in ACTIVATIONS:
            raise ValueError(f"{label}: activation is {activation!r}; accepted is {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.is_gated = not activation.endswith(UNGATED)
        self.w13_num_shards = 2 if self.is_gated else 1
        if self.is_gated == (ckpt_names[2] is None):
            raise ValueError(
                f"{label}: ckpt_names are {ckpt_names} with activation {activation!r}; experts with a gate have an up "
                f"projection, and others, {UNGATED}, None in its place"
            )
        if not 0 < top_k <= num_experts:
            raise ValueError(f"{label}: top_k is {top_k}; accepted is 1 to num_experts, {num_experts}")
        if use_grouped_topk and (
            not num_expert_group or not topk_group or num_experts % num_expert_group or topk_group > num_expert_group
        ):
            raise ValueError(
                f"{label}: num_expert_group is {num_expert_group}, topk_group {topk_group}; use_grouped_topk needs "
                f"both, the former a divisor of num_experts, {num_experts}, the latter not larger"
            )
        self.ckpt_names = ckpt_names
        self.has_bias = has_bias
        self.reduce_results = reduce_results
        self.is_fused_checkpoint_transposed = is_fused_checkpoint_transposed

        self.num_experts = num_experts
        self.global_num_experts = num_experts + num_redundant_experts
        self.expert_placement_strategy = usable_placement(
            expert_placement_strategy,
            ep_size=self.parallel.ep_size,
            num_expert_group=num_expert_group,
            num_redundant_experts=num_redundant_experts,
            enable_eplb=enable_eplb,
        )
        self.ep_size, self.ep_rank = self.parallel.ep_size, self.parallel.ep_rank
        self.local_experts = sorted(
            local_experts(
                self.global_num_experts,
                ep_size=self.ep_size,
                ep_rank=self.ep_rank,
                placement=self.expert_placement_strategy,
            )
        )
        self.local_num_experts = len(self.local_experts)
        self._position = {expert: position for position, expert in enumerate(self.local_experts)}
        self._logical = logical_experts(num_experts, num_redundant_experts)
        self._names = expert_names(ckpt_names, num_experts, num_redundant_experts)

        self.top_k = top_k
        self.renormalize = renormalize
        self.use_grouped_topk = use_grouped_topk
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.custom_routing_function = custom_routing_function
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        # Past torch's __setattr__, which would make it a parameter of this layer, too.
        self.__dict__["e_score_correction_bias"] = e_score_correction_bias
        self.apply_router_weight_on_input = apply_router_weight_on_input

        # As in vLLM, the ranks that share experts do not cut them.
        self.tp_size, self.tp_rank = (1, 0) if self.ep_size > 1 else (self.parallel.tp_size, self.parallel.tp_rank)
        if intermediate_size % self.tp_size:
            raise ValueError(
                f"{label}: intermediate_size {intermediate_size} is not divisible by tp_size "
                f"{self.tp_size}; choose another tp_size, or expert parallelism, which leaves experts whole"
            )
        self.intermediate_size = intermediate_size
        self.unpadded_hidden_size = hidden_size
        self.intermediate_size_per_partition = intermediate_size // self.tp_size
        self.tp_shard_with_padding = False
        method = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        self.quant_method: FusedMoEMethodBase = UnquantizedFusedMoEMethod() if method is None else method
        self.hidden_size, self.intermediate_size_per_partition = self.quant_method.maybe_roundup_sizes(
            hidden_size, self.intermediate_size_per_partition, self.params_dtype, self.parallel
        )
        self.quant_method.create_weights(
            layer=self,
            num_experts=self.local_num_experts,
            hidden_size=self.hidden_size,
            intermediate_size_per_partition=self.intermediate_size_per_partition,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )
        # Of scales that gate and up projection share, by parameter and position: which has come, and its value.
        self._half_of_pair: dict[tuple[str, int], tuple[str, float]] = {}

    @property
    def expert_map(self) -> torch.Tensor | None:
        """Where each expert is on this rank: see `determine_expert_map`."""
        return determine_expert_map(
            self.ep_size, self.ep_rank, self.global_num_experts, self.expert_placement_strategy
        )[1]

    # ---- loading

    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    def unwanted(self, name: str) -> str | None:
        """The rule by which a tensor of the checkpoint, named as for `load_weights`, is not for this rank; or None."""
        places, is_stacked = self._names.find(name)
        if is_stacked or not places or (name.endswith("input_scale") and self.quant_method.use_global_sf):
            return None
        return None if any(place.expert_id in self._position for place in places) else "expert of another rank"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        """Loads tensors as they come, CheckpointTensors or others. Of experts of other ranks nothing is read.

        Args:
            weights: tensors by their names in the checkpoint, without that of the layer: `7.gate_proj.weight`,
                `7.gate_up_proj.weight`, `gate_up_proj` (of all experts), `down_proj_bias`, ...

        Yields:
            Names of parameters, for each part that was loaded.

        Raises:
            CheckpointMismatchError: a name stands for no parameter, or a size does not fit.
        """
        for name, tensor in weights:
            places, is_stacked = self._names.find(name)
            if not places:
                self._refuse(name)
            # The shape of a packed weight is no part of it that could be halved.
            is_pair = len({place.shard_id for place in places}) > 1 and not name.endswith("_shape")
            for target, expert_id, shard_id in places:
                param = self._parameters.get(target)
                if param is None:
                    # Tools that quantise write biases, of zeros.
                    if not target.endswith("_bias") or self.quant_config is None:
                        self._refuse(name)
                    continue
                parts = [(expert_id, tensor)]
                if is_stacked or is_pair:
                    with name_in_errors(self, param):
                        part = self._part(tensor, param, shard_id, is_stacked=is_stacked, is_pair=is_pair)
                        parts = list(self._experts_in(part)) if is_stacked else [(expert_id, part)]
                # Methods may have put one of their own around it.
                loader = getattr(param, "weight_loader", self.weight_loader)
                for expert, part in parts:
                    if loader(param, part, self._full_name(target), shard_id, expert, return_success=True):
                        yield target

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Puts this rank's part of one expert's tensor, or of that of all experts, into its place.

        Args:
            param: of this layer.
            loaded_weight: as it is in the checkpoint, gate and up projection apart. With three dimensions, as `param`
                has: of all experts, whichever `expert_id` is.
            weight_name: name of the parameter or of the tensor; its last part says what it is: a weight, a bias, ...
            shard_id: "w1" gate, "w2" down, "w3" up.
            expert_id: of the layer; from num_experts on a copy.
            return_success: whether to return something.

        Returns:
            Whether something of it was for this rank.

        Raises:
            CheckpointMismatchError: a size is not that of the layer, or a rank's part is not one of whole elements.
            CheckpointError: gate and up projection share a scale, and have different ones.
            ValueError: another shard_id, or a scale whose parameter does not say what it is of.
        """
        if shard_id not in _SHARD_IDS:
            raise ValueError(f"shard_id must be {_SHARD_IDS} but got {shard_id!r}.")
        with name_in_errors(self, param):
            if loaded_weight.dim() == param.dim() == 3:
                parts = list(self._experts_in(loaded_weight))
            else:
                parts = [(expert_id, loaded_weight)]
            name = weight_name.rpartition(".")[2]
            loaded = [self._load(param, part, name, shard_id, expert) for expert, part in parts]
        return any(loaded) if return_success else None

    def _load(self, param: torch.nn.Parameter, loaded: torch.Tensor, name: str, shard_id: str, expert: int) -> bool:
        is_input_scale = "input_scale" in name
        position = expert if is_input_scale and self.quant_method.use_global_sf else self._position.get(expert)
        if position is None:
            return False
        kind = getattr(param, "quant_method", None)
        is_scale = any(word in name for word in ("scale", "zero", "offset"))
        if is_input_scale or (is_scale and kind == _TENSOR):
            self._load_number(param, loaded, name, shard_id, position)
            return True
        target = param.data[position]
        if "weight_shape" in name:
            if shard_id != "w3":  # that of gate and up projection is one
                copy_weight(target, loaded.reshape(target.shape))
            return True
        # The dimension along which ranks share an expert; None: they don't.
        dim: int | None = int((shard_id == "w2") != getattr(param, "is_transposed", False))
        if "bias" in name:
            dim = None if shard_id == "w2" else 0
        elif is_scale:
            if kind not in (_CHANNEL, _GROUP, _BLOCK):
                raise ValueError(
                    f"{self._full_name(name)}: its parameter has quant_method {kind!r}, which says what it is a scale "
                    f"of; accepted is {', '.join(kind.value for kind in FusedMoeWeightScaleSupported)}"
                )
        elif "weight" not in name:
            return False
        layout: MemoryLayout | None = getattr(param, "memory_layout", None)
        shape = list(target.shape if layout is None else layout.source_shape)
        if layout is None and dim is not None and shard_id != "w2" and self.is_gated:
            shape[dim] //= 2
        target = _projection(target, shape if layout is None else layout.shape, shard_id)
        whole = [self._size_in_checkpoint(size, is_cut=i == dim) for i, size in enumerate(shape)]
        if is_scale and kind == _BLOCK:
            loaded = self._refined(loaded, whole)
        elif is_scale and shard_id == "w2" and dim is not None and list(loaded.shape[dim:][:1]) == shape[dim:][:1]:
            # One for a whole row, or another reason for which the parameter has room for those of all ranks.
            whole[dim], dim = shape[dim], None
        if list(loaded.shape) != whole:
            raise UnfitWeightError(
                f"{shard_id} of expert {expert}: Tried to load weights of size {loaded.shape} to a part of size "
                f"{torch.Size(shape)} of a parameter of size {param.shape}; expected size {torch.Size(whole)}"
            )
        if dim is not None and self.tp_size > 1:
            size = shape[dim] if self.tp_shard_with_padding else whole[dim] // self.tp_size
            start = min(self.tp_rank * size, whole[dim])
            loaded = loaded.narrow(dim, start, min(size, whole[dim] - start))
        if layout is None or layout.shape == layout.source_shape:
            target = _fill_behind(target, loaded.shape, _ONE.get(target.dtype, 1) if "scale" in name else 0)
        if layout is None:
            copy_weight(target, loaded)
        else:
            layout.place(target, loaded, [0] * loaded.dim())
        return True

    def _size_in_checkpoint(self, size: int, *, is_cut: bool) -> int:
        """Of a dimension of a part (in elements, words, groups or blocks): its size there, of all ranks, not padded."""
        if not is_cut:
            return -(-size * self.unpadded_hidden_size // self.hidden_size)
        padded = self.intermediate_size_per_partition
        if self.tp_shard_with_padding:
            return -(-size * self.intermediate_size // padded)
        return -(-size * (self.intermediate_size // self.tp_size) // padded) * self.tp_size

    def _refined(self, scales: torch.Tensor, size: list[int]) -> torch.Tensor:
        """Scales of a checkpoint's blocks, for the smaller blocks of this layer, of which there are so many."""
        refine = self.quant_method.weight_scale_refine
        if refine is None or scales.dim() != 2:
            return scales
        for dim, repeats in enumerate(refine):
            scales = scales.repeat_interleave(repeats, dim=dim)
            if 0 < scales.shape[dim] - size[dim] < repeats:  # the last of the checkpoint's blocks is not full
                scales = scales.narrow(dim, 0, size[dim])
        return scales

    def _load_number(
        self, param: torch.nn.Parameter, loaded: torch.Tensor, name: str, shard_id: str, position: int
    ) -> None:
        """Loads a scale of a whole tensor: into the slot of w1 or w3, or into one for both."""
        if loaded.numel() != 1:
            raise UnfitWeightError(f"Tried to load a scale of size {loaded.shape}; expected one number")
        target = param.data[position]
        is_shared = shard_id != "w2" and self.is_gated and target.numel() == 1
        layout: MemoryLayout | None = getattr(param, "memory_layout", None)
        if layout is not None and layout.shape:  # one for each output
            target = _projection(target, layout.shape, shard_id)
        elif target.dim():
            target = target[-1 if shard_id == "w3" else 0]
        if is_shared:
            key, value = (name, position), float(loaded)
            other, other_value = self._half_of_pair.get(key, (shard_id, value))
            if other != shard_id:
                del self._half_of_pair[key]
                if not math.isclose(value, other_value, rel_tol=_SCALE_TOLERANCE):
                    raise CheckpointError(
                        f"scales of w1 and w3 of a layer must be equal. But got {other_value} vs. {value}",
                        reason="ScaleMismatch",
                        tensor=self._full_name(f"{name}[{position}]"),
                    )
                return
            self._half_of_pair[key] = shard_id, value
        if layout is None:
            copy_weight(target, loaded.reshape(()))
        else:
            layout.place(target, loaded.reshape(tuple(layout.source_shape)), [0] * len(layout.source_shape))

    # ---- tensors of several experts, or of several projections

    def _experts_in(self, stacked: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The experts of the layer that are in a tensor of all the checkpoint's, and that this rank has a place for."""
        if stacked.shape[:1] != (self.num_experts,):
            raise UnfitWeightError(
                f"Tried to load weights of size {stacked.shape} of all experts; expected {self.num_experts} of them"
            )
        for expert, logical in enumerate(self._logical):
            if expert in self._position or self.quant_method.use_global_sf:
                yield expert, stacked[logical]

    def _part(
        self, tensor: torch.Tensor, param: torch.nn.Parameter, shard_id: str, *, is_stacked: bool, is_pair: bool
    ) -> torch.Tensor:
        """What is of one shard, in a tensor of all experts (`is_stacked`), or of gate and up projection (`is_pair`)."""
        kind = getattr(param, "quant_method", None)
        # Scales that are not those of blocks do not lie as the weights do.
        if is_stacked and self.is_fused_checkpoint_transposed and tensor.dim() == 3 and kind in (None, _BLOCK):
            tensor = tensor.transpose(-1, -2)
        dim = 1 if is_stacked else 0
        if getattr(param, "is_transposed", False) and tensor.dim() == dim + 2:
            dim += 1
        # One scale of a whole tensor is that of both projections.
        if not is_pair or tensor.dim() <= dim or tensor.shape[dim] == 1:
            return tensor
        size, remainder = divmod(tensor.shape[dim], 2)
        if kind == _BLOCK and self.quant_method.weight_block_size is not None:
            remainder = remainder or self.intermediate_size % self.quant_method.weight_block_size[0]
        if remainder:
            raise UnfitWeightError(
                f"Tried to load gate and up projection from weights of size {tensor.shape}, where they are not half of "
                f"dimension {dim} each, or the last block of the one is the first of the other"
            )
        return tensor.narrow(dim, size if shard_id == "w3" else 0, size)

    def _refuse(self, name: str) -> NoReturn:
        projections = listed(name for name in self.ckpt_names if name is not None)
        raise CheckpointMismatchError(
            type(self).__name__,
            unexpected_keys=[self._full_name(name)],
            remedy=f"{self.prefix or 'The layer'} has {self.num_experts} experts with {projections}, "
            f"and the parameters {listed(self._parameters)}.",
        )

    def _full_name(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    # ---- running

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """What the experts make of each token, weighted and summed.

        Args:
            hidden_states: [..., hidden_size].
            router_logits: [..., num_experts].

        Returns:
            As `hidden_states`. Without `reduce_results`, what this rank adds to the sum over the ranks.
        """
        x = hidden_states.flatten(0, -2)
        logits = router_logits.flatten(0, -2)
        if self.custom_routing_function is not None:
            weights, experts = self.custom_routing_function(
                hidden_states=x, gating_output=logits, topk=self.top_k, renormalize=self.renormalize
            )
        else:
            weights, experts = route(
                logits,
                self.top_k,
                renormalize=self.renormalize,
                num_expert_group=self.num_expert_group if self.use_grouped_topk else None,
                topk_group=self.topk_group if self.use_grouped_topk else None,
                scoring_func=self.scoring_func,
                routed_scaling_factor=self.routed_scaling_factor,
                e_score_correction_bias=self.e_score_correction_bias,
            )
        if self.hidden_size > self.unpadded_hidden_size:
            x = F.pad(x, (0, self.hidden_size - self.unpadded_hidden_size))
        output = self.quant_method.apply(self, x, weights, experts)
        output = output[:, : self.unpadded_hidden_size].reshape(hidden_states.shape)
        if not self.reduce_results:
            return output
        return self.parallel.ep_all_reduce(output) if self.ep_size > 1 else self.parallel.tp_all_reduce(output)


def _projection(expert: torch.Tensor, shape: Sequence[int], shard_id: str) -> torch.Tensor:
    """The part of an expert's memory in which a projection has that shape: of gate and up, one lies after the other."""
    for dim, size in enumerate(shape):
        if expert.shape[dim] != size:
            return expert.narrow(dim, size if shard_id == "w3" else 0, size)
    return expert


def _fill_behind(target: torch.Tensor, shape: Sequence[int], padding: float) -> torch.Tensor:
    """The start of each dimension, of that shape; what is behind is filled."""
    for dim, size in enumerate(shape):
        if size < target.shape[dim]:
            target.narrow(dim, size, target.shape[dim] - size).fill_(padding)
            target = target.narrow(dim, 0, size)
    return target
