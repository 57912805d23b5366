"""CUDA: of this build, of the driver, of the devices, and of torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..report import format_bytes
from .finding import Finding

_found = functools.partial(Finding, "CUDA")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor; class, of which 3D controllers are one
_PCI = Path("/sys/bus/pci/devices")
_EFFECT = "tensors on a GPU are filled through torch's copies, a tensor at a time"


def examine_cuda() -> list[Finding]:
    info = _C.cuda_info()
    gpus = num_gpus()
    found = [_build(info, gpus), _driver(info, gpus)]
    found += [_device(i, device, info["architectures"]) for i, device in enumerate(info["devices"])]
    found.append(_torch(gpus))
    return found


def num_gpus(pci: Path = _PCI) -> int:
    """NVIDIA GPUs that the kernel sees on the bus, with a driver or without; in some containers it shows none."""
    try:
        devices = [((device / "vendor").read_text(), (device / "class").read_text()) for device in pci.iterdir()]
    except OSError:
        return 0
    return sum(vendor.strip() == _NVIDIA and kind.startswith(_DISPLAY) for vendor, kind in devices)


def _build(info: dict[str, Any], gpus: int) -> Finding:
    details = {key: info[key] for key in ("built", "architectures", "runtime_version")}
    if info["built"]:
        runtime, code = _version(info["runtime_version"]), _in_words(info["architectures"])
        summary = f"CUDA is part of it: runtime {runtime}, code for {code}"
        return _found("build", "ok", summary, details)
    remedy = "put nvcc of CUDA 12.8 or later on PATH, and build again (WEIGHTLIFT_CUDA=ON makes its lack an error)"
    summary = "CUDA is not part of it" + ("" if gpus else ", and no NVIDIA GPU is seen")
    return _found("build", "missing", summary, details, _EFFECT, remedy)


def _driver(info: dict[str, Any], gpus: int) -> Finding:
    details = {"driver_version": info["driver_version"], "error": info["error"] or None, "gpus_on_bus": gpus}
    if not info["built"]:
        return _found("driver", "missing", "not asked: CUDA is not part of this build", details)
    if info["driver_version"] == 0:
        seen = f"{gpus} GPUs of NVIDIA's are on the PCI bus" if gpus else "no GPU of NVIDIA's is seen on the PCI bus"
        remedy = "install NVIDIA's driver; in a container: docker run --gpus all (nvidia-container-toolkit)"
        return _found("driver", "missing", f"there is none; {seen}", details, _EFFECT, remedy)
    driver, runtime = info["driver_version"], info["runtime_version"]
    summary = f"serves CUDA {_version(driver)}"
    if driver // 1000 < runtime // 1000:
        older = ", or weightlift built by nvcc 12.8, which serves drivers of CUDA 12" if driver // 1000 == 12 else ""
        remedy = f"a driver for CUDA {runtime // 1000}{older}"
        summary += f", and this build needs CUDA {runtime // 1000}"
        return _found("driver", "missing", summary, details, _EFFECT, remedy)
    if info["error"]:
        remedy = "see nvidia-smi and CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all"
        return _found("driver", "missing", f"{summary}, but: {info['error']}", details, _EFFECT, remedy)
    return _found("driver", "ok", f"{summary}; {len(info['devices'])} devices", details)


def _device(index: int, device: dict[str, Any], architectures: str) -> Finding:
    major, minor = device["compute_capability"]
    details = {**device, "compute_capability": f"{major}.{minor}"}
    subject = f"device {index}"
    summary = f"{device['name']}, {format_bytes(device['memory_bytes'])}, compute capability {major}.{minor}"
    build = f"build with WEIGHTLIFT_CUDA_ARCHITECTURES={major}{minor}"
    code = code_for(major, minor, architectures)
    if code == "binary":
        return _found(subject, "ok", summary, details)
    if code == "PTX":
        effect = "the first load on it takes longer; the driver keeps what it has translated"
        return _found(subject, "limited", f"{summary}: the driver has to translate PTX", details, effect, build)
    remedy = build if major >= 8 else "a GPU of compute capability 8.0 or later"
    return _found(subject, "missing", f"{summary}: this build has no code for it", details, _EFFECT, remedy)


def _parsed(architectures: str) -> Iterator[tuple[int, str]]:
    """CMake's words for architectures: 90 of `90a-real`, and "real" (binary), "virtual" (PTX) or "" (both)."""
    for word in architectures.split():
        number, _, kind = word.partition("-")
        yield int(number.rstrip("af")), kind


def code_for(major: int, minor: int, architectures: str) -> str:
    """ "binary", "PTX" or "": what a build has for a device.

    A binary runs on its own major version, from its minor version on; PTX on everything later.
    See https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Binary Compatibility" and "PTX Compatibility".
    """
    here = 10 * major + minor
    code = set()
    for number, kind in _parsed(architectures):
        if kind != "virtual" and number // 10 == major and number <= here:
            code.add("binary")
        if kind != "real" and number <= here:
            code.add("PTX")
    return "binary" if "binary" in code else "PTX" if code else ""


def _in_words(architectures: str) -> str:
    parsed = list(_parsed(architectures))
    words = [f"sm_{number}" for number, kind in parsed if kind != "virtual"]
    words += [f"PTX of compute_{number}" for number, kind in parsed if kind != "real"]
    return ", ".join(words)


def _torch(gpus: int) -> Finding:
    details: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.version.cuda is None:
        summary = f"{torch.__version__}, built without CUDA" + (
            f", for ROCm {torch.version.hip}" * bool(torch.version.hip)
        )
        remedy = "pip install a CUDA build of torch (https://pytorch.org/get-started)"
        return _found("torch", "missing", summary, details, "no tensor can be on a GPU", remedy)
    details["available"] = torch.cuda.is_available()
    summary = f"{torch.__version__}, CUDA {torch.version.cuda}"
    if not details["available"]:
        remedy = "see driver and devices above" if gpus else ""
        return _found("torch", "missing", f"{summary}: no device", details, "no tensor can be on a GPU", remedy)
    return _found("torch", "ok", f"{summary}; {torch.cuda.device_count()} devices", details)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
