"""How long the largest checkpoint in FP8, DeepSeek-V3's 92,000 tensors, takes to be recorded, planned and reconciled.

    python -m benchmarks.scale

The checkpoint is that of `benchmarks.paper`, headers and holes. The model is built in memory that costs none, and
nothing is read: time and memory are those that weightlift itself takes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.data import GIB
from benchmarks.measure import in_child
from benchmarks.paper import Layout, model_of, plan_rank, require_holes, write

LIMIT_SECONDS, LIMIT_BYTES = 30.0, 2 * GIB

RANKS = [("tp1", 0), ("tp8", 3), ("tp8ep8", 3)]


def main() -> None:
    model = model_of("deepseek-v3")
    with tempfile.TemporaryDirectory(prefix="weightlift-scale-") as name:
        folder = Path(name)
        require_holes(folder)
        checkpoint = in_child(lambda: write(model, folder))
        print(f"{model.name}: {checkpoint.num_tensors} tensors in {checkpoint.num_shards} files")
        print(f"{'layout':<7} {'rank':>4} {'transfers':>9} {'time':>9} {'CPU time':>9} {'peak memory':>12}")
        for text, rank in RANKS:
            layout = Layout.parse(text)
            plan = in_child(lambda layout=layout, rank=rank: plan_rank(folder, layout, rank, node_ranks=1))  # type: ignore[misc]
            within = plan.plan_seconds <= LIMIT_SECONDS and plan.plan_peak_bytes <= LIMIT_BYTES
            print(
                f"{text:<7} {rank:>4} {plan.num_transfers:>9} {plan.plan_seconds:>7.1f} s "
                f"{plan.plan_cpu_seconds:>7.1f} s {plan.plan_peak_bytes / GIB:>8.2f} GiB"
                + ("" if within else "   over the limit")
            )
    print(f"limits: {LIMIT_SECONDS:.0f} s, {LIMIT_BYTES / GIB:.0f} GiB")


if __name__ == "__main__":
    main()
