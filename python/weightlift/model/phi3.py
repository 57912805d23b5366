"""Phi-3: Llama's decoder, whose projections are fused on disk already. Layers cut what is fused; names are equal."""

from __future__ import annotations

from .llama import MistralForCausalLM
from .mapping import WeightsMapper


class Phi3ForCausalLM(MistralForCausalLM):
    hf_to_weightlift_mapper = WeightsMapper()
