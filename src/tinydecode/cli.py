"""tinydecode-generate: parsing and printing only.

torch takes seconds to import, so nothing that needs it is imported before the arguments are
known to be good.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tinydecode._version import __version__

if TYPE_CHECKING:
    from tinydecode.engine import TokenStream
    from tinydecode.model import LlamaModel
    from tinydecode.tokenizer import Tokenizer

PROG = "tinydecode-generate"
DEFAULT_MAX_NEW_TOKENS = 256

DESCRIPTION = """\
Generate text with a llama-family model: the text on stdout, everything else on stderr.
Defaults are in brackets."""
EXAMPLES = """\
examples:
  tinydecode-generate --demo -p "Why is the sky blue?"
  tinydecode-generate path/to/TinyLlama-1.1B-Chat-v1.0 --chat -p "Name three rivers." -n 64
  git diff | tinydecode-generate path/to/model.gguf -p - --json

exit codes:
  0    done
  1    an error in the model's files, the device or the run; one line says what
  2    a mistake in the arguments
  130  interrupted (Ctrl-C); the text so far has been printed
  141  the reader of stdout went away (a closed pipe)
  143  terminated
"""

EXIT_ERROR, EXIT_USAGE = 1, 2
EXIT_SIGINT, EXIT_SIGPIPE, EXIT_SIGTERM = (
    128 + number for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)
)


class _UsageError(Exception):
    """A mistake in the arguments that the parser alone cannot see."""


class _PipeClosed(Exception):
    """Nobody reads stdout any more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of the process if None.

    Returns:
        The exit code, as `--help` lists them. A bad option exits at once, as argparse does.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    warnings.showwarning = _show_warning
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except _UsageError as error:
        return _fail(str(error), EXIT_USAGE)
    except _PipeClosed:
        # What is buffered cannot be written; at exit Python must not try and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGPIPE
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except Exception as error:
        if args.debug:
            raise
        return _fail(_describe(error), EXIT_ERROR)


# ---- arguments -----------------------------------------------------------------------------


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the epilog's lines, and every option on one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes in one line, as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{PROG}: error: {message} (see {PROG} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    add("model", nargs="?", metavar="MODEL", help="directory, .gguf file, or hub id org/name")
    add("--demo", action="store_true", help="use SmolLM2-135M-Instruct; downloaded once, 93 MB")
    dtypes = ["auto", "float32", "float16", "bfloat16"]
    add("--dtype", choices=dtypes, default="auto", metavar="TYPE", help=", ".join(dtypes))
    add("--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N")
    add("--max-seq-len", type=_integer(1), metavar="S", help="cache slots [as needed]")

    group = parser.add_argument_group("prompt", "Without one, it is read from stdin.")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads stdin")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read it from a file")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt through the model's chat template [only with --demo]",
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")

    add = parser.add_argument_group("generation").add_argument
    limit, probability = DEFAULT_MAX_NEW_TOKENS, _number(0, 1)
    add("-n", "--max-new-tokens", type=_integer(1), default=limit, metavar="N", help=f"[{limit}]")
    add("--temperature", type=_number(0), default=0.0, metavar="T", help="0 is greedy [0]")
    add("--top-k", type=_integer(0), default=0, metavar="K", help="only the K likeliest [0: all]")
    add("--top-p", type=probability, default=1.0, metavar="P", help="only the top P [1: all]")
    add("--min-p", type=probability, default=0.0, metavar="P", help="P times the best's [0: all]")
    add("--repetition-penalty", type=_number(1e-6), default=1.0, metavar="R", help="[1: none]")
    add("--seed", type=_integer(0), metavar="SEED", help="repeats a sampled text [random]")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object: text, ids and statistics")
    add("--info", action="store_true", help="print versions, backend and devices, then exit")
    add("--version", action="version", version=f"tinydecode {__version__}")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _number(low: float, high: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or not low <= value <= high:
            limits = f"finite and >= {low:g}" if high == math.inf else f"in {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be {limits}, found {text}")
        return value

    parse.__name__ = "number"  # argparse: "invalid number value: 'x'"
    return parse


def _integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be >= {low}, found {text}")
        return value

    parse.__name__ = "integer"
    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, found {text!r}")
    return text


# ---- the run -------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    if args.info:
        from tinydecode.info import report

        _write(report() + "\n")
        return 0
    if (args.model is None) != args.demo:
        raise _UsageError("give either MODEL or --demo")
    is_chat = args.demo if args.chat is None else args.chat
    if args.system is not None and not is_chat:
        raise _UsageError("--system needs --chat")
    prompt = _read_prompt(args)
    path = _find_model(args)
    with _garbage_collection_off():
        from tinydecode.tokenizer import Tokenizer

        tokenizer = Tokenizer(path)
        ids = _encode(tokenizer, prompt, is_chat, args.system)
        model = _load_model(args, path)
    return _generate(args, model, tokenizer, ids)


def _read_prompt(args: argparse.Namespace) -> str:
    """The prompt; from a file or stdin it loses one trailing newline, which editors add."""
    try:
        if args.prompt_file is not None:
            text = Path(args.prompt_file).read_bytes().decode()
        elif args.prompt in (None, "-"):
            if sys.stdin.isatty():
                print("reading the prompt from the terminal; end it with Ctrl-D", file=sys.stderr)
            text = sys.stdin.buffer.read().decode()
        else:
            os.fsencode(args.prompt).decode()  # refuses bytes that the shell passed through
            return str(args.prompt)
    except OSError as error:
        raise _UsageError(f"cannot read the prompt: {error}") from error
    except UnicodeDecodeError as error:
        raise _UsageError(f"the prompt is not UTF-8: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def _find_model(args: argparse.Namespace) -> Path:
    if args.demo:
        from tinydecode.demo import demo_model
        from tinydecode.progress import ProgressBar

        with ProgressBar("downloading the demo model") as bar:
            return demo_model(bar)
    from tinydecode.hub import resolve

    return resolve(args.model)


def _encode(tokenizer: Tokenizer, prompt: str, is_chat: bool, system: str | None) -> list[int]:
    """Token ids of the prompt; a prompt of nothing but whitespace counts as empty."""
    is_empty = not prompt.strip()
    if is_chat:
        if is_empty:
            raise _UsageError("the prompt is empty; a chat needs a message")
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages)
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode("" if is_empty else prompt)
    if not ids:
        raise _UsageError("the prompt is empty, and this tokenizer has no BOS token to start from")
    return ids


def _load_model(args: argparse.Namespace, path: Path) -> LlamaModel:
    from tinydecode.model import load_hf
    from tinydecode.progress import ProgressBar

    with ProgressBar("loading", delay=0.5) as bar:
        return load_hf(path, device=args.device, dtype=args.dtype, progress=bar)


def _generate(
    args: argparse.Namespace, model: LlamaModel, tokenizer: Tokenizer, prompt_ids: list[int]
) -> int:
    """Run the model on the prompt and print what comes."""
    from tinydecode.engine import Engine

    max_seq_len = args.max_seq_len
    if max_seq_len is None:  # the last token generated needs no slot
        needed = len(prompt_ids) + args.max_new_tokens - 1
        max_seq_len = min(needed, model.config.max_position_embeddings)
    with Engine(model, max_seq_len=max_seq_len) as engine:
        if model.device.type == "cuda":
            from tinydecode import graphs

            graphs.enable(engine)
        stream = engine.stream(
            prompt_ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
            tokenizer=tokenizer,
        )
        return _print_stream(stream, prompt_ids, as_json=args.json)


def _print_stream(stream: TokenStream, prompt_ids: list[int], as_json: bool) -> int:
    """Print text as it comes, or one JSON object at the end; an interrupt ends it early."""
    pieces: list[str] = []
    token_ids: list[int] = []
    exit_code = 0
    try:
        for event in stream:
            if event.token_id is not None:
                token_ids.append(event.token_id)
            if event.text:
                pieces.append(event.text)
                if not as_json:
                    _write(event.text)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        exit_code = EXIT_SIGINT
    if not as_json:
        _write("\n")
        print(stream.stats.summary(), file=sys.stderr)
        return exit_code
    import json

    result: dict[str, Any] = {"text": "".join(pieces), "token_ids": token_ids}
    result |= {"prompt_token_ids": prompt_ids, "stats": stream.stats.to_dict()}
    _write(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")
    return exit_code


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """For the start, which makes a million objects and drops few: torch imports 7 % faster."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# ---- output --------------------------------------------------------------------------------


def _write(text: str) -> None:
    """To stdout, at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise _PipeClosed from error
    except UnicodeEncodeError:  # a terminal that cannot show every character
        encoding = sys.stdout.encoding
        _write(text.encode(encoding, errors="replace").decode(encoding))


def _fail(message: str, exit_code: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(f"{PROG}: error: {message}", file=sys.stderr)
    return exit_code


def _describe(error: Exception) -> str:
    """An exception in one line; the kinds that the library raises on purpose need no name."""
    message = " ".join(str(error).split())
    meant = (ValueError, NotImplementedError, RuntimeError, OSError, ImportError)
    if isinstance(error, meant) and message:
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"{PROG}: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_SIGTERM)  # an exception, so that temporary files are removed


if __name__ == "__main__":
    sys.exit(main())
