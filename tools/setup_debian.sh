#!/bin/sh
# Installs the Debian or Ubuntu packages that are missing, where that is possible.
# Use: tools/setup_debian.sh [test]     (test: GoogleTest too, for the C++ tests)
set -eu

missing=""
command -v c++ >/dev/null || missing="$missing g++"
python3 -c "import ensurepip" 2>/dev/null || missing="$missing python3-venv"
if [ "${1-}" = test ]; then
  [ -e /usr/include/gtest/gtest.h ] || missing="$missing libgtest-dev"
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Missing:$missing. Install them (Debian, Ubuntu: apt-get install$missing)." >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # a list of words
apt-get install -y -qq --no-install-recommends $missing
