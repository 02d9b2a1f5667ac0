#!/bin/sh
# Every test on a machine with a GPU, with an installed wheel, and a short summary at the end.
# Use: tools/check_gpu.sh WHEEL        (from the repository root; ends with 1 if anything failed)
# Settings: PYTHON (it has a CUDA build of torch, pytest and pytest-xdist), WORKERS (test processes,
# default 8), TESTS (default: those that use the GPU), LOGS (a folder for full logs).
set -u

wheel=$(realpath -e "$1") || exit 1
python=${PYTHON-python3}
logs=$(realpath -m "${LOGS-build/gpu}")
mkdir -p "$logs"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
failed=0
summary="$logs/summary.txt"
: > "$summary"

# report NAME STATUS TEXT: a line of the summary.
report() {
  word=passed
  if [ "$2" != 0 ]; then word=FAILED failed=1; fi
  printf '%-12s %s  %s\n' "$1" "$word" "$3" | tee -a "$summary"
}

"$python" -m pip install -q --no-index --no-deps --target "$folder/site" "$wheel" || exit 1
# Away from the sources, so that the wheel is what is tested.
cp -r tests pyproject.toml "$folder"
if [ -d benchmarks ]; then cp -r benchmarks "$folder"; fi
cd "$folder" || exit 1
export PYTHONPATH="$folder/site" OMP_NUM_THREADS=1
"$python" - << 'EOF' | tee -a "$summary" || exit 1
import subprocess
import torch
from flashattn_ext import _library

query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
print(torch.cuda.get_device_name(), "driver", driver, "torch", torch.__version__)
print(_library.__file__, _library.build_info())
EOF

# shellcheck disable=SC2086  # a list of paths
"$python" -m pytest -q -n "${WORKERS-8}" -p no:cacheprovider -k "cuda or gpu" \
  ${TESTS-tests} > "$logs/tests.log" 2>&1
status=$?
# All skipped is no success.
tail -n 1 "$logs/tests.log" | grep -q ' passed' || status=1
grep -E '^(FAILED|ERROR) ' "$logs/tests.log" | head -n 20
report tests "$status" "$(tail -n 1 "$logs/tests.log")"

if command -v compute-sanitizer > /dev/null; then
  # sanitize TOOL LOG NAME...: our kernels, over the part of the smoke set that is named.
  sanitize() {
    tool=$1 log=$2
    shift 2
    compute-sanitizer --tool "$tool" --error-exitcode 1 --kernel-name kernel_substring=flashattn \
      "$python" tests/cuda/sanitizer_smoke.py "$@" > "$logs/$log.log" 2>&1
    report "$log" $? "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$log.log" | tail -n 1)"
  }
  sanitize memcheck memcheck
  sanitize synccheck synccheck
  sanitize racecheck racecheck softmax flash dropout_mask
  # cuBLAS's own 16-bit kernels fail under racecheck.
  sanitize racecheck racecheck_naive naive float32 float64
else
  report sanitizer 1 "compute-sanitizer not found: put the CUDA toolkit's bin on PATH"
fi

printf '\n=== summary (logs in %s) ===\n' "$logs"
cat "$summary"
exit "$failed"
