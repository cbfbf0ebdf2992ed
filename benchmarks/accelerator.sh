#!/usr/bin/env bash
# Run gda on the accelerator of this machine: the tests for it, then its benchmarks.
#
#     benchmarks/accelerator.sh FOLDER [--quick]
#
# It takes 9 minutes at most and needs no network. gda need not be installed: this checkout is used.
# Every part has a time limit, and the summary comes last, even if a part fails or hangs. PYTHON names
# the interpreter, python3 by default. GDA_ACCELERATOR=cpu takes CPU devices in place of an
# accelerator, and --quick small arrays in the benchmarks.
#
# FOLDER gets summary.txt, machine.txt, tests.log, figures.jsonl (what each test measured),
# benchmarks.log, accelerator.json (the results; not with --quick), and ran.txt, the line for
# benchmarks/accelerators.txt.
set -uo pipefail

if (($# < 1 || $# > 2)) || [[ ${2:---quick} != --quick ]]; then
  echo "usage: benchmarks/accelerator.sh FOLDER [--quick]" >&2
  exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
quick=("${@:2}")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=200
export GDA_FIGURES="$folder/figures.jsonl"
# Some tests start processes that share the accelerator.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

parts=()
part() { # name, seconds, command...; into a log of this name
  local name=$1 seconds=$2 begun=$SECONDS code
  printf '\n== %s\n' "$name"
  # Waited for are the command, not what it may have left with its output, and a signal at once.
  timeout -k 5 "$seconds" "${@:3}" > >(tee "$folder/$name") 2>&1 &
  running=$!
  wait "$running"
  code=$?
  sleep 0.3 # until tee has written the rest
  case $code in
    0) parts+=("$name: done in $((SECONDS - begun)) s") ;;
    124 | 137) parts+=("$name: stopped after $seconds s, its limit") && failed=1 ;;
    *) parts+=("$name: failed with exit code $code after $((SECONDS - begun)) s") && failed=1 ;;
  esac
}

count() { # pattern, log
  cat "$folder/$2" 2>/dev/null | grep -cE "$1"
}

failed=0
summary() {
  trap - EXIT
  total=$(sed -nE 's/.*collected ([0-9]+) items?.*/\1/p' "$folder/tests.log" 2>/dev/null)
  sed -n 's/^ran on: //p' "$folder/machine.txt" 2>/dev/null |
    sed "s/$/ | $(count '::.* PASSED' tests.log) of ${total:-?}/" >"$folder/ran.txt"
  {
    printf '\n== summary\n'
    head -n 12 "$folder/machine.txt" 2>/dev/null
    printf '%s\n' "${parts[@]:-no part ended}"
    echo "tests: $(count '::.* PASSED' tests.log) passed, $(count '::.* FAILED' tests.log) failed," \
      "$(count '::.* ERROR' tests.log) with errors, $(count '::.* SKIPPED' tests.log) skipped;" \
      "$(count . figures.jsonl) figures"
    grep -E '^(FAILED|ERROR) ' "$folder/tests.log" 2>/dev/null | cut -c1-300
    echo "benchmarks: $(count '^[^ ].*: .*; .* (faster|slower|less|more)' benchmarks.log) works measured," \
      "$(count ': not measured: ' benchmarks.log) not"
    grep -E ': not measured: ' "$folder/benchmarks.log" 2>/dev/null | cut -c1-300
  } | tee "$folder/summary.txt"
  exit "$failed"
}
trap summary EXIT
# The group too: timeout leaves its command alone if it gets the signal while it starts it.
trap 'failed=1; parts+=("ended by a signal"); kill -- "$running" "-$running" 2>/dev/null; exit' INT TERM

: >"$GDA_FIGURES"
read -r -d '' machine <<'CODE'
import os
import platform
import shutil
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def output(*command):
    if not shutil.which(command[0]):
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()[:200]


query = "--query-gpu=name,driver_version,memory.total"
print("nvidia-smi:", output("nvidia-smi", query, "--format=csv,noheader"))
print("commit", output("git", "log", "-1", "--format=%h %cs"))
names = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin numpy ml_dtypes orbax-checkpoint tensorstore"
found = []
for name in f"{names} fastcrc safetensors flax optax pytest".split():
    try:
        found.append(f"{name} {version(name)}")
    except PackageNotFoundError:
        found.append(f"no {name}")
print(f"Python {platform.python_version()},", ", ".join(found))
if not find_spec("fastcrc"):
    print("missing: fastcrc, which gda.checkpoint needs: see CONTRIBUTING.md")
if os.environ.get("GDA_ACCELERATOR") == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
import jax

versions = f"JAX {jax.__version__}, Python {platform.python_version()}"
print(f"ran on: {jax.devices()[0].device_kind} | {versions} | {date.today()}")
for device in jax.devices()[:1]:
    print(f"{jax.device_count()} x {device.device_kind} ({device.platform})")
    memory = device.memory_stats() or {}
    print({name: memory[name] for name in ("bytes_limit", "bytes_in_use") if name in memory})
    print("memory kinds", [each.kind for each in device.addressable_memories()])
CODE
part machine.txt 25 "$python" -c "$machine"
part tests.log 245 "$python" -m pytest -m accelerator -v --tb=short --durations=10 -W default \
  -p no:cacheprovider
part benchmarks.log 250 "$python" -m benchmarks --accelerator "${quick[@]}"
if ((!${#quick[@]})) && [[ -e benchmarks/accelerator.json ]]; then
  cp benchmarks/accelerator.json "$folder"
fi
