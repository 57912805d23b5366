"""LoadConfig: every choice that a load leaves to its user.

Each field is decided by the first of these that says something: the argument, the environment variable
``WEIGHTLIFT_<FIELD>``, weightlift itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

Backend = Literal["auto", "io_uring", "pread"]
Strategy = Literal["auto", "direct", "buffered", "lazy", "eager", "prefetch", "torchao"]
PageCache = Literal["keep", "leave"]

# Beyond the destination, on a machine with enough memory that a load has to itself.
DEFAULT_STAGING_BYTES = 256 * MiB
DEFAULT_DEVICE_STAGING_BYTES = 256 * MiB

# Strategies that may read files into the page cache ahead of the load.
_PREFETCHING = ("auto", "prefetch")

_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": KiB, "M": MiB, "G": GiB}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of one field: how to read it, and what to tell of it."""

    automatic: str  # the automatic value, in words
    effect: str
    when: str  # when to change it
    accepted: str
    parse: Callable[[str], object]  # of an environment variable; raises ValueError
    check: Callable[[object], bool]
    constant: object = None  # the automatic value where it is known before the load; None: decided while loading


def _is_integer(value: object, low: int, high: int | None) -> bool:
    return type(value) is int and low <= value and (high is None or value <= high)


def parse_size(text: str) -> int:
    """A number of bytes, with a unit or without. Raises ValueError.

    >>> parse_size("256 MiB")
    268435456
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError
    return int(match[1]) * _SIZE_UNITS[(match[2] or "").upper()]


def _parse_boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError from None


def _choice(choices: tuple[str, ...], effect: str, when: str) -> Option:
    """The first choice is the automatic one."""
    accepted = "one of " + ", ".join(repr(choice) for choice in choices)
    return Option(choices[0], effect, when, accepted, str, lambda value: value in choices, choices[0])


def _count(automatic: str, effect: str, when: str, low: int, high: int, constant: int | None = None) -> Option:
    accepted = f"a whole number from {low} to {high}"
    return Option(automatic, effect, when, accepted, int, lambda value: _is_integer(value, low, high), constant)


def _size(
    automatic: str, effect: str, when: str, low: int, high: int | None = None, constant: int | None = None
) -> Option:
    limits = f"at least {low}" if high is None else f"from {low} to {high}"
    accepted = f"a number of bytes, {limits} (in the environment also with KiB, MiB or GiB)"
    return Option(automatic, effect, when, accepted, parse_size, lambda value: _is_integer(value, low, high), constant)


def _switch(effect: str, when: str, *, constant: bool) -> Option:
    accepted = "true or false (in the environment also 1 or 0)"
    return Option(
        str(constant).lower(), effect, when, accepted, _parse_boolean, lambda value: isinstance(value, bool), constant
    )


def _duration(effect: str, when: str, *, constant: float) -> Option:
    def check(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0

    return Option(str(constant), effect, when, "a number of seconds, 0 or more", float, check, constant)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """How to load. Every field may be left at None: the environment decides then, or else weightlift does.

    Example:
        >>> LoadConfig(strategy="buffered", queue_depth=64).queue_depth
        64

    Raises:
        ValueError: a value that its field does not accept. The message names the field, the value and what is accepted.
    """

    backend: Annotated[
        Backend | None,
        _choice(
            get_args(Backend),
            "Who reads: io_uring keeps many reads in flight from one thread; pread is a pool of threads.",
            "To rule io_uring out. A named backend that cannot be had is an error, never silently the other one.",
        ),
    ] = None
    strategy: Annotated[
        Strategy | None,
        _choice(
            get_args(Strategy),
            "direct: from the device to memory (O_DIRECT). buffered, or lazy: through the page cache, on demand. "
            "eager: each file is first read whole into the page cache. prefetch: threads read all files into it, ahead "
            "of the load. torchao: `iter_weights` puts torchao's flattened tensors together. auto: direct for what is "
            "not cached and no other rank of the node reads; prefetch on a network file system, for several processes "
            "of a machine (LOCAL_WORLD_SIZE), where all fits into 90 % of the memory available.",
            "buffered: processes of one machine read the same bytes; direct: to leave the page cache to others; "
            "prefetch, eager: storage that is slow at small or scattered reads.",
        ),
    ] = None
    page_cache: Annotated[
        PageCache | None,
        _choice(
            get_args(PageCache),
            "What becomes of what is read through the page cache. keep: it stays there. leave: the cache is left as it "
            "was found, but for headers: what was not in it before is dropped (RWF_DONTCACHE where it works, and "
            "POSIX_FADV_DONTNEED where this process may see what is cached).",
            "leave: the files are read once, and others need the memory or the cache.",
        ),
    ] = None
    prefetch_num_threads: Annotated[
        int | None,
        _count(
            "8",
            "Files that prefetch reads at a time, a thread each.",
            "Raise it on network storage that serves many files at once better than one.",
            1,
            1024,
            constant=8,
        ),
    ] = None
    prefetch_block_bytes: Annotated[
        int | None,
        _size(
            "16 MiB",
            "Bytes of a file that prefetch asks for at a time.",
            "Raise it on network storage with high latency.",
            64 * KiB,
            GiB,
            constant=16 * MiB,
        ),
    ] = None
    queue_depth: Annotated[
        int | None,
        _count(
            "16; 32 on a network file system; divided by LOCAL_WORLD_SIZE",
            "Reads of storage in flight; where pread reads, at most 64.",
            "Raise it on network storage with high latency; lower it where others share the device.",
            1,
            4096,
        ),
    ] = None
    chunk_bytes: Annotated[
        int | None,
        _size(
            "2 MiB; 8 MiB on a network file system; at most staging_bytes",
            "Most bytes of one read, rounded down to a multiple of 64 KiB.",
            "Lower it to keep staging memory small.",
            64 * KiB,
            GiB,
        ),
    ] = None
    staging_bytes: Annotated[
        int | None,
        _size(
            "256 MiB divided by LOCAL_WORLD_SIZE, at most a quarter of the memory available",
            "Bounds the host memory used beyond the destination, whatever the checkpoint's size.",
            "Raise it together with queue_depth or chunk_bytes. More than the memory available is an error.",
            MiB,
        ),
    ] = None
    device_staging_bytes: Annotated[
        int | None,
        _size(
            "256 MiB; less where the files are small",
            "Bounds the memory of each GPU that is used beyond the parameters there: what is converted, packed or "
            "scattered on the GPU passes through it. An op that needs more than a fourth at once gets memory besides.",
            "Lower it where parameters leave no room.",
            MiB,
        ),
    ] = None
    merge_gap_bytes: Annotated[
        int | None,
        _size(
            "16 KiB; 128 KiB on a network file system",
            "Bytes that nobody asked for, up to which reading on is taken to be cheaper than a second read.",
            "0 reads needed bytes only; raise it where every read is expensive.",
            0,
            GiB,
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        _count(
            "number of cores, at most 8",
            "Threads that copy and convert, and as many that copy out of the page cache.",
            "Lower it where cores are busy with other work.",
            1,
            1024,
        ),
    ] = None
    advise_hugepages: Annotated[
        bool | None,
        _switch(
            "Advises 2 MiB pages for large destinations that were not touched yet, and fills them ahead of direct "
            "reads; for buffered ones only where they come sooner than small pages.",
            "Turn it off where huge pages are scarce.",
            constant=True,
        ),
    ] = None
    io_timeout_seconds: Annotated[
        float | None,
        _duration(
            "How long storage may answer none of the reads in flight before the load ends with an error.",
            "Raise it where servers are known to be away for longer; 0 waits for ever.",
            constant=120.0,
        ),
    ] = None
    coverage_wait_seconds: Annotated[
        float | None,
        _duration(
            "How long reading waits for recording to end, so that coverage is proven before a byte is read.",
            "0 starts reading at once; raise it to have gaps in very large models reported before reading.",
            constant=0.25,
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None and not option.check(value):
                raise _refusal(f"LoadConfig.{name}", value, option)

    def resolve(self, environment: Mapping[str, str] | None = None) -> ResolvedConfig:
        """The values in force: argument, else environment variable, else automatic.

        Args:
            environment: instead of ``os.environ``.

        Raises:
            ValueError: a variable whose value its field does not accept, or fields that contradict each other.
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        given: dict[str, str] = {}  # what somebody decided, and where
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None:
                given[name] = f"LoadConfig.{name}"
            else:
                variable = environment_variable(name)
                value = _from_environment(variable, option, environment)
                if value is not None:
                    given[name] = variable
            values[name] = option.constant if value is None else value
        resolved = ResolvedConfig(**values)
        if resolved.strategy not in _PREFETCHING:
            for name in ("prefetch_num_threads", "prefetch_block_bytes"):
                # The environment's may be there for other loads than this one, whose strategy is an argument.
                if name in given and (getattr(self, name) is not None or self.strategy is None):
                    raise ValueError(
                        f"{given['strategy']} is {resolved.strategy!r}, which never prefetches, and {given[name]} is "
                        f"{values[name]}: they exclude each other; leave one out, or use strategy 'prefetch'"
                    )
        staging_bytes = resolved.staging_bytes or DEFAULT_STAGING_BYTES
        if resolved.chunk_bytes is not None and resolved.chunk_bytes > staging_bytes:
            raise ValueError(
                f"chunk_bytes is {resolved.chunk_bytes}, which is more than staging_bytes {staging_bytes}: "
                "a read has to fit into staging memory; lower chunk_bytes or raise staging_bytes"
            )
        if resolved.page_cache == "leave" and resolved.strategy in ("prefetch", "eager"):
            raise ValueError(
                f"{given['strategy']} is {resolved.strategy!r}, which fills the page cache ahead of the load, and "
                f"{given['page_cache']} is 'leave': they exclude each other; leave one out"
            )
        return resolved


OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(LoadConfig, include_extras=True).items()
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """A LoadConfig with the environment and the constant defaults filled in. None: decided while loading."""

    backend: Backend
    strategy: Strategy
    page_cache: PageCache
    prefetch_num_threads: int
    prefetch_block_bytes: int
    queue_depth: int | None
    chunk_bytes: int | None
    staging_bytes: int | None
    device_staging_bytes: int | None
    merge_gap_bytes: int | None
    num_threads: int | None
    advise_hugepages: bool
    io_timeout_seconds: float
    coverage_wait_seconds: float


def environment_variable(field_name: str) -> str:
    """Name of the variable that sets a field of LoadConfig.

    >>> environment_variable("queue_depth")
    'WEIGHTLIFT_QUEUE_DEPTH'
    """
    return f"WEIGHTLIFT_{field_name.upper()}"


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables whose names are nearly those of a setting: (found, meant), in words.

    >>> misspelt_variables({"WEIGHTLIFT_STRATEGI": "direct"})
    ['WEIGHTLIFT_STRATEGI is not a setting; WEIGHTLIFT_STRATEGY is']
    """
    known = [environment_variable(name) for name in OPTIONS]
    found = []
    for variable in environment:
        if variable.startswith("WEIGHTLIFT_") and variable not in known:
            for near in difflib.get_close_matches(variable, known, n=1, cutoff=0.9):
                found.append(f"{variable} is not a setting; {near} is")
    return found


def _from_environment(variable: str, option: Option, environment: Mapping[str, str]) -> object:
    text = environment.get(variable, "").strip()
    if not text:
        return None
    try:
        value = option.parse(text)
    except ValueError:
        raise _refusal(variable, text, option) from None
    if not option.check(value):
        raise _refusal(variable, text, option)
    return value


def _refusal(name: str, given: object, option: Option) -> ValueError:
    return ValueError(f"{name} is {given!r}; accepted is {option.accepted}")
