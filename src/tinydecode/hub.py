"""From what the user typed as MODEL to files on this machine."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def resolve(model: str) -> Path:
    """Find a model: a directory, a .gguf file, or a Hugging Face hub id.

    A hub id needs huggingface_hub; its cache, token and HF_HUB_OFFLINE are respected.

    Args:
        model: a path, or `org/name`. A path that exists wins.

    Returns:
        A directory or a .gguf file that exists.

    Raises:
        FileNotFoundError: no such path, or the hub has no such model for this user.
        ValueError: a file of another kind.
        RuntimeError: huggingface_hub is not installed.
        OSError: the hub cannot be reached and the cache does not have the model.
    """
    path = Path(model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ValueError(f"{model} is a file; expected a model directory or a .gguf file")
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_hub(model)
    raise FileNotFoundError(
        f"{model!r} does not exist; expected a model directory, a .gguf file, "
        "or a Hugging Face hub id org/name"
    )


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise RuntimeError(
            f"there is no directory {model!r} here; to look for it on the Hugging Face hub: "
            "pip install 'tinydecode[hub]'"
        ) from error
    try:
        folder = snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except errors.GatedRepoError as error:
        raise FileNotFoundError(
            f"hub model {model!r} is gated: accept its terms on the hub, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{model!r} is no directory here and no model on the hub that you can see"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise OSError(
            f"{model!r} is no directory here and not in the Hugging Face cache, "
            "and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set)"
        ) from error
    except Exception as error:  # its transport raises what it likes
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise OSError(f"cannot fetch {model!r} from the Hugging Face hub: {reason}") from error
    return Path(folder)
