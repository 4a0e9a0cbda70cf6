"""What is raised for damaged model files."""

from __future__ import annotations

from pathlib import Path

_LFS_POINTER = b"version https://git-lfs"


class CheckpointError(ValueError):
    """A model file is damaged, or does not fit the configuration beside it."""


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError if Git LFS left its pointer text in a file's place."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
            )
