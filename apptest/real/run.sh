#!/usr/bin/env bash
# The acceptance run behind `make real`: three real vLLM replicas (CPU build, a
# tiny random model), the router in front of them, the official OpenAI SDK and
# `vllm bench serve` through it, then under load one replica is killed, one
# drained, one hung, one loses its engine process, and one ends as SIGTERM does
# by default ("abort"). Takes about 15 minutes on 2 cores; the very first run
# also installs vLLM from PyPI (about 2.5 GB). `run.sh engine abort` plays only
# these faults (of kill, drain, hang, engine, abort) after the first checks.
#
# Last run, 30 November 2026, vLLM 0.32.0 on two cores, everything in one run at 06c474b: 42 checks, 0 failed
#   kill, drain  129 and 120 requests, 0 errors before an answer began; used again 3.5 and 3.8 s after they were healthy
#   hang         161 requests, 0 errors before an answer began, 0 attempts from 10 to 20 s on; used again 4.3 s after it woke
#   engine       4 of 4 streams end in an explicit error, each a 502 in metric and log; 182 requests after it, 0 errors
#   abort        20 failovers, each by a refused probe before the "abort" came (at 27771d4 12 came by "abort" itself);
#                12 of 12 whole answers and 8 of 8 streams that had not begun ended well
#
#   RV_SCRIPT  real_vllm.sh        (default: ../shared/tools/real_vllm.sh beside this repository)
#   RV_ROOT    its work folder     (default: ~/.cache/real-vllm)
#   RV_PORTS   replica ports       (default: 8101 8102 8103)
#   PENSTOCK   the router's binary (default: bin/penstock)
#   KEEP=1     leave the replicas running at the end
set -euo pipefail
cd "$(dirname "$0")/../.."

export RV_SCRIPT=${RV_SCRIPT:-$PWD/../shared/tools/real_vllm.sh}
export RV_ROOT=${RV_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/real-vllm}
export RV_PORTS=${RV_PORTS:-8101 8102 8103}
export PENSTOCK=${PENSTOCK:-$PWD/bin/penstock}
# Drains instead of aborting at SIGTERM, and can call tools without being told which.
export RV_ARGS=${RV_ARGS:---shutdown-timeout 15 --enable-auto-tool-choice --tool-call-parser hermes}

[ -f "$RV_SCRIPT" ] || { echo "real_vllm.sh is not at $RV_SCRIPT: set RV_SCRIPT" >&2; exit 2; }
[ -x "$PENSTOCK" ] || { echo "no router at $PENSTOCK: run make build, or set PENSTOCK" >&2; exit 2; }
stop() { [ "${KEEP:-0}" = 1 ] || bash "$RV_SCRIPT" stop $RV_PORTS; }
trap stop EXIT
bash "$RV_SCRIPT" up $RV_PORTS
# The vLLM environment has the official openai package in it.
"$RV_ROOT/venv/bin/python" apptest/real/accept.py "$@"
