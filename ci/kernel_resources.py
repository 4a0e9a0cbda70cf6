"""Registers, stack and local bytes of every kernel in a wheel, against a committed table.

    python ci/kernel_resources.py WHEEL...            compare; exit 1 when something got worse
    python ci/kernel_resources.py --write WHEEL...    renew the table from these wheels

The numbers are read from the machine code in the wheel (cuobjdump), so no GPU and no second
compilation is needed. Stack bytes are where spilled registers live: growth there is a spill.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_name("kernel_resources.json")
Usage = dict[str, dict[str, list[int]]]  # kernel -> target -> [registers, stack + local bytes]


def find_cuobjdump() -> str | None:
    """The tool from PATH, a CUDA toolkit, or the PyPI package nvidia-cuda-cuobjdump."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if os.environ.get("CUDA_HOME"):
        folders.append(f"{os.environ['CUDA_HOME']}/bin")
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or []) if nvidia else []:
        folders += [str(p) for p in Path(root).glob("cu*/bin")]
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def extract_module(wheel: Path, folder: Path) -> Path:
    """Unpacks tinydecode/_C from a wheel; returns its path."""
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if re.fullmatch(r"tinydecode/_C\..*so", n))
        return Path(z.extract(name, folder))


def variant_of(wheel: Path) -> str:
    """tinydecode_cu130-0.1.0-... -> "cu130"."""
    found = re.match(r"tinydecode_(cu\d+)-", wheel.name)
    if not found:
        raise ValueError(f"{wheel.name} is not the wheel of a CUDA variant")
    return found[1]


def parse(text: str) -> Usage:
    """Reads the demangled output of `cuobjdump -res-usage`."""
    usage: Usage = {}
    target = kernel = ""
    for line in text.splitlines():
        if found := re.match(r"arch = (\w+)", line):
            target = found[1]
        elif found := re.match(r"\s*Function (.+):$", line):
            kernel = short_name(found[1])
        elif found := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            registers, stack, local = (int(n) for n in found.groups())
            usage.setdefault(kernel, {})[target] = [registers, stack + local]
    return usage


def short_name(signature: str) -> str:
    """`void (anonymous namespace)::k<float, 4>(float*, int)` -> `k<float, 4>`."""
    name = re.sub(r"^void ", "", signature.replace("(anonymous namespace)::", ""))
    depth = 0
    for i, c in enumerate(name):  # parentheses inside <> are casts in template arguments
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


def measure(wheel: Path) -> Usage:
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump not found; pip install nvidia-cuda-cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        module = extract_module(wheel, Path(folder))
        text = subprocess.check_output([tool, "-res-usage", str(module)], text=True)
    return parse(subprocess.run(["c++filt"], input=text, text=True, capture_output=True).stdout)


def compare(expected: Usage, found: Usage) -> list[str]:
    """What got worse, or is not in the table; an improvement passes."""
    faults = [f"{k}: in the table but not in the wheel" for k in sorted(expected.keys() - found)]
    for kernel, by_target in sorted(found.items()):
        for target, (registers, stack) in by_target.items():
            known = expected.get(kernel, {}).get(target)
            if known is None:
                faults.append(f"{kernel} on {target}: not in the table")
            elif registers > known[0] or stack > known[1]:
                faults.append(
                    f"{kernel} on {target}: {registers} registers, {stack} bytes of stack; "
                    f"the table allows {known[0]} and {known[1]}"
                )
    return faults


def write(table: dict[str, Usage]) -> None:
    """One kernel a line, so that a diff reads well."""
    blocks = []
    for variant, usage in sorted(table.items()):
        rows = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(usage.items())]
        blocks.append(f"  {json.dumps(variant)}: {{\n" + ",\n".join(rows) + "\n  }")
    TABLE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="renew the table")
    args = parser.parse_args()
    table: dict[str, Usage] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    faults: list[str] = []
    for wheel in args.wheels:
        variant, usage = variant_of(wheel), measure(wheel)
        if args.write:
            table[variant] = usage
        else:
            faults += [f"{variant}: {f}" for f in compare(table.get(variant, {}), usage)]
    if args.write:
        write(table)
    print("\n".join(faults) or "kernel resources: nothing got worse")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
