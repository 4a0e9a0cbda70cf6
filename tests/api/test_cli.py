"""tinydecode-generate: output, exit codes, and one clear line for every mistake."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fixtures
import pytest
import torch

from tinydecode import _ext, cli
from tinydecode.engine import TokenEvent, TokenStream
from tinydecode.stats import Stats

SRC = str(Path(cli.__file__).parents[1])
COMMAND = [sys.executable, "-m", "tinydecode.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call the command line in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*args: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as exit:
            code = int(exit.code or 0)
        return Result(code, *capsys.readouterr())

    with warnings.catch_warnings():  # restores showwarning
        yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def write_talker(directory: Path, chain: list[int], add_bos: bool = True, **config: Any) -> Path:
    """A model over F-BYTE whose greedy output after chain[0] is the rest of the chain."""
    table = fixtures.cycle_table(chain, 512)
    config = {"bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 65536, **config}
    fixtures.write_markov(directory, table, **config)
    template = fixtures.BYTE_CHAT_TEMPLATE
    return fixtures.write_byte_tokenizer(directory, add_bos=add_bos, chat_template=template)


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says abcdabcd... without end; after BOS it begins with "a"."""
    chain = [256, *b"abcda"]  # a leads on to b, as before
    return write_talker(tmp_path_factory.mktemp("abc"), chain)


# ---- output --------------------------------------------------------------------------------


def test_text_on_stdout_and_stats_on_stderr(run: Run, abc: Path) -> None:
    result = run(abc, "-p", "xa", "-n", 5)
    assert result[:2] == (0, "bcdab\n")
    assert result.err.startswith("3 prompt + 5 new tokens")
    assert result.err.count("\n") == 1


def test_json(run: Run, abc: Path) -> None:
    result = run(abc, "-p", "xa", "-n", 3, "--json", "--temperature", 0.01, "--seed", 7)
    document = json.loads(result.out)
    assert result.code == 0
    assert result.err == ""
    assert document["text"] == "bcd"
    assert document["token_ids"] == [*b"bcd"]
    assert document["prompt_token_ids"] == [256, *b"xa"]
    assert document["stats"]["finish_reason"] == "length"
    assert document["stats"]["seed"] == 7


def test_prompt_from_stdin_and_file(run: Run, abc: Path, tmp_path: Path) -> None:
    """One trailing newline, which an editor or echo adds, is not part of the prompt."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("né\na\n".encode())
    expected = [256, *"né\na".encode()]
    for args, stdin in (
        (["-p", "-"], file.read_bytes()),
        ([], file.read_bytes()),
        (["--prompt-file", file], b""),
    ):
        result = run(abc, *args, "-n", 1, "--json", stdin=stdin)
        assert json.loads(result.out)["prompt_token_ids"] == expected
        assert json.loads(result.out)["text"] == "b"


def test_stop_tokens_from_several_files(run: Run, tmp_path: Path) -> None:
    """A06: the union of the files ends the text, and the token that ends it is not shown."""
    write_talker(tmp_path, [9, 10, 11, 258, 12, 12])
    fixtures.write_json(tmp_path / "generation_config.json", {"eos_token_id": [257, 258]})
    result = run(tmp_path, "-p", "x\t", "-n", 9, "--json")
    document = json.loads(result.out)
    assert document["token_ids"] == [10, 11]
    assert document["text"] == "\n\x0b"
    assert document["stats"]["finish_reason"] == "stop"
    result = run(tmp_path, "-p", "x\t", "-n", 5, "--json", "--ignore-eos")
    assert json.loads(result.out)["token_ids"] == [10, 11, 258, 12, 12]


def test_exactly_one_bos(run: Run, abc: Path, tmp_path: Path) -> None:
    """A14, visible in the output."""
    ids = [
        json.loads(run(abc, "-n", 1, "--json", *args).out)["prompt_token_ids"]
        for args in (["--chat", "-p", "hi"], ["-p", "<s><|user|>hi<|eot|><|assistant|>"])
    ]
    assert ids == [[256, 259, *b"hi", 258, 260]] * 2
    system = run(abc, "-n", 1, "--json", "--chat", "--system", "s", "-p", "hi").out
    assert json.loads(system)["prompt_token_ids"][:1] == [256]
    without = write_talker(tmp_path, [*b"ab"], add_bos=False)
    out = run(without, "-p", "a", "-n", 1, "--json").out
    assert json.loads(out)["prompt_token_ids"] == [*b"a"]


def test_split_characters(run: Run, tmp_path: Path) -> None:
    """A15: whole text, cut inside a character, and an invalid byte."""
    write_talker(tmp_path / "a", [0x21, *"😀 你".encode(), 257])
    assert run(tmp_path / "a", "-p", "!").out == "😀 你\n"
    assert run(tmp_path / "a", "-p", "!", "-n", 2).out == "\ufffd\n"
    assert json.loads(run(tmp_path / "a", "-p", "!", "-n", 2, "--json").out)["text"] == "\ufffd"
    write_talker(tmp_path / "b", [0x21, 0x42, 0xFF, 0x41, 257])
    assert run(tmp_path / "b", "-p", "!").out == "B\ufffdA\n"


def test_leading_space(run: Run, tmp_path: Path) -> None:
    """A16: "Say:" goes on with " Hello"."""
    hello, world, bang = (fixtures.SPM_IDS[t] for t in ("\u2581Hello", "\u2581world", "!"))
    table = fixtures.cycle_table([3 + ord(":"), hello, world, bang, 2], 512)
    fixtures.write_markov(tmp_path, table, eos_token_id=2, bos_token_id=1)
    fixtures.write_spm_tokenizer(tmp_path)
    assert run(tmp_path, "-p", "Say:").out == " Hello world!\n"


def test_stop_strings_and_ids(run: Run, abc: Path) -> None:
    """A39 at the command line: what precedes the stop, nothing of it."""
    assert run(abc, "-p", "a", "-n", 9, "--stop", "dab").out == "bc\n"
    assert (
        run(abc, "-p", "a", "-n", 9, "--stop", "x", "--stop", "cdab", "--stop", "cd").out == "b\n"
    )
    document = json.loads(run(abc, "-p", "a", "-n", 9, "--stop-token-id", 100, "--json").out)
    assert document["token_ids"] == [*b"bc"]
    assert document["stats"]["finish_reason"] == "stop"
    assert document["stats"]["new_tokens"] == 2


def test_bias_bans_and_penalties(run: Run, abc: Path) -> None:
    assert run(abc, "-p", "a", "-n", 2, "--logit-bias", f"{ord('x')}=30").out == "xx\n"
    banned = run(abc, "-p", "a", "-n", 1, "--ban", ord("b"), "--json")
    assert json.loads(banned.out)["token_ids"] == [0]
    # b follows a with logit 20: taken off once, the lowest id of those left wins.
    args = ["--presence-penalty", 15, "--frequency-penalty", 6]
    assert run(abc, "-p", "a", "-n", 5, *args).out[:4] == "bcda"
    fails(run(abc, "-p", "a", "--ban", 512), 1, "token id 512 is outside the vocabulary of 512")


def test_logprobs_in_json(run: Run, abc: Path) -> None:
    document = json.loads(run(abc, "-p", "a", "-n", 2, "--json", "--logprobs", 2, "--top-k", 1).out)
    first = document["logprobs"][0]
    assert len(document["logprobs"]) == 2
    assert first["sampled_logprob"] == 0.0 and -1e-4 < first["logprob"] <= 0
    assert [top["token_id"] for top in first["top"]] == [ord("b"), 0]
    assert first["top"][1]["sampled_logprob"] is None


def test_interrupted_json(capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt leaves a complete document about the text so far."""
    stats = Stats(prompt_tokens=1, new_tokens=1)

    def events() -> Iterator[TokenEvent]:
        yield TokenEvent(0x61, "a", 0.1)
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        code = cli._print_stream(TokenStream(events(), stats), [256], as_json=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    document = json.loads(capsys.readouterr().out)
    assert code == cli.EXIT_SIGINT
    assert document["text"] == "a"
    assert document["stats"]["finish_reason"] is None


def test_cache_is_as_large_as_needed(run: Run, abc: Path) -> None:
    """All tokens asked for are made: the last one needs no slot."""
    assert run(abc, "-p", "a", "-n", 9).out == "bcdabcdab\n"
    result = run(abc, "-p", "a", "-n", 9, "--max-seq-len", 4, "--json")
    assert len(json.loads(result.out)["token_ids"]) == 3


# ---- mistakes ------------------------------------------------------------------------------


def fails(result: Result, code: int, message: str) -> None:
    """One line on stderr, no traceback, nothing on stdout."""
    assert re.fullmatch(rf"tinydecode-generate: error: .*{message}.*\n", result.err)
    assert (result.code, result.out) == (code, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["m", "-p", "x", "--temperature", "-1"], "--temperature: must be finite and >= 0"),
        (["m", "-p", "x", "--temperature", "nan"], "--temperature: must be finite and >= 0"),
        (["m", "-p", "x", "--temperature", "hot"], "--temperature: invalid number value: 'hot'"),
        (["m", "-p", "x", "--top-k", "-5"], "--top-k: must be >= 0"),
        (["m", "-p", "x", "--top-k", "1.5"], "--top-k: invalid integer value"),
        (["m", "-p", "x", "--top-p", "1.5"], "--top-p: must be in 0 to 1"),
        (["m", "-p", "x", "--min-p", "inf"], "--min-p: must be in 0 to 1"),
        (["m", "-p", "x", "--repetition-penalty", "0"], "--repetition-penalty: must be"),
        (["m", "-p", "x", "-n", "0"], "--max-new-tokens: must be >= 1"),
        (["m", "-p", "x", "--device", "tpu"], "--device: must be auto, cpu, cuda or cuda:N"),
        (["m", "-p", "x", "--dtype", "int8"], "--dtype: invalid choice"),
        (["m", "-p", "x", "--prompt-file", "y"], "not allowed with"),
        (["m", "-p", "x", "--stop", ""], "--stop: must have at least one character"),
        (["m", "-p", "x", "--stop-token-id", "-1"], "--stop-token-id: must be >= 0"),
        (["m", "-p", "x", "--ban", "x"], "--ban: invalid integer value"),
        (["m", "-p", "x", "--logit-bias", "5"], "--logit-bias: must be ID=NUMBER, found '5'"),
        (["m", "-p", "x", "--logit-bias", "5=inf"], "--logit-bias: must be finite, found inf"),
        (["m", "-p", "x", "--presence-penalty", "nan"], "--presence-penalty: must be finite"),
        (["m", "-p", "x", "--json", "--logprobs", "21"], "--logprobs: must be in 0 to 20"),
        (["m", "-p", "x", "--logprobs", "1"], "--logprobs needs --json"),
        (["-p", "x"], "give either MODEL or --demo"),
        (["m", "--demo", "-p", "x"], "give either MODEL or --demo"),
        (["m", "-p", "x", "--system", "s"], "--system needs --chat"),
        (["m", "--prompt-file", "/no/such/file"], "cannot read the prompt"),
    ],
)
def test_usage_errors(run: Run, args: list[str], message: str) -> None:
    fails(run(*args), cli.EXIT_USAGE, message)


def test_prompt_that_is_no_utf8(run: Run, abc: Path) -> None:
    fails(run(abc, stdin=b"\xff\xfe"), cli.EXIT_USAGE, "the prompt is not UTF-8")
    fails(run(abc, "-p", os.fsdecode(b"\xff")), cli.EXIT_USAGE, "the prompt is not UTF-8")


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_empty_prompt(run: Run, abc: Path, tmp_path: Path, prompt: str) -> None:
    """A41: from BOS where there is one, a usage error where there is none."""
    without = write_talker(tmp_path / "m", [*b"ab"], add_bos=False)
    file = tmp_path / "prompt.txt"
    file.write_text(prompt)
    for args in (["-p", prompt], ["--prompt-file", file], ["-p", "-"], []):
        result = run(abc, *args, "-n", 2, "--json", stdin=prompt.encode())
        assert json.loads(result.out)["prompt_token_ids"] == [256]
        assert json.loads(result.out)["text"] == "ab"
        result = run(without, *args, stdin=prompt.encode())
        fails(result, cli.EXIT_USAGE, "the prompt is empty.*no BOS")
    fails(run(abc, "--chat", "-p", prompt), cli.EXIT_USAGE, "a chat needs a message")


def test_model_errors(run: Run, abc: Path, tmp_path: Path) -> None:
    fails(run(tmp_path / "nowhere", "-p", "x"), 1, "does not exist")
    fails(run(tmp_path, "-p", "x"), 1, r"no tokenizer\.json")
    fixtures.write_byte_tokenizer(tmp_path)
    fails(run(tmp_path, "-p", "x"), 1, r"config\.json")
    fails(run(abc, "-p", "x" * 100, "--max-seq-len", 64), 1, "101 tokens.*64")
    fails(run(abc, "-p", "x", "--max-seq-len", 70000), 1, "70000 exceeds the model's context")


def test_damaged_weights(run: Run, tmp_path: Path) -> None:
    """A13 at the command line."""
    write_talker(tmp_path, [*b"ab"])
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:4], whole[:100], whole[:-1], b"\0" * 7 + b"\x40" + whole[8:]):
        file.write_bytes(damaged)
        fails(run(tmp_path, "-p", "a"), 1, r"model\.safetensors.*incomplete or corrupt")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    fails(run(tmp_path, "-p", "a"), 1, r"model\.safetensors.*LFS pointer")


def test_chat_template_errors(run: Run, tmp_path: Path) -> None:
    """A17 (d) and (e)."""
    write_talker(tmp_path, [*b"ab"])
    fixtures.write_byte_tokenizer(tmp_path)
    fails(run(tmp_path, "-p", "a", "--chat"), 1, "no chat template.*without --chat")
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role!') }}{% endif %}x"
    )
    fixtures.write_byte_tokenizer(tmp_path, chat_template=template)
    fails(run(tmp_path, "-p", "a", "--chat", "--system", "s"), 1, "No system role!")


def test_unexpected_errors_show_where_on_request(
    run: Run, abc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x\ny")

    monkeypatch.setattr(cli, "_generate", broken)
    fails(run(abc, "-p", "a"), 1, r"KeyError: 'x\\ny' \(--debug shows where\)")
    with pytest.raises(KeyError):
        run(abc, "-p", "a", "--debug")


# ---- devices -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.version.cuda is not None, reason="about a CPU-only torch")
def test_cpu_only_torch(run: Run, abc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A44: "cuda" fails and says why, "auto" and "cpu" run."""
    message = f"torch {re.escape(torch.__version__)}.*get a CUDA build of torch"
    fails(run(abc, "-p", "a", "--device", "cuda"), 1, message)
    for device in ("auto", "cpu"):
        result = run(abc, "-p", "a", "-n", 2, "--device", device)
        assert result[:2] == (0, "bc\n")
        assert "warning" not in result.err

    monkeypatch.setattr(_ext, "installed", lambda: ["tinydecode-cu130"])
    result = run(abc, "-p", "a", "-n", 2)
    assert result[:2] == (0, "bc\n")
    assert result.err.count("warning: tinydecode-cu130 is installed, but torch") == 1
    assert result.err.count("running on the CPU") == 1
    assert "warning" not in run(abc, "-p", "a", "-n", 2, "--device", "cpu").err


def test_info(run: Run) -> None:
    result = run("--info")
    assert result.code == 0
    for word in ("tinydecode", "python", "torch", "kernels", "backend torch"):
        assert word in result.out


# ---- the process ---------------------------------------------------------------------------


def start(*args: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *map(str, args)],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that put the test run into the background has it ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_help_imports_nothing_heavy() -> None:
    """A38, and a fast answer: no torch, no tokenizers, no jinja2."""
    program = (
        "import sys\nfrom tinydecode.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: code = e.code\n"
        "heavy = {'torch', 'tokenizers', 'jinja2', 'numpy', 'rich', 'huggingface_hub'}\n"
        "print('HEAVY', heavy & set(sys.modules), code)"
    )
    for args, ending in (["--help"], "set() 0"), (["--version"], "set() 0"), (["--x"], "set() 2"):
        done = subprocess.run(
            [sys.executable, "-c", program, *args], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert done.stdout.endswith(f"HEAVY {ending}\n"), done
    assert done.stderr.count("\n") == 1


def test_closed_pipe(abc: Path) -> None:
    """A40: quiet, with the documented exit code."""
    process = start(abc, "-p", "a", "-n", 60000)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5) == b"bcdab"
    process.stdout.close()
    assert process.wait(timeout=60) == cli.EXIT_SIGPIPE == 141
    assert process.stderr.read() == b""


def test_interrupt(abc: Path) -> None:
    """A40: what was generated is printed, then the statistics."""
    process = start(abc, "-p", "a", "-n", 60000)
    assert process.stdout is not None
    text = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == cli.EXIT_SIGINT == 130
    generated = (text + rest).removesuffix(b"\n")
    assert generated == (b"bcda" * len(generated))[: len(generated)]
    assert re.fullmatch(rb"2 prompt \+ \d+ new tokens, .*\n", err)


def test_terminate(abc: Path) -> None:
    process = start(abc, "-p", "a", "-n", 60000)
    assert process.stdout is not None
    process.stdout.read(3)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == cli.EXIT_SIGTERM == 143
    assert err == b""
