# Everything a developer runs. Each target sets up what it needs, in .venv, and only once.
#   TORCH=torch==2.9.1 make test     another torch (default: the CPU build that CI tests with)
#   PYTHON=python3.12 make test      another interpreter for the virtual environment
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
export TORCH ?= torch==2.13.0
export PYTHON ?= python3
BIN := .venv/bin
STORAGE ?= build
FUZZ_SECONDS ?= 60
NATIVE_SOURCES = $(shell find csrc tests/native tests/fuzz benchmarks/native -name '*.h' -o -name '*.cpp')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-python test-native test-sanitize test-vllm lint stubs format bench bench-load bench-storage \
	bench-cost bench-ops bench-rivals paper fuzz clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup:  ## Make .venv, with the package built and installed for development
	@scripts/setup.sh test demo

demo:  ## Load a trained model and a 2 GiB one, whole and sliced; verify every byte; compare with safetensors
	@scripts/setup.sh test demo
	@$(BIN)/python -m examples.demo

test: test-python test-native  ## All tests

test-python: setup  ## Python tests
	$(BIN)/python -m pytest

test-native: setup  ## C++ tests of the core
	@scripts/native_tests.sh build/native

test-sanitize: setup  ## C++ tests under AddressSanitizer with UBSan, and under ThreadSanitizer
	@scripts/native_tests.sh build/asan -DWEIGHTLIFT_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo
	@scripts/native_tests.sh build/tsan -DWEIGHTLIFT_SANITIZE=thread -DCMAKE_BUILD_TYPE=RelWithDebInfo

test-vllm:  ## Tests inside the real vLLM (CPU build), in .venv-vllm
	@scripts/setup.sh
	@scripts/vllm_tests.sh

lint:  ## Linters, type checks, formatting; the committed stub against the built module
	@scripts/setup.sh test lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	@$(BIN)/pybind11-stubgen weightlift._C -o build/stubs >/dev/null
	diff -u python/weightlift/_C.pyi build/stubs/weightlift/_C.pyi

stubs:  ## Write python/weightlift/_C.pyi from the built module
	@scripts/setup.sh test lint
	$(BIN)/pybind11-stubgen weightlift._C -o build/stubs
	cp build/stubs/weightlift/_C.pyi python/weightlift/_C.pyi

format:  ## Format all sources
	@scripts/setup.sh test lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

bench: bench-load bench-storage  ## Loads, and storage alone

bench-load: setup  ## Speed and memory beside safetensors and plain reads (BENCH_ARGS="--quick --csv out.csv")
	$(BIN)/python -m benchmarks.load $(BENCH_ARGS)

bench-storage: setup  ## Readers, read sizes, depths and pages on any storage (STORAGE=/mnt/nvme STORAGE_ARGS="--mib=512")
	@scripts/native_bench.sh bench_storage --path=$(STORAGE) --benchmark_out=build/bench_storage.json $(STORAGE_ARGS)
	@$(BIN)/python -m benchmarks.storage build/bench_storage.json build/bench_storage

bench-cost: setup  ## What `weightlift plan --bench` estimates, held against real cold loads (BENCH_ARGS="--throttle 0.5")
	$(BIN)/python -m benchmarks.cost_model $(BENCH_ARGS)

bench-ops: setup  ## Speed of each fused op beside memcpy (BENCH_ARGS="--benchmark_filter=awq")
	@scripts/native_bench.sh bench_ops $(BENCH_ARGS)

bench-rivals: setup  ## Whole checkpoints and one rank of 8, beside other loaders, in .venv-rivals (RIVALS_ARGS="--quick")
	@scripts/rivals.sh $(RIVALS_ARGS)

paper: setup  ## What loading the largest public models would take, planned on files without data (BENCH_ARGS="--models kimi-k2")
	$(BIN)/python -m benchmarks.paper $(BENCH_ARGS)

fuzz: setup  ## Fuzz plans and headers for FUZZ_SECONDS each (needs clang++ with libFuzzer for plans)
	@scripts/fuzz.sh $(FUZZ_SECONDS)

clean:  ## Remove what was built (not .venv, .venv-vllm, .venv-rivals)
	rm -rf build dist
