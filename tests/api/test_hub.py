"""MODEL on the command line: paths first, then the hub, with errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tinydecode import hub


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(str(file)) == file
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name") == Path("org/name")  # a directory wins over the hub


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"model\.bin is a file; expected"):
        hub.resolve(str(tmp_path / "model.bin"))
    for missing in ("nowhere", "./org/name", "/org/name", "a/b/c", "org/x.gguf", "no where/x"):
        with pytest.raises(FileNotFoundError, match="does not exist; expected"):
            hub.resolve(missing)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"pip install 'tinydecode\[hub\]'"):
        hub.resolve("org/name")


def test_offline_cache(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE: what is cached is used, what is not is an error that says so."""
    pytest.importorskip("huggingface_hub")
    model = tmp_path / "hub" / "models--org--name"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    program = (
        "from tinydecode import hub\nprint(hub.resolve('org/name'))\n"
        "try: hub.resolve('org/other')\nexcept OSError as error: print(error)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(hub.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    found, error = done.stdout.splitlines()
    assert found == str(snapshot)
    assert "'org/other' is no directory here and not in the Hugging Face cache" in error


def test_only_what_is_needed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    wanted: list[str] = []
    files = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "README.md"]
    files += ["original/consolidated.00.pth", "original/params.json", "consolidated.safetensors"]
    files += ["pytorch_model.bin", "tokenizer.model", "onnx/model.json"]

    def snapshot_download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        chosen = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        wanted.extend(chosen)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("org/name") == tmp_path
    assert wanted == files[:3]


@pytest.mark.parametrize(
    ("kind", "raised", "message"),
    [
        ("GatedRepoError", FileNotFoundError, "gated: accept its terms"),
        ("RepositoryNotFoundError", FileNotFoundError, "no model on the hub"),
        ("LocalEntryNotFoundError", OSError, "the hub cannot be reached"),
        (None, OSError, "cannot fetch 'org/name' from the Hugging Face hub: reset by peer$"),
    ],
)
def test_hub_errors(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, raised: type[Exception], message: str
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub import errors

    def snapshot_download(*_: object, **__: object) -> NoReturn:
        cls = getattr(errors, kind) if kind else RuntimeError
        error: Exception = cls.__new__(cls)
        error.args = ("reset by peer\nand more",)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(raised, match=message):
        hub.resolve("org/name")
