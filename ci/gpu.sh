#!/usr/bin/env bash
# Tests a wheel built elsewhere on this GPU machine, then runs benchmarks; needs no network.
#
#   ci/gpu.sh WHEEL OUT [BENCH_COMMAND...]
#
# The wheel is unpacked beside the Python in use, whose torch it runs on. `pytest -m cuda` sees that
# copy, not src/; a skipped test is a failure. Each further argument is a shell command, run in
# order, such as "python3 bench/ops.py"; one that fails does not keep the next from running.
# OUT receives machine.txt, tests.txt, junit.xml, tests.rc, bench-N.txt, bench-N.rc.
#
# PYTEST_ARGS adds arguments for pytest; CUDA_DISABLE_PTX_JIT, CUDA_FORCE_PTX_JIT and the like
# reach the driver as they are. LAUNCHER goes before python for the tests (compute-sanitizer).
# EXTRA_WHEELS is a folder of wheels that this Python lacks, such as pytest and what it needs.
set -uo pipefail

wheel=$(realpath "${1:?usage: ci/gpu.sh WHEEL OUT [BENCH_COMMAND...]}")
out=$(realpath -m "${2:?usage: ci/gpu.sh WHEEL OUT [BENCH_COMMAND...]}")
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

shopt -s nullglob
"$python" -m pip install -q --no-deps --no-index --no-compile --target "$site" "$wheel" \
  ${EXTRA_WHEELS:+"$EXTRA_WHEELS"/*.whl} || exit 1
# First on the path: an installed tinydecode, of another build, does not count.
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
unset TD_NO_EXT TINYDECODE_NO_EXT
export TD_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1

{
  date -u +%FT%TZ
  basename "$wheel"
  sha256sum "$wheel" | cut -d' ' -f1
  git rev-parse HEAD 2>/dev/null
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
  (cd "$site" && "$python" -m tinydecode.cli --info 2>&1)
} | tee "$out/machine.txt"

# pythonpath without "src": what is tested is the wheel.
# shellcheck disable=SC2086
${LAUNCHER:-} "$python" -m pytest -m cuda -o pythonpath="tests ci" -p no:cacheprovider \
  --junitxml="$out/junit.xml" ${PYTEST_ARGS:-} 2>&1 | tee "$out/tests.txt"
rc=${PIPESTATUS[0]}
# A skip hides a kernel that did not run; pytest itself calls that success.
if grep -qE '^SKIPPED' "$out/tests.txt"; then
  echo "gpu.sh: tests were skipped on a GPU machine" | tee -a "$out/tests.txt"
  rc=1
fi
echo "$rc" >"$out/tests.rc"

number=0
for command in "$@"; do
  number=$((number + 1))
  echo "+ $command" | tee "$out/bench-$number.txt"
  bash -c "$command" 2>&1 | tee -a "$out/bench-$number.txt"
  status=${PIPESTATUS[0]}
  echo "$status" >"$out/bench-$number.rc"
  if ((status != 0)); then rc=1; fi
done
exit "$rc"
