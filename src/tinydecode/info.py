"""The report of `tinydecode-generate --info`: what is installed and what would run."""

from __future__ import annotations

import platform
import sys

from tinydecode import _ext
from tinydecode._version import __version__


def report() -> str:
    """Versions, the compiled kernels, the devices and the backend of each; a line per fact."""
    import torch

    cuda = torch.version.cuda or "none: a CPU-only build"
    lines = [
        ("tinydecode", f"{__version__} ({', '.join(_ext.installed()) or 'not installed: a tree'})"),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("platform", platform.platform()),
        ("torch", f"{torch.__version__} (CUDA {cuda})"),
        ("kernels", _kernels()),
        ("cpu", f"{torch.get_num_threads()} threads, backend torch"),
    ]
    from tinydecode import ops

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(
            (
                f"cuda:{index}",
                f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB, "
                f"backend {ops.backend_name(is_cuda=True)}",
            )
        )
    if not torch.cuda.is_available():
        lines.append(("cuda", "no usable device"))
    return "\n".join(f"{name:11} {value}" for name, value in lines)


def _kernels() -> str:
    """State of tinydecode._C, with the reason when it is not used."""
    module = _ext.load()
    if module is None:
        return f"not used: {_ext.reason}"
    version = module.cuda_version()
    return f"built with CUDA {version // 1000}.{version % 1000 // 10} for {module.archs()}"
