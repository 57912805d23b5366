"""The loader of a small inference engine, as such engines have it; and what is left of it with weightlift.

    python -m examples.house_engine

Writes a checkpoint, loads it both ways as rank 1 of 2, compares, and says how much of the files was read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import weightlift


class QKVProjection(nn.Linear):
    """q, k and v in one parameter, cut by heads."""

    def __init__(self, hidden: int, *, rank: int, world_size: int) -> None:
        super().__init__(hidden, 3 * hidden // world_size, bias=False)
        self.rows, self.rank = hidden // world_size, rank
        setattr(self.weight, "weight_loader", self.weight_loader)  # noqa: B010  # unknown to mypy

    def weight_loader(self, param: Tensor, loaded: Tensor, shard_id: str) -> None:
        place = param.data.narrow(0, "qkv".index(shard_id) * self.rows, self.rows)
        place.copy_(loaded.narrow(0, self.rank * self.rows, self.rows))


class Model(nn.Module):
    # name in the checkpoint -> (name here, which part of it)
    packed_modules_mapping = {  # noqa: RUF012  # as engines have it
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
    }

    def __init__(self, hidden: int = 64, layers: int = 2, *, rank: int, world_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv_proj": QKVProjection(hidden, rank=rank, world_size=world_size)}) for _ in range(layers)
        )


def load_by_hand(model: Model, folder: Path) -> None:
    """Reads every file whole, on every rank, and forgets to ask what was not loaded."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                for part, (packed, shard_id) in model.packed_modules_mapping.items():
                    if part in name:
                        param = model.get_parameter(name.replace(part, packed))
                        param.weight_loader(param, file.get_tensor(name), shard_id)  # type: ignore[attr-defined]
                        break
                else:
                    param = model.get_parameter(name)
                    loader = getattr(param, "weight_loader", None)
                    if loader is not None:
                        loader(param, file.get_tensor(name))
                    else:
                        param.data.copy_(file.get_tensor(name))


def load(model: Model, folder: Path) -> weightlift.LoadReport:
    """Reads this rank's part. What is missing, unexpected, of another size or only partly filled is an error."""
    mapper = weightlift.WeightsMapper(orig_to_new_stacked=model.packed_modules_mapping)
    return weightlift.fast_load(model, folder, mapper=mapper)


def write_checkpoint(folder: Path, hidden: int = 64, layers: int = 2) -> None:
    names = [f"layers.{layer}.{part}_proj.weight" for layer in range(layers) for part in "qkv"]
    tensors = {name: torch.randn(hidden, hidden) for name in names} | {"norm.weight": torch.randn(hidden)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def main() -> None:
    hidden = 1024
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_checkpoint(folder, hidden)
        by_hand, model = (Model(hidden, rank=1, world_size=2) for _ in range(2))
        load_by_hand(by_hand, folder)
        report = load(model, folder)
        expected = by_hand.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        size = (folder / "model.safetensors").stat().st_size
        print(f"equal; {report.bytes_read / 2**20:.1f} of {size / 2**20:.1f} MiB were read")


if __name__ == "__main__":
    main()
