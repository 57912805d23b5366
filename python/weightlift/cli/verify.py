"""``weightlift verify``: whether the files of a checkpoint are whole and belong together."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from typing import Any

from weightlift.audit import Audit, audit
from weightlift.checkpoint import CheckpointSource
from weightlift.cli import source
from weightlift.cli.errors import CommandError
from weightlift.errors import CheckpointError, CheckpointNotFoundError, printable
from weightlift.manifest import ALGORITHMS, Manifest, compare, digest_files
from weightlift.model.packed_image import IMAGE_FILE, PackedImage
from weightlift.names import natural_key
from weightlift.progress import ProgressBar
from weightlift.report import format_bytes

NAME = "verify"
HELP = "Check a checkpoint's headers, index and file sizes, and its data against a manifest; list every problem."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    manifest = parser.add_mutually_exclusive_group()
    manifest.add_argument("--manifest", metavar="FILE", help="read every file, and compare with what FILE says of it")
    manifest.add_argument(
        "--write-manifest",
        metavar="FILE",
        help="read every file, and write sizes and digests to FILE, unless there is a problem",
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help=f"of --write-manifest (default: {ALGORITHMS[0]})"
    )
    parser.add_argument("--progress", action="store_true", help="show a bar on stderr")


def run(options: argparse.Namespace) -> int:
    checkpoint = source.source_of(options)
    image = PackedImage.find(checkpoint)
    if image is not None and options.manifest is None and options.write_manifest is None:
        options.manifest = os.path.join(image.folder, IMAGE_FILE)
    manifest = None if options.manifest is None else Manifest.read(options.manifest)
    if options.write_manifest is not None:
        _require_no_other_file(options.write_manifest)
    result = audit(checkpoint) if image is None else _audit_image(image)
    checksums = None
    with ProgressBar(enabled=options.progress, description="Checking files") as bar:
        if manifest is not None:
            one_file = result.index is None and os.path.isfile(options.path)
            checksums = _compare(result, manifest, bar, whole=not one_file)
            checksums["manifest"] = options.manifest
        elif options.write_manifest is not None and not result.problems:
            checksums = _write(result, options, bar)
    document = {
        "path": options.path,
        "ok": not result.problems,
        "num_files": len(result.shards),
        "num_tensors": len(result.tensors),
        "tensor_bytes": sum(entry.nbytes for entry in result.tensors.values()),
        "dtypes": Counter(str(entry.dtype).removeprefix("torch.") for entry in result.tensors.values()),
        "problems": [_entry(problem) for problem in result.problems],
        "warnings": [_entry(warning) for warning in result.warnings],
        "checksums": checksums,
    }
    print(json.dumps(document, indent=2) if options.json else _text(document, options))
    return 0 if document["ok"] else 1


def _audit_image(image: PackedImage) -> Audit:
    """The files of all ranks, each rank's audited alone: they have parts of the same tensors."""
    result = Audit(image.folder)
    for prefix in image.states:
        pattern = f"{prefix}-part-*.safetensors"
        try:
            rank = audit(CheckpointSource(image.folder, load_format="sharded_state", allow_patterns=[pattern]))
        except CheckpointNotFoundError:
            continue  # the manifest says what is missing
        result.shards += rank.shards
        result.tensors |= {f"{prefix}: {name}": entry for name, entry in rank.tensors.items()}
        result.problems += rank.problems
        result.warnings += rank.warnings
    return result


def _require_no_other_file(path: str) -> None:
    """What is written over is a manifest, and no weights."""
    if os.path.lexists(path):
        try:
            Manifest.read(path)
        except CheckpointError as error:
            raise CommandError(
                f"{printable(path)}: it is there and is no manifest, so it is not written over; name another file",
                exit_code=2,
            ) from error


def _names(result: Audit) -> list[str]:
    """The files that make up the checkpoint, relative to its folder; those that are there."""
    paths = [shard.path for shard in result.shards]
    paths += [problem.path for problem in result.problems if problem.path and os.path.isfile(problem.path)]
    if result.index is not None:
        paths.append(result.index)
    names = {os.path.relpath(path, result.folder) for path in paths}
    return sorted(names, key=natural_key)


def _compare(result: Audit, manifest: Manifest, bar: ProgressBar, *, whole: bool) -> dict[str, Any]:
    """Adds differences to the problems. Where the checkpoint is not `whole`, its files alone are looked for."""
    names = set(_names(result))
    if whole:
        told = {problem.path for problem in result.problems if isinstance(problem, CheckpointNotFoundError)}
        names |= {name for name in manifest.files if os.path.join(result.folder, name) not in told}
    started = time.perf_counter()
    faults = compare(manifest, result.folder, sorted(names, key=natural_key), bar.update_to)
    result.problems += faults
    unread = {fault.path for fault in faults if fault.reason != "DigestMismatch"}
    names = {name for name in names if os.path.join(result.folder, name) not in unread}
    return _checksums(manifest, names, time.perf_counter() - started)


def _write(result: Audit, options: argparse.Namespace, bar: ProgressBar) -> dict[str, Any] | None:
    started = time.perf_counter()
    names = _names(result)
    digests, faults = digest_files(result.folder, names, options.algorithm, bar.update_to)
    if faults:
        result.problems += faults
        return None
    manifest = Manifest(options.algorithm, digests)
    manifest.write(options.write_manifest)
    return _checksums(manifest, set(names), time.perf_counter() - started) | {"written": options.write_manifest}


def _checksums(manifest: Manifest, names: set[str], seconds: float) -> dict[str, Any]:
    files = [record for name, record in manifest.files.items() if name in names]
    return {
        "algorithm": manifest.algorithm,
        "num_files": len(files),
        "bytes": sum(record.bytes for record in files),
        "seconds": seconds,
    }


def _entry(problem: CheckpointError) -> dict[str, str | None]:
    return {
        "reason": problem.reason,
        "path": problem.path,
        "tensor": problem.tensor,
        "message": " ".join(str(problem).split()),
    }


def _text(document: dict[str, Any], options: argparse.Namespace) -> str:
    num_problems = len(document["problems"])
    verdict = f"{num_problems} problem{'' if num_problems == 1 else 's'}" if num_problems else "no problem found"
    lines = [
        f"{printable(document['path'])}: {verdict}; {document['num_tensors']} tensors, "
        f"{format_bytes(document['tensor_bytes'])}, {document['num_files']} files read"
    ]
    if document["dtypes"]:
        lines.append("  dtypes      " + ", ".join(f"{dtype} {n}" for dtype, n in document["dtypes"].most_common()))
    lines += [f"  problem     {problem['message']}" for problem in document["problems"]]
    lines += [f"  warning     {warning['message']}" for warning in document["warnings"]]
    if checksums := document["checksums"]:
        if "written" in checksums:
            outcome = f"written to {printable(checksums['written'])}"
        else:
            outcome = f"compared with {printable(checksums['manifest'])}"
        lines.append(
            f"  checksums   {checksums['algorithm']} of {checksums['num_files']} files, "
            f"{format_bytes(checksums['bytes'])}, {outcome} in {checksums['seconds']:.2f} s"
        )
    elif options.write_manifest is not None:
        lines.append(f"  checksums   {printable(options.write_manifest)} is not written, because of the above")
    else:
        lines.append("  checksums   data were not read; --manifest compares them")
    return "\n".join(lines)
