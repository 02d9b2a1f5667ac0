# From a bare clone, on Linux with Python >= 3.10:
#
#   make demo      train a small GPT on real text, compare with torch's attention
#   make test      all tests, C++ and Python
#   make bench-cpu   every CPU benchmark beside torch, 25 minutes; rows, pictures and bars
#   make bench-gpu   the same on a GPU, 6 minutes
#
# All set up .venv first. Settings: PYTHON (the interpreter that makes .venv), TORCH (what to
# install as torch), and the variables that setup.py names.
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := $(CURDIR)/.venv
READY := $(VENV)/.ready
TREE := build/setup
export PATH := $(VENV)/bin:$(PATH)
export CMAKE_ARGS

.PHONY: help setup build demo test cpp-test python-test sanitize lint format tidy house-rules
.PHONY: wheel check-wheel check-gpu bench-cpu bench-gpu clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY):
	tools/setup_debian.sh
	$(PYTHON) -m venv $(VENV)
	pip install -q "$(TORCH)" "setuptools>=77" wheel
	python tools/toolchain.py | xargs --no-run-if-empty pip install -q
	touch $@

# Without a GPU no time goes into its kernels, unless asked for. (`make wheel` builds them.)
setup build: export FLASHATTN_EXT_CUDA ?= $(if $(wildcard /dev/nvidiactl),AUTO,0)
build: $(READY)
	pip install -q -e ".[test,demo]" --no-build-isolation

demo: build
	python examples/train_gpt.py

test: cpp-test python-test

python-test: build
	OMP_NUM_THREADS=1 pytest -n auto

cpp-test: override CMAKE_ARGS += -DBUILD_TESTING=ON
cpp-test: gtest build
	cmake --build $(TREE) --parallel $$(nproc)
	ctest --test-dir $(TREE) --output-on-failure

# The torch-free C++ under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: gtest $(READY)
	cmake --preset asan
	cmake --build build/asan --parallel $$(nproc)
	ctest --test-dir build/asan --output-on-failure

.PHONY: gtest
gtest:
	tools/setup_debian.sh test

# The versions of formatters and linters: another one lays code out differently.
LINTERS := ruff==0.17.6 clang-format==23.1.5
TIDY := clang-tidy==23.1.4

lint: $(READY)
	pip install -q $(LINTERS)
	tools/lint.sh

format: $(READY)
	pip install -q $(LINTERS)
	tools/lint.sh --fix

tidy: $(READY)
	pip install -q $(LINTERS) $(TIDY)
	tools/lint.sh --tidy

house-rules: $(READY)
	pip install -q pytest
	pytest -q tests/test_house_rules.py

wheel: $(READY)
	rm -rf dist
	pip wheel -q --no-deps -w dist .

# The same wheel under the torch releases that it must work with.
check-wheel: wheel
	tools/check_wheel.sh dist/flashattn_ext-*.whl

# On a machine with a GPU: the tests and compute-sanitizer, on the wheel.
check-gpu: wheel
	pip install -q pytest pytest-xdist numpy
	PYTHON=python tools/check_gpu.sh dist/flashattn_ext-*.whl

bench-cpu: build
	python -m benchmarks.run --device cpu --threads 2 --output benchmarks/results/cpu.csv
	python -m benchmarks.plot

bench-gpu: build
	python -m benchmarks.run --device cuda --output benchmarks/results/cuda.csv
	python -m benchmarks.plot

clean:
	rm -rf build dist *.egg-info flashattn_ext/_C.so
