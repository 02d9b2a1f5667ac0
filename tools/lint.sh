#!/usr/bin/env bash
# Format and lint, for people and for CI. `make lint`, `make format` and `make tidy` install the
# pinned tools first.
#
#   tools/lint.sh          reports what is wrong (seconds)
#   tools/lint.sh --fix    repairs what a tool can repair, and reports the rest
#   tools/lint.sh --tidy   clang-tidy over the CPU kernels and core/ (a minute)
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in ruff clang-format; do
  if ! command -v "$tool" > /dev/null; then
    echo "tools/lint.sh: $tool not found: run 'make lint', which installs it" >&2
    exit 1
  fi
done
files() { git ls-files --cached --others --exclude-standard -- "$@"; }
mapfile -t cpp < <(files '*.h' '*.cpp' '*.cuh' '*.cu')

failed=0
case "${1:-}" in
  "")
    clang-format --dry-run --Werror "${cpp[@]}" || failed=1
    ruff check . || failed=1
    ruff format --check . || failed=1
    ;;
  --fix)
    clang-format -i "${cpp[@]}"
    ruff check --fix . || failed=1
    ruff format .
    ;;
  --tidy)
    # All instruction sets are switched on, so that the file of each can be read.
    isa=()
    if [ "$(uname -m)" = x86_64 ]; then isa=(-march=sapphirerapids); fi
    files 'csrc/cpu/*.cpp' |
      xargs -P "$(nproc)" -I{} clang-tidy --quiet {} -- -std=c++20 -Icsrc "${isa[@]}" || failed=1
    ;;
  *)
    echo "usage: tools/lint.sh [--fix | --tidy]" >&2
    exit 2
    ;;
esac

if [ "$failed" = 1 ]; then
  echo "tools/lint.sh: see above; 'make format' repairs formatting" >&2
fi
exit "$failed"
