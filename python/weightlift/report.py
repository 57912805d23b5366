"""LoadReport: what a load did, how, and why that way."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import printable
from .names import fold


def format_bytes(num_bytes: int) -> str:
    """A size for people.

    >>> format_bytes(1536)
    '1.50 KiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


@dataclasses.dataclass(slots=True)
class FileReport:
    """What was read of one file."""

    path: str
    bytes_read: int
    reader: str  # "io_uring" or "pread"
    strategy: str  # "direct", "buffered", "direct (unproven)", or "mixed"
    reason: str  # why this reader and strategy, in one sentence


@dataclasses.dataclass(slots=True)
class LoadReport:
    """What a load did. Sizes are bytes; times are seconds.

    Attributes:
        missing_keys, unexpected_keys: as in ``nn.Module.load_state_dict``: names that only the model, or only the
            checkpoint, has.
        skipped: names of tensors of the checkpoint that were not wanted, each with the rule that says so.
        num_tensors: tensors of the checkpoint that the load used.
        num_transfers: copies that were recorded and carried out, and reads of values on the spot.
        num_dropped: recorded copies that were never carried out, because later ones overwrote all they would write.
        num_forced: tensors read before their turn, because something looked at their values while recording.
        bytes_needed: bytes of the files that the transfers asked for; small neighbours of a value included, which are
            read along with it.
        bytes_read: bytes read to get them: gaps and alignment included.
        num_reads: reads that brought them.
        direct_bytes, buffered_bytes: of bytes_read, how many passed by, and through, the page cache.
        num_whole_tensor_ops: ops of `weightlift.ops` that held a whole tensor of more than a chunk in memory, beside
            their destination: the result depends on all of it (act-order), what it is made of does not lie in the file
            as rows, or the destination is not made of rows. All others hold a chunk.
        whole_tensor_bytes: the memory that the largest of them held.
        in_place_bytes: of bytes_read, how many were read straight into their destination, without staging.
        device_bytes: bytes that were copied to GPUs, by the core's own streams.
        device_scratch_bytes: memory of GPUs that this took besides the parameters.
        seconds: by phase: "header" (find and parse the files), "record" (run the weight loaders), "wait" (for storage,
            after recording ended) and "total". Phases overlap only where the total is smaller than their sum.
        files: one entry for each file that was read; where reading was aborted and went on, in the words of its start.
        strategy_notes: whether files were prefetched into the page cache, what was decided for a network file system,
            for processes that share the machine, or for want of memory; and why.
        fallbacks: each thing that was wanted and could not be had, with cause and remedy.
        gaps: regions of parameters that nothing filled, such as "qkv_proj.weight[512:768]". Of `fast_load` alone, which
            knows the parameters; and so are double_writes.
        double_writes: regions of parameters with a weight loader that more than one transfer filled.
    """

    missing_keys: list[str] = dataclasses.field(default_factory=list)
    unexpected_keys: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    num_tensors: int = 0
    num_transfers: int = 0
    num_dropped: int = 0
    num_forced: int = 0
    bytes_needed: int = 0
    bytes_read: int = 0
    num_reads: int = 0
    direct_bytes: int = 0
    buffered_bytes: int = 0
    in_place_bytes: int = 0
    num_whole_tensor_ops: int = 0
    whole_tensor_bytes: int = 0
    device_bytes: int = 0
    device_scratch_bytes: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    files: list[FileReport] = dataclasses.field(default_factory=list)
    strategy_notes: list[str] = dataclasses.field(default_factory=list)
    fallbacks: list[str] = dataclasses.field(default_factory=list)
    gaps: list[str] = dataclasses.field(default_factory=list)
    double_writes: list[str] = dataclasses.field(default_factory=list)

    @property
    def over_read(self) -> float:
        """Bytes read per byte needed; 1.0 where nothing was needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def bytes_per_second(self) -> float:
        """Needed bytes over the total time; 0.0 where no time was measured."""
        total = self.seconds.get("total", 0.0)
        return self.bytes_needed / total if total > 0 else 0.0

    def summary(self) -> str:
        """One line, fit for a log."""
        rate = self.bytes_per_second / (1 << 30)
        line = f"Loaded {format_bytes(self.bytes_needed)} in {self.seconds.get('total', 0.0):.2f} s ({rate:.2f} GiB/s)"
        if self.files:
            line += f" reader={_one_or_mixed(file.reader for file in self.files)}"
            line += f" strategy={_one_or_mixed(file.strategy for file in self.files)}"
        line += f" tensors={self.num_tensors} over_read={self.over_read:.3f}"
        for label, count in (
            ("missing", len(self.missing_keys)),
            ("unexpected", len(self.unexpected_keys)),
            ("skipped", len(self.skipped)),
            ("gaps", len(self.gaps)),
            ("twice", len(self.double_writes)),
            ("fallbacks", len(self.fallbacks)),
        ):
            if count:
                line += f" {label}={count}"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that ``json.dumps`` takes."""
        return {**dataclasses.asdict(self), "over_read": self.over_read, "bytes_per_second": self.bytes_per_second}

    def __str__(self) -> str:
        lines = [
            self.summary(),
            f"  tensors     {self.num_tensors} used, {self.num_transfers} transfers, {self.num_dropped} dropped, "
            f"{self.num_forced} forced",
            f"  bytes       {format_bytes(self.bytes_needed)} needed, {format_bytes(self.bytes_read)} read "
            f"({format_bytes(self.direct_bytes)} direct, {format_bytes(self.buffered_bytes)} buffered, "
            f"{format_bytes(self.in_place_bytes)} in place)",
            "  seconds     " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in self.seconds.items()),
        ]
        if self.device_bytes:
            lines.append(
                f"  device      {format_bytes(self.device_bytes)} copied to GPUs, through "
                f"{format_bytes(self.device_scratch_bytes)} of scratch there"
            )
        if self.num_whole_tensor_ops:
            lines.append(
                f"  whole       {self.num_whole_tensor_ops} ops held a whole tensor, "
                f"{format_bytes(self.whole_tensor_bytes)} the largest"
            )
        lines += [
            f"  file        {printable(f.path)}: {format_bytes(f.bytes_read)} by {f.reader}, {f.strategy}: {f.reason}"
            for f in self.files
        ]
        lines += [f"  strategy    {printable(note)}" for note in self.strategy_notes]
        for label, names in (
            ("missing", self.missing_keys),
            ("unexpected", self.unexpected_keys),
            ("gap", self.gaps),
            ("twice", self.double_writes),
        ):
            lines += [f"  {label:<11} {line}" for line in folded_lines(names)]
        lines += [f"  skipped     {line}" for line in skipped_lines(self.skipped)]
        lines += [f"  fallback    {printable(entry)}" for entry in self.fallbacks]
        return "\n".join(lines)


def folded_lines(names: Iterable[str]) -> list[str]:
    """A line for each pattern of names: `layers.{0-31}.norm.weight (32)`."""
    return [printable(pattern) + (f" ({count})" if count > 1 else "") for pattern, count in fold(names)]


def skipped_lines(skipped: Mapping[str, str]) -> list[str]:
    """The same of names by rule: `layers.{0-31}.rotary_emb.inv_freq (32): computed by the model`."""
    names_by_rule: defaultdict[str, list[str]] = defaultdict(list)
    for name, rule in skipped.items():
        names_by_rule[rule].append(name)
    return [
        f"{line}: {printable(rule)}" for rule, names in sorted(names_by_rule.items()) for line in folded_lines(names)
    ]


def _one_or_mixed(values: Iterable[str]) -> str:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else "mixed"
