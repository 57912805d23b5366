"""What a load gets where its user has not decided: by the storage, the processes of the machine, and its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._logging import logger
from .available_memory import available_bytes
from .config import DEFAULT_DEVICE_STAGING_BYTES, DEFAULT_STAGING_BYTES, KiB, MiB, ResolvedConfig
from .errors import CheckpointError, printable
from .filesystem import Mount, mount_of
from .local_rank import local_rank
from .report import format_bytes
from .storage import max_open_files

if TYPE_CHECKING:
    from .entries import Shard

# Sequential O_DIRECT reads of 1 GiB into huge-page buffers, on a 2-core VM with a virtio disk: 2 MiB at depth 4: 3.4
# GB/s, the best; at 16: 3.15; at 32: 3.1; 4 MiB the same.
QUEUE_DEPTH = 16
CHUNK_BYTES = 2 * MiB
CHUNK_UNIT = 64 * KiB  # the core cuts chunks in multiples of it
# An additional read costs about as much as 32 KiB of a running one: on the same disk, pieces of 4 KiB at depth 32 take
# 12.8 us each, while 3.05 GB/s move 32 KiB in 11 us. Half of that keeps what is read in vain under 2 % of pieces of
# 1 MiB.
MERGE_GAP_BYTES = 16 * KiB
MAX_THREADS = 8

# As the core has it (csrc/staging): streams of a GPU, each with its part of device_staging_bytes; and what a chunk may
# take there beside its bytes, to be aligned.
DEVICE_STREAMS = 4
DEVICE_SLICE_PADDING = 16 * KiB

# Across a network, a read waits for milliseconds. Through FUSE with 2 ms added to each request, buffered, cold, GB/s:
# depth 16 with 2 MiB 0.39, with 8 MiB 0.40; depth 32 with 2 MiB 0.44, with 8 MiB 0.52, the best; depth 64 with 2 MiB
# 0.38.
NETWORK_QUEUE_DEPTH = 32
NETWORK_CHUNK_BYTES = 8 * MiB
# Such a wait, one of 32 at a time, costs as much as 250 KiB at 4 GB/s, and 32 KiB at 0.5 GB/s.
NETWORK_MERGE_GAP_BYTES = 128 * KiB

# Opening a file for both ways to read takes two round trips, and the first of a mount one more, to try. Eight are open
# before their turn, so that the load does not wait for each.
NETWORK_OPEN_AHEAD = 8

# Each file may lie on one server of several (Lustre), or come as one stream (buckets): in order, one of them would work
# at a time. benchmarks/README.md has what that gives.
NETWORK_FILES_AT_ONCE = 8

# The destination needs memory too, and most of it: what staging may take of the memory that is available.
_STAGING_SHARE = 4
_LEAST_STAGING_BYTES = MiB


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers that a load goes by.

    Attributes:
        queue_depth: reads of storage in flight.
        num_threads: threads that copy and convert.
        chunk_bytes: of a staging buffer, and the most of one read.
        staging_bytes: of all staging buffers.
        device_staging_bytes: of each GPU that is written to, what copies there pass through.
        merge_gap_bytes: unwanted bytes up to which reading on is cheaper than a second read.
        open_ahead: files that are opened before their turn.
        files_at_once: files whose reads take turns.
        notes: what was decided otherwise than on an ordinary machine, and why.
    """

    queue_depth: int
    num_threads: int
    chunk_bytes: int
    staging_bytes: int
    device_staging_bytes: int
    merge_gap_bytes: int
    open_ahead: int
    files_at_once: int
    notes: tuple[str, ...]


def settle(config: ResolvedConfig, shards: Sequence[Shard]) -> Settings:
    """The numbers for a load of these files, with what the user decided as it is.

    Raises:
        CheckpointError: the user decided for more staging memory than this process may take.
    """
    notes: list[str] = []
    mounts = [mount_of(shard.path) for shard in {shard.device: shard for shard in shards}.values()]
    network = next((mount for mount in mounts if mount.is_network), None)
    queue_depth, chunk_bytes, merge_gap_bytes = QUEUE_DEPTH, CHUNK_BYTES, MERGE_GAP_BYTES
    if network is not None:
        queue_depth, chunk_bytes, merge_gap_bytes = NETWORK_QUEUE_DEPTH, NETWORK_CHUNK_BYTES, NETWORK_MERGE_GAP_BYTES
        notes.append(
            f"reads of up to {format_bytes(chunk_bytes)}, {queue_depth} in flight, gaps of up to "
            f"{format_bytes(merge_gap_bytes)} read along: {printable(network.point)} is {network.kind}, a network file "
            "system"
        )

    _, processes = local_rank()
    if processes > 1 and (config.queue_depth is None or config.staging_bytes is None):
        queue_depth = max(1, queue_depth // processes)
        notes.append(
            f"queue depth and staging memory divided by {processes}: so many processes share this machine "
            "(LOCAL_WORLD_SIZE)"
        )
    staging_bytes = _staging_bytes(config, shards, processes, notes)
    chunk_bytes = min(config.chunk_bytes or chunk_bytes, staging_bytes) // CHUNK_UNIT * CHUNK_UNIT

    for note in notes:
        logger.info("%s", note)
    return Settings(
        queue_depth=config.queue_depth or queue_depth,
        num_threads=config.num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0))),
        chunk_bytes=chunk_bytes,
        staging_bytes=staging_bytes,
        device_staging_bytes=config.device_staging_bytes or _device_staging_bytes(shards, chunk_bytes),
        merge_gap_bytes=merge_gap_bytes if config.merge_gap_bytes is None else config.merge_gap_bytes,
        open_ahead=0 if network is None else files_ahead(network),
        files_at_once=1 if network is None else NETWORK_FILES_AT_ONCE,
        notes=tuple(notes),
    )


def files_ahead(mount: Mount) -> int:
    """How many files are opened before their turn."""
    return min(NETWORK_OPEN_AHEAD, max_open_files() // 4) if mount.is_network else 0


def _device_staging_bytes(shards: Sequence[Shard], chunk_bytes: int) -> int:
    """For each stream of a GPU as much as could come at once: an op's whole tensor, where that is more than a chunk."""
    largest = max((shard.size for shard in shards), default=0)
    return min(DEFAULT_DEVICE_STAGING_BYTES, DEVICE_STREAMS * (max(largest, chunk_bytes) + DEVICE_SLICE_PADDING))


def _staging_bytes(config: ResolvedConfig, shards: Sequence[Shard], processes: int, notes: list[str]) -> int:
    available = available_bytes()
    if config.staging_bytes is not None:
        # Buffers that are never needed cost no memory.
        needed = min(config.staging_bytes, sum(shard.size for shard in shards))
        if needed > available:
            raise CheckpointError(
                f"staging_bytes is {config.staging_bytes}, and this process may take {format_bytes(available)} of "
                "memory (MemAvailable, and what its control groups leave); lower staging_bytes, or leave it out to "
                "have it chosen",
                reason="Unavailable",
            )
        return config.staging_bytes
    share = DEFAULT_STAGING_BYTES // processes
    room = available // (_STAGING_SHARE * processes)
    if room < share:
        part = f"1/{_STAGING_SHARE * processes}"
        share = max(room, _LEAST_STAGING_BYTES)
        notes.append(
            f"staging memory kept to {format_bytes(share)}: {part} of the {format_bytes(available)} of memory available"
        )
    # A read that the user asked for has to fit.
    return max(share, _LEAST_STAGING_BYTES, config.chunk_bytes or 0)
