#!/bin/sh
# Installs one wheel beside each torch release that it must work with, and runs quick tests there.
# Use: tools/check_wheel.sh WHEEL        (from the repository root)
# Settings: PYTHON; TORCH_VERSIONS (default "2.13.0 2.14.1"); TESTS (default: see below).
# Each environment lies in a temporary folder, up to 6 GB, and is removed before the next one.
set -eu

wheel=$(realpath "$1")
tests=${TESTS-tests/packaging tests/ops/test_softmax.py tests/ops/test_masks.py \
  tests/ops/test_flash_varlen.py tests/ops/test_opcheck.py tests/ops/test_autograd.py}
for version in ${TORCH_VERSIONS-2.13.0 2.14.1}; do
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT INT TERM
  ${PYTHON-python3} -m venv "$folder/venv"
  "$folder/venv/bin/pip" install -q "torch==$version" "$wheel[test]"
  # Away from the sources, so that the installed package is the one that is tested.
  cp -r tests "$folder/tests"
  cp pyproject.toml "$folder"
  cd "$folder"
  venv/bin/python -c "
import torch
from flashattn_ext import _library
print('torch', torch.__version__, 'with', _library.__file__)
print(_library.build_info())"
  # shellcheck disable=SC2086  # a list of paths
  OMP_NUM_THREADS=1 venv/bin/python -m pytest -q -p no:cacheprovider -n 2 $tests
  cd "$OLDPWD"
  rm -rf "$folder"
done
