"""GPUs as destinations: which tensors the core can write to there, and what it asks of those who submit."""

from __future__ import annotations

import functools

import torch

from . import _C

HOST = -1

# The core has kernels for GPUs from this compute capability on.
_LEAST_CAPABILITY = (8, 0)

# Whether host memory plays the part of a GPU's: for tests, which replace the functions here as well. See
# csrc/staging/twin_device.h.
are_twins = False


def index_of(tensor: torch.Tensor) -> int | None:
    """Whose memory a real tensor is: HOST, or the index of a GPU; None where the core can't write to it."""
    if tensor.is_cpu:  # quicker to ask for than the device, which is an object made each time
        return HOST
    if tensor.is_cuda and not refusal(tensor.get_device()):
        return tensor.get_device()
    return None


def is_writable(device: torch.device) -> bool:
    """Whether the core can write to memory of a device; one without an index is the current one of its type."""
    if device.type != "cuda":
        return device.type == "cpu"
    return not refusal(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def refusal(index: int) -> str:
    """Why the core can't write to a GPU, with the remedy; empty where it can."""
    if torch.version.cuda is None:
        return "torch is not built for CUDA; the core has no kernels for other GPUs"
    info = _C.cuda_info()
    if not info["built"]:
        return "this build of weightlift has no CUDA; `weightlift doctor` says how to get one"
    if info["error"] or index >= len(info["devices"]):
        return f"{info['error'] or 'the CUDA runtime does not find it'}; see `weightlift doctor`"
    capability = info["devices"][index]["compute_capability"]
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        return f"its compute capability is {found}, and the core has kernels from {least} on"
    return ""


def current_stream(device: int) -> int:
    """The handle of torch's current stream of a GPU. It is asked for with each copy, so without making an object."""
    return torch._C._cuda_getCurrentRawStream(device)


class DeviceCaller:
    """What the core asks for while a batch is submitted.

    Attributes:
        scratch: memory of GPUs that copies pass through. To be held until the pipeline has ended.
    """

    def __init__(self) -> None:
        self.scratch: list[torch.Tensor] = []
        self._streams: dict[int, set[int]] = {}

    def note_stream(self, device: int) -> None:
        """Notes the current stream of a GPU: copies there that are recorded now come behind what it has been given."""
        self._streams.setdefault(device, set()).add(current_stream(device))

    def streams_of(self, device: int) -> list[int]:
        """The handles of the streams noted since the last call, and of the current one, which `allocate` uses."""
        self.note_stream(device)
        return sorted(self._streams.pop(device))

    def allocate(self, device: int, num_bytes: int) -> int:
        """The address of new memory there."""
        # Real memory, whatever modes the caller has set.
        with torch._C._DisableTorchDispatch():
            self.scratch.append(torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device}"))
        return self.scratch[-1].data_ptr()
