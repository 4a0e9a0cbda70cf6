"""In-tree PEP 517 backend: setuptools, plus torch when (and only when) the extension is wanted.

A pure build (`TD_NO_EXT=1`) must neither import nor install torch, so torch cannot stand in
`[build-system] requires`.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks not overridden below)
from td_build import find_cuda_home, wants_extension


def _extension_requires() -> list[str]:
    """What building the extension needs. Checked first: no torch is fetched for a lost cause."""
    if not wants_extension():
        return []
    find_cuda_home()
    return ["torch>=2.4", "ninja"]  # torch: its build helper only, so any version and any build


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    extra = _extension_requires()
    return [*build_meta.get_requires_for_build_wheel(config_settings), *extra]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    extra = _extension_requires()
    return [*build_meta.get_requires_for_build_editable(config_settings), *extra]
