"""Runs vLLM's engine on a list of jobs and writes down the tokens that it generates, greedily, for fixed prompts.

A job is {model, load_format, tp_size, options, reload}: `reload`, where given, is a checkpoint that the running engine
is told to load its weights from afterwards. The result is the list of jobs, `tokens` and `reloaded_tokens` added.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPTS = ["the quick brown", "weights are lifted from", "a"]


def tokens(llm: LLM) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        model=job["model"],
        load_format=job["load_format"],
        tensor_parallel_size=job["tp_size"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=True,
        **job.get("options", {}),
    )
    result = {**job, "tokens": tokens(llm)}
    if "reload" in job:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
        result["reloaded_tokens"] = tokens(llm)
    del llm
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    results = []
    for job in json.loads(arguments.jobs.read_text()):
        results.append(run(job))
        arguments.output.write_text(json.dumps(results, indent=2))
