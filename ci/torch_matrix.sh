#!/usr/bin/env bash
# Proves that one wheel serves old and new torch on old and new CPython: installs it beside each
# pair in a venv of its own, loads the binary and generates on the CPU. Downloads several GB.
#
#   ci/torch_matrix.sh WHEEL FOLDER [PYTHON=TORCH...]      e.g. python3.10=2.4.1 python3.12=2.8.0
#
# TOKENS from every pair must be the same; the last line counts the pairs.
set -euo pipefail

wheel=$(realpath "${1:?usage: ci/torch_matrix.sh WHEEL FOLDER [PYTHON=TORCH...]}")
folder=$(realpath -m "${2:?usage: ci/torch_matrix.sh WHEEL FOLDER [PYTHON=TORCH...]}")
shift 2
pairs=("$@")
if ((${#pairs[@]} == 0)); then pairs=(python3.10=2.4.1 python3.11=2.13.0 python3.12=2.8.0); fi
root=$(realpath "$(dirname "$0")/..")
mkdir -p "$folder"

passed=0 failed=0
for pair in "${pairs[@]}"; do
  venv=$folder/$pair
  {
    "${pair%%=*}" -m venv "$venv" &&
      "$venv/bin/pip" install -q "torch==${pair##*=}" &&
      "$venv/bin/pip" uninstall -q -y tinydecode tinydecode-cu121 tinydecode-cu130 &&
      "$venv/bin/pip" install -q "$wheel" # what it depends on; keeps the torch that is there
  } || { failed=$((failed + 1)) && continue; }
  if (cd "$folder" && "$venv/bin/python" - "$root/tests" "$venv/model") <<'PYTHON'; then
import sys
from pathlib import Path

import tinydecode
import torch
from tinydecode import _ext

sys.path.append(sys.argv[1])
import fixtures

model = Path(sys.argv[2])
if not model.exists():
    fixtures.write_tiny(model)
engine = tinydecode.Engine(tinydecode.load_hf(model, device="cpu"), max_seq_len=64)
ids, stats = engine.generate([1, 2, 3], max_new_tokens=16, ignore_eos=True)
python = ".".join(map(str, sys.version_info[:3]))
print(f"python {python}, torch {torch.__version__}, kernels for {_ext.require().archs()}")
print("TOKENS", *ids)
PYTHON
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
  fi
done
echo "$passed passed, $failed failed"
((failed == 0))
