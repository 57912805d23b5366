"""The table in docs/engines/vllm.md: what recording vLLM's own loaders came to, model by model."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20


def table(compared: dict[tuple[str, int], list[dict[str, Any]]], descriptions: dict[str, str]) -> str:
    """Markdown. `compared` has, by name and tp size, what compare.py found on each rank."""
    lines = [
        "| model | copies recorded | reads forced | MiB read, whole | MiB read, each of 2 ranks | parameters equal |",
        "|---|---|---|---|---|---|",
    ]
    for name, description in descriptions.items():
        [whole], ranks = compared[name, 1], compared[name, 2]
        report = whole["report"]
        share = " / ".join("refused" if "refused" in r else f"{r['report']['bytes_read'] / MIB:.2f}" for r in ranks)
        processed = whole["refused_processing"][0] is None
        equal = "loaded, post-processed" if processed else "loaded (post-processing needs a GPU)"
        lines.append(
            f"| {description} | {report['num_transfers']} | {report['num_forced']} | {report['bytes_read'] / MIB:.2f} "
            f"| {share} | {equal} |"
        )
    return "\n".join(lines) + "\n"
