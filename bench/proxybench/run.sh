#!/usr/bin/env bash
# `make bench-proxy`: the side-by-side proxy benchmark. nginx and haproxy come
# from apt; vllm-router is installed from PyPI into an own environment. What is
# missing is skipped, and the page says so. Takes about 20 minutes; run it on a
# quiet machine. Further flags are passed on (see proxybench run -h).
#
#   VENV       environment for vllm-router (default: ~/.cache/penstock-bench/venv)
#   PENSTOCK   the router's binary         (default: bin/penstock)
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/penstock-bench/venv}
PENSTOCK=${PENSTOCK:-$PWD/bin/penstock}
[ "$(nproc)" -ge 2 ] || { echo "two cores are needed: one for the proxy, one for load and replica" >&2; exit 2; }

if [ ! -x "$VENV/bin/vllm-router" ]; then
  for py in ${PYTHON:-} "$HOME"/.pyenv/versions/3.1[123].*/bin/python python3.12 python3.11 python3; do
    if command -v "$py" >/dev/null && "$py" -m venv "$VENV" 2>/dev/null; then
      "$VENV/bin/pip" install -q vllm-router && break
    fi
  done || true
fi
go build -o "${TMPDIR:-/tmp}/penstock-proxybench" ./bench/proxybench
exec "${TMPDIR:-/tmp}/penstock-proxybench" run -penstock "$PENSTOCK" -vllm-router "$VENV/bin/vllm-router" \
  -doc docs/performance.md -json docs/proxybench.json "$@"
