#!/usr/bin/env bash
# Format and lint, for people and for CI:
#
#   tools/lint.sh          reports what is wrong
#   tools/lint.sh --fix    repairs what a tool can repair, and reports the rest
#
# Needs the tools of `pip install ".[lint]"`. clang-tidy is run where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

fix=0
case "${1:-}" in
  --fix) fix=1 ;;
  "") ;;
  *) echo "usage: tools/lint.sh [--fix]" >&2; exit 2 ;;
esac

for tool in ruff clang-format; do
  if ! command -v "$tool" > /dev/null; then
    echo "tools/lint.sh: $tool not found: pip install \".[lint]\"" >&2
    exit 1
  fi
done
# Another major version lays code out differently.
if ! clang-format --version | grep -q "version 23\."; then
  echo "tools/lint.sh: needs clang-format 23, found: $(clang-format --version)" >&2
  exit 1
fi

cpp_files() { git ls-files --cached --others --exclude-standard -- "$@"; }
mapfile -t cpp < <(cpp_files '*.h' '*.cpp' '*.cuh' '*.cu')

failed=0
if [ "$fix" = 1 ]; then
  clang-format -i "${cpp[@]}"
  ruff check --fix . || failed=1
  ruff format .
else
  clang-format --dry-run --Werror "${cpp[@]}" || failed=1
  ruff check . || failed=1
  ruff format --check . || failed=1
fi

if command -v clang-tidy > /dev/null; then
  # The instruction sets are all switched on, so that their files can be read.
  isa=()
  [ "$(uname -m)" = x86_64 ] && isa=(-march=x86-64-v4)
  cpp_files 'csrc/cpu/*.cpp' |
    xargs -P "$(nproc)" -I{} clang-tidy --quiet {} -- -std=c++20 -Icsrc "${isa[@]}" 2> /dev/null ||
    failed=1
else
  echo "tools/lint.sh: clang-tidy not found, left out: pip install \".[lint]\""
fi

if [ "$failed" = 1 ]; then
  echo "tools/lint.sh: see above; 'tools/lint.sh --fix' repairs formatting" >&2
fi
exit "$failed"
