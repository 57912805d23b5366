"""Why a quantised checkpoint does not fit a model: the likely cause, told by names, shapes and dtypes.

A failed load names tensors: missing, unexpected, of another size, parts of parameters that nothing fills. What users
have to put right is elsewhere, mostly in config.json. Here one becomes the other; no data of tensors are read.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch

from ...entries import TensorEntry
from ...errors import CheckpointMismatchError, listed, printable
from ...names import natural_key
from ..mapping import WeightsMapper

# Last parts of the names of tensors that quantised layers have and others do not.
_SCALES = ("weight_scale", "weight_scale_inv", "scales")
_OTHERS = (
    *("input_scale", "weight_scale_2", "weight_global_scale", "input_global_scale", "weight_zero_point", "qzeros"),
    *("weight_packed", "qweight", "weight_shape", "g_idx", "weight_g_idx"),
)
_OF_QUANTISED = frozenset((*_SCALES, *_OTHERS))
_OF_ONE_EXPERT = re.compile(r"(?<=\.experts)\.\d+\.[^.]+$")
_WHICH_OF_EXPERTS = re.compile(r"^w(13|2)_")
_WEIGHTS = ("weight", "weight_packed", "qweight")
_ACT_ORDER = ("g_idx", "weight_g_idx")
# What whose tensors are called.
_SCHEMES = {
    "weight_scale_inv": "scales of blocks of quant_method fp8 with weight_block_size (factors, in spite of the name)",
    "weight_scale": "scales of compressed-tensors, of ModelOpt, and of FP8 without blocks",
    "scales": "scales of GPTQ and AWQ",
    "qweight": "packed weights of GPTQ and AWQ",
    "weight_packed": "packed weights of compressed-tensors",
    "weight_global_scale": "scales of NVFP4 of compressed-tensors",
    "weight_scale_2": "scales of NVFP4 of ModelOpt",
    "weight": "weights that are not packed",
}


@contextlib.contextmanager
def explained(model: object, entries: Mapping[str, TensorEntry], mapper: WeightsMapper | None) -> Iterator[None]:
    """Adds the likely causes to a CheckpointMismatchError that comes out of the block.

    Args:
        model: a module; what it says of its quantisation is `quant_config`, as in vLLM.
        entries: the tensors of the checkpoint.
        mapper: from their names to those of the model.
    """
    try:
        yield
    except CheckpointMismatchError as error:
        causes = likely_causes(error, model, entries, mapper) if isinstance(model, torch.nn.Module) else []
        if causes:
            error.args = ("\n\t".join([str(error), *causes]),)
        raise


def likely_causes(
    error: CheckpointMismatchError,
    model: torch.nn.Module,
    entries: Mapping[str, TensorEntry],
    mapper: WeightsMapper | None,
) -> list[str]:
    """Sentences, each with the name of a tensor, what was expected, what was found, and what to do about it."""
    facts = _Facts(error, model, entries, mapper)
    causes = [facts.of_parts()]
    if facts.config_name == "online":
        causes.append(facts.of_online())
    elif facts.config is None:
        causes.append(facts.of_no_config())
    elif not facts.is_quantised:
        causes += [facts.of_sizes(), facts.of_plain_checkpoint()]
    else:
        causes += [
            facts.of_sizes(),
            facts.of_names(),
            facts.of_act_order(),
            facts.of_activations(),
            facts.of_scales(),
            facts.of_ignored(),
        ]
    return [cause for cause in causes if cause]


class _Facts:
    """What names, shapes and dtypes tell."""

    def __init__(
        self,
        error: CheckpointMismatchError,
        model: torch.nn.Module,
        entries: Mapping[str, TensorEntry],
        mapper: WeightsMapper | None,
    ) -> None:
        self.error = error
        self.model = model
        self.config: Any = getattr(model, "quant_config", None)
        # vLLM's have a method for it.
        self.config_name = str(getattr(self.config, "name", "") or type(self.config).__name__)
        self.entries = entries
        self.sources: defaultdict[str, list[TensorEntry]] = defaultdict(list)  # by names of the model
        for name, entry in entries.items():
            for target, _ in mapper.map_name(name) if mapper is not None else [(name, None)]:
                self.sources[target].append(entry)
        self.weights: dict[str, TensorEntry] = {}  # one of each layer of the model
        for target, sources in self.sources.items():
            if _leaf(target) in _WEIGHTS:
                self.weights.setdefault(_layer(target), sources[0])
        unexpected = set(error.unexpected_keys)
        self.unexpected = {
            target: entry.name
            for target, sources in self.sources.items()
            for entry in sources
            if entry.name in unexpected and _leaf(target) in _OF_QUANTISED
        }
        self.missing = [name for name in error.missing_keys if _leaf(name) in (*_OF_QUANTISED, "weight")]
        self.is_quantised = any(_is_of_quantised(name, entry) for name, entry in entries.items())
        self.stacked = {} if mapper is None else mapper.orig_to_new_stacked

    def of_online(self) -> str:
        """Of a checkpoint that is quantised, and was to be quantised while it is loaded."""
        found = [name for name, entry in self.entries.items() if _is_of_quantised(name, entry)]
        if not found:
            return ""
        return (
            f"The checkpoint is quantised: it has {printable(min(found, key=natural_key))}. `quantization` is for "
            "weights in floating point: leave it out, and take the config.json that belongs to the weights."
        )

    def of_no_config(self) -> str:
        """Of a checkpoint that is quantised and a model that is not."""
        if not self.unexpected:
            return ""
        leaves = sorted({_leaf(name) for name in self.unexpected})
        example = min(self.unexpected.values(), key=natural_key)
        return (
            f"The checkpoint is quantised, the model is not: {printable(example)} and other tensors "
            f"({', '.join(leaves)}) are those of quantised layers. The model was built without a quantization_config: "
            "take the config.json that belongs to the weights."
        )

    def of_plain_checkpoint(self) -> str:
        """Of a config that promises scales, and a checkpoint that has none at all."""
        if not self.missing and not self.error.mismatched:
            return ""
        layers = [_layer(name) for name in self.missing]
        entry = next((self.weights[layer] for layer in layers if layer in self.weights), None)
        if entry is None:
            return ""
        return (
            f"The config says {self.config_name}, and no tensor of the checkpoint is quantised: "
            f"{printable(entry.name)} is {_dtype(entry)}, and there are no scales. Remove quantization_config from "
            "config.json, or take the weights that belong to it."
        )

    def of_names(self) -> str:
        """Of tensors that are there under another name than that of the config's scheme."""
        by_layer: defaultdict[str, set[str]] = defaultdict(set)
        for name in self.unexpected:
            by_layer[_layer(name)].add(_leaf(name))
        for name in self.missing:
            layer, wanted = _layer(name), _leaf(name)
            kinds = _SCALES if wanted in _SCALES else _WEIGHTS
            found = sorted(by_layer[layer] & set(kinds)) if wanted in kinds else []
            if found:
                return (
                    f"{layer}: expected {wanted}, {_SCHEMES[wanted]}, found {found[0]}, {_SCHEMES[found[0]]}. The "
                    f"config says {self._scheme(layer)}; it does not belong to these weights, or they were renamed."
                )
        for name in sorted(self.unexpected, key=natural_key):
            leaf = _leaf(name)
            if leaf in _SCHEMES and not self.missing:
                return (
                    f"{printable(self.unexpected[name])}: {_SCHEMES[leaf]}; the config says "
                    f"{self._scheme(_layer(name))}, which has none: it does not belong to these weights."
                )
        return ""

    def of_act_order(self) -> str:
        names = [self.unexpected[name] for name in self.unexpected if _leaf(name) in _ACT_ORDER]
        if not names:
            return ""
        return (
            f"{printable(min(names, key=natural_key))}: the groups of these weights are in the order of activations "
            "(act-order), which is not supported: quantise with static groups (`actorder` static or null, `desc_act` "
            "false)."
        )

    def of_activations(self) -> str:
        found = [self.unexpected[name] for name in self.unexpected if _leaf(name) == "input_scale"]
        if found:
            return (
                f"{printable(min(found, key=natural_key))}: scales of activations, which are static on disk; the "
                "config says that they are dynamic, so that there is no parameter for them: activation_scheme static, "
                "or dynamic false under input_activations, belongs to these weights."
            )
        missing = [name for name in self.missing if _leaf(name) == "input_scale"]
        if missing and not any(_leaf(name) == "input_scale" for name in self.entries):
            return (
                f"{missing[0]}: the config says that scales of activations are static, and the checkpoint has none: "
                "activation_scheme dynamic, or dynamic true under input_activations, belongs to these weights."
            )
        return ""

    def of_scales(self) -> str:
        """Of layers without scales, where others have theirs."""
        for name in self.missing:
            if _leaf(name) not in _SCALES:
                continue
            layer = _layer(name)
            if any(_layer(other) == layer for other in self.unexpected):
                continue
            weight = self.weights.get(layer)
            if weight is None:
                continue
            if weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
                return self._of_plain_layer(layer, weight)
            return (
                f"{name}: {printable(weight.name)} is quantised ({_dtype(weight)}), and its scale is not in the "
                "checkpoint: a shard is missing, or it was lost when the checkpoint was written; without it, the "
                "weight has no value."
            )
        return ""

    def _of_plain_layer(self, layer: str, weight: TensorEntry) -> str:
        return (
            f"{layer} is not quantised in the checkpoint: {printable(weight.name)} is {_dtype(weight)} and has no "
            "scale. The config does not name it among the layers that are not (ignore, ignored_layers, "
            "modules_to_not_convert): add it there."
        )

    def of_ignored(self) -> str:
        """Of entries that name nothing: layers that they were meant for are taken for quantised."""
        modules = {_layer(name) for name in (*self.sources, *self.entries)}
        names = self.config.unmatched_ignore_names(modules) if hasattr(self.config, "unmatched_ignore_names") else []
        if not names:
            return ""
        return (
            f"Of the layers that the config says are not quantised, these name none, neither of the model nor of the "
            f"checkpoint: {listed(names)}. They may be written for another naming of the layers."
        )

    def of_parts(self) -> str:
        """Of fused parameters of which the checkpoint lacks a part."""
        for gap in self.error.gaps:
            name = re.split(r"\[| \(", gap)[0]
            sources = self.sources.get(name, [])
            parts = self._parts_of(name)
            absent = [part for part in parts if part not in self.entries]
            if absent and sources:
                there = [entry.name for entry in sources]
                return (
                    f"{name} is made of {len(parts)} tensors, and the checkpoint has no {listed(absent)}; it has "
                    f"{listed(there)}. A shard is missing, or the tensor was lost when the checkpoint was written."
                )
        return ""

    def of_sizes(self) -> str:
        """Of tensors that have the size of another kind of quantisation than the config's."""
        for clause in self.error.mismatched:
            name = clause.split(": ")[0]
            layer = self._module(_layer(name))
            source = next(iter(self.sources.get(name, [])), None)
            inputs = getattr(layer, "input_size", None)
            if source is None or type(inputs) is not int or self.config is None:
                continue
            leaf = _leaf(name)
            if " of dtype " in clause:
                return self._of_dtype(name, source)
            if leaf in _SCALES:
                found = _granularity(source.shape, self._outputs(name, source), inputs, leaf)
                wanted = self._wanted_granularity(layer, leaf)
                if found and wanted and found != wanted:
                    wrong = self._wrong_config(_layer(name), f", with {wanted}")
                    return f"{_place(source)}: {list(source.shape)} is {found}; {wrong}"
            elif leaf in ("weight_packed", "qweight"):
                return self._of_packed(name, source, inputs)
        return ""

    def _of_dtype(self, name: str, source: TensorEntry) -> str:
        if source.dtype.is_floating_point and source.dtype.itemsize > 1:
            return self._of_plain_layer(_layer(name), source)
        kind = ", exponents as those of MX formats" if _leaf(name) in _SCALES and source.dtype == torch.uint8 else ""
        return f"{_place(source)} is {_dtype(source)}{kind}; {self._wrong_config(_layer(name))}"

    def _of_packed(self, name: str, source: TensorEntry, inputs: int) -> str:
        if len(source.shape) != 2:
            return ""
        is_gptq = _leaf(name) == "qweight"
        if is_gptq and source.shape[0] == inputs:
            found = "packed along the outputs, as AWQ does"
        else:
            found = _bits(source.shape[0 if is_gptq else 1], source.dtype, inputs)
            found += ", packed along the inputs, as GPTQ does" if is_gptq else ""
        layer = self._module(_layer(name))
        shape = _source_shape(getattr(layer, _leaf(name), None))
        wanted = ""
        if len(shape) == 2 and not is_gptq:
            wanted = f", with {_bits(shape[1], source.dtype, getattr(layer, 'input_size_per_partition', inputs))}"
        wrong = self._wrong_config(_layer(name), wanted)
        return f"{_place(source)}: {list(source.shape)} {_dtype(source)} is {found}; {wrong}"

    def _wrong_config(self, layer: str, wanted: str = "") -> str:
        return f"the config says {self._scheme(layer)}{wanted}. It does not belong to these weights."

    def _scheme(self, layer: str) -> str:
        """What a layer was made for, in words of the config and the method."""
        method = getattr(self._module(layer), "quant_method", None)
        return f"{self.config_name} ({type(method).__name__})" if method is not None else self.config_name

    def _module(self, name: str) -> torch.nn.Module | None:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None

    def _parts_of(self, name: str) -> list[str]:
        """The tensors that a fused parameter is made of, by the names of the checkpoint that are known for others."""
        layer, leaf = _layer(name), _leaf(name)
        parent, _, fused = layer.rpartition(".")
        parts = [old.strip(".") for old, (new, _) in self.stacked.items() if new.strip(".") == fused]
        return [f"{parent}.{part}.{leaf}" for part in dict.fromkeys(parts)]

    def _outputs(self, name: str, source: TensorEntry) -> int:
        """How many outputs the weight that belongs to a scale has on disk."""
        weight = self.entries.get(f"{_layer(source.name)}.weight") or self.entries.get(
            f"{_layer(source.name)}.weight_packed"
        )
        return weight.shape[0] if weight is not None and weight.shape else 0

    def _wanted_granularity(self, layer: Any, leaf: str) -> str:
        inputs, outputs = (
            getattr(layer, "input_size_per_partition", 0),
            sum(getattr(layer, "output_partition_sizes", [])),
        )
        return _granularity(_source_shape(getattr(layer, leaf, None)), outputs, inputs, leaf) if inputs else ""


def _is_of_quantised(name: str, entry: TensorEntry) -> bool:
    return _leaf(name) in _OF_QUANTISED or (_leaf(name) == "weight" and entry.dtype.itemsize == 1)


def _source_shape(parameter: Any) -> tuple[int, ...]:
    """The shape that a parameter has on disk, as this rank has it; empty where there is none."""
    return tuple(getattr(parameter, "source_shape", getattr(parameter, "shape", ())))


def _bits(words: int, dtype: torch.dtype, inputs: int) -> str:
    return f"{Fraction(words * 8 * dtype.itemsize, inputs)} bits for each of {inputs} inputs"


def _place(source: TensorEntry) -> str:
    return f"{printable(source.shard.path)}: {printable(source.name)}"


def _granularity(shape: Iterable[int], outputs: int, inputs: int, leaf: str) -> str:
    """What each scale of such a shape is for."""
    sizes = list(shape)
    if leaf == "scales":
        sizes.reverse()
    if len(sizes) < 2:
        return "one scale for each output" if sizes and sizes[0] == outputs > 1 else "one scale for the tensor"
    if len(sizes) > 2 or not outputs or 0 in sizes:
        return ""
    rows, columns = -(-outputs // sizes[0]), -(-inputs // sizes[1])
    if rows > 1:
        return "one scale for the tensor" if sizes == [1, 1] else f"a scale for each block of {rows} x {columns}"
    return "one scale for each output" if sizes[1] == 1 else f"a scale for each group of {columns} inputs"


def _layer(name: str) -> str:
    """The layer that a tensor belongs to; the experts of a layer are one."""
    return _OF_ONE_EXPERT.sub("", name.rpartition(".")[0])


def _leaf(name: str) -> str:
    """What a tensor is of its layer; of the experts' two, which are in the model under `w13_` and `w2_`, the same."""
    return _WHICH_OF_EXPERTS.sub("", name.rpartition(".")[2])


def _dtype(entry: TensorEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")
