"""tinydecode-generate: parsing and printing only.

torch takes seconds to import, so nothing that needs it is imported before the arguments are
known to be good.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tinydecode.cli_options import EXIT_USAGE, PROG, parser

if TYPE_CHECKING:
    from tinydecode.engine import TokenStream
    from tinydecode.model import LlamaModel
    from tinydecode.tokenizer import Tokenizer

EXIT_ERROR = 1
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
    args = parser().parse_args(argv)
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


# ---- the run -------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    if args.info:
        from tinydecode.info import report

        _write(report() + "\n")
        return 0
    if args.selfcheck:
        from tinydecode.selfcheck import selfcheck

        return 0 if selfcheck(args.device, lambda line: _write(line + "\n")) else EXIT_ERROR
    if (args.model is None) != args.demo:
        raise _UsageError("give either MODEL or --demo")
    is_chat = args.demo if args.chat is None else args.chat
    if args.system is not None and not is_chat:
        raise _UsageError("--system needs --chat")
    if args.logprobs is not None and not args.json:
        raise _UsageError("--logprobs needs --json")
    if not (args.draft or args.ngram) and (args.k is not None or args.force_draft):
        raise _UsageError("-k and --force-draft need --draft or --ngram")
    prompt = _read_prompt(args)
    path = _find_model(args)
    with _garbage_collection_off():
        from tinydecode.tokenizer import Tokenizer

        tokenizer = Tokenizer(path)
        ids = _encode(tokenizer, prompt, is_chat, args.system)
        draft = _load_draft(args, tokenizer) if args.draft else None
        model = _load_model(args, path)
    return _generate(args, model, draft, tokenizer, ids)


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


def _load_draft(args: argparse.Namespace, tokenizer: Tokenizer) -> LlamaModel:
    """The draft model, its tokenizer compared first: that takes no time."""
    from tinydecode.hub import resolve
    from tinydecode.speculative import check_tokenizers
    from tinydecode.tokenizer import Tokenizer

    path = resolve(args.draft)
    if not args.force_draft:
        check_tokenizers(tokenizer, Tokenizer(path))
    return _load_model(args, path)


def _generate(
    args: argparse.Namespace,
    model: LlamaModel,
    draft: LlamaModel | None,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
) -> int:
    """Run the model on the prompt and print what comes."""
    from tinydecode.engine import Engine

    max_seq_len = args.max_seq_len
    if max_seq_len is None:  # the last token generated needs no slot
        needed = len(prompt_ids) + args.max_new_tokens - 1
        max_seq_len = min(needed, model.config.max_position_embeddings)
    options: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "logit_bias": dict(args.logit_bias),
        "banned_token_ids": args.ban,
        "logprobs": args.logprobs,
        "seed": args.seed,
        "ignore_eos": args.ignore_eos,
        "stop": args.stop,
        "stop_token_ids": args.stop_token_id,
        "tokenizer": tokenizer,
    }
    with contextlib.ExitStack() as stack:

        def engine_of(which: LlamaModel, slots: int) -> Engine:
            engine = stack.enter_context(Engine(which, max_seq_len=slots))
            if which.device.type == "cuda":
                from tinydecode import graphs

                graphs.enable(engine)
            return engine

        engine = engine_of(model, max_seq_len)
        if draft is None and not args.ngram:
            stream = engine.stream(prompt_ids, **options)
        else:
            from tinydecode import speculative

            drafter: speculative.Drafter = speculative.NgramDrafter()
            if draft is not None:
                slots = min(max_seq_len, draft.config.max_position_embeddings)
                drafter = speculative.ModelDrafter(engine_of(draft, slots))
            k: Any = "auto" if args.k is None else args.k
            stream = speculative.stream(engine, drafter, prompt_ids, k, **options)
        return _print_stream(stream, prompt_ids, as_json=args.json)


def _print_stream(stream: TokenStream, prompt_ids: list[int], as_json: bool) -> int:
    """Print text as it comes, or one JSON object at the end; an interrupt ends it early."""
    pieces: list[str] = []
    token_ids: list[int] = []
    logprobs: list[dict[str, Any]] = []
    exit_code = 0
    try:
        for event in stream:
            if event.token_id is not None:
                token_ids.append(event.token_id)
                if event.logprobs is not None:
                    logprobs.append(event.logprobs.to_dict())
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
    if logprobs:
        result["logprobs"] = logprobs
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
