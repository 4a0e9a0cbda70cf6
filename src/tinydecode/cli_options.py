"""The options of tinydecode-generate; imports nothing that takes time."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from tinydecode._version import __version__

PROG = "tinydecode-generate"
DEFAULT_MAX_NEW_TOKENS = 256

DESCRIPTION = """\
Generate text with a llama-family model: the text on stdout, everything else on stderr.
Defaults are in brackets."""
EXAMPLES = """\
examples:
  tinydecode-generate --demo -p "Why is the sky blue?"
  tinydecode-generate path/to/TinyLlama-1.1B-Chat-v1.0 --chat -p "Name three rivers." -n 64
  tinydecode-generate path/to/Llama-3.2-3B --draft path/to/Llama-3.2-1B -k 5 -p "Once"
  git diff | tinydecode-generate path/to/model.gguf -p - --json

exit codes:
  0    done
  1    an error in the model's files, the device or the run; one line says what
  2    a mistake in the arguments
  130  interrupted (Ctrl-C); the text so far has been printed
  141  the reader of stdout went away (a closed pipe)
  143  terminated
"""

SAMPLING_ORDER = "Applied in the order in which they stand here."
K_HELP = "tokens drafted a round, 1 to 15, or auto: what pays [auto]"
STOP_HELP = "end before this text; may be repeated"

EXIT_USAGE = 2


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the epilog's lines, and every option on one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes in one line, as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{PROG}: error: {message} (see {PROG} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
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
    limit = DEFAULT_MAX_NEW_TOKENS
    add("-n", "--max-new-tokens", type=_integer(1), default=limit, metavar="N", help=f"[{limit}]")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    add("--stop", action="append", default=[], type=_text, metavar="TEXT", help=STOP_HELP)
    add("--stop-token-id", **_ids, help="end at this token too; may be repeated")

    _add_sampling(parser.add_argument_group("sampling", SAMPLING_ORDER))

    group = parser.add_argument_group("speculation", "Faster; the text stays the model's own.")
    drafts = group.add_mutually_exclusive_group()
    drafts.add_argument("--draft", metavar="PATH", help="draft with this smaller model")
    drafts.add_argument(
        "--ngram", action="store_true", help="draft by copying from the text so far"
    )
    group.add_argument("-k", type=_draft_length, metavar="K", help=K_HELP)
    group.add_argument("--force-draft", action="store_true", help="even if tokenizers differ")
    group.add_argument("--selfcheck", action="store_true", help="prove exactness here, then exit")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object: text, ids and statistics")
    add("--logprobs", type=_integer(0, 20), metavar="N", help="in --json: of N alternatives too")
    add("--info", action="store_true", help="print versions, backend and devices, then exit")
    add("--version", action="version", version=f"tinydecode {__version__}")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    """How a token is chosen, in the order in which it applies."""
    add, probability, number = group.add_argument, _number(0, 1), _number()
    bias: dict[str, Any] = {"action": "append", "default": [], "type": _bias, "metavar": "ID=X"}
    add("--logit-bias", **bias, help="add X to a token's logit; may be repeated")
    add("--ban", **_ids, help="never choose this token; may be repeated")
    add("--repetition-penalty", type=_number(1e-6), default=1.0, metavar="R", help="[1: none]")
    add("--presence-penalty", type=number, default=0.0, metavar="X", help="[0: none]")
    add("--frequency-penalty", type=number, default=0.0, metavar="X", help="[0: none]")
    add("--temperature", type=_number(0), default=0.0, metavar="T", help="0 is greedy [0]")
    add("--top-k", type=_integer(0), default=0, metavar="K", help="only the K likeliest [0: all]")
    add("--top-p", type=probability, default=1.0, metavar="P", help="only the top P [1: all]")
    add("--min-p", type=probability, default=0.0, metavar="P", help="P times the best's [0: all]")
    add("--seed", type=_integer(0), metavar="SEED", help="repeats a sampled text [random]")


def _number(low: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or not low <= value <= high:
            limits = f"finite and >= {low:g}" if high == math.inf else f"in {low:g} to {high:g}"
            limits = "finite" if low == -math.inf else limits
            raise argparse.ArgumentTypeError(f"must be {limits}, found {text}")
        return value

    parse.__name__ = "number"  # argparse: "invalid number value: 'x'"
    return parse


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f">= {low}" if high is None else f"in {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {limits}, found {text}")
        return value

    parse.__name__ = "integer"
    return parse


def _draft_length(text: str) -> int | str:
    return "auto" if text == "auto" else _integer(1, 15)(text)


_draft_length.__name__ = "K"


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d+)=(.+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be ID=NUMBER, found {text!r}")
    return int(found[1]), _number()(found[2])


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must have at least one character")
    return text


_ids: dict[str, Any] = {
    "action": "append",
    "default": [],
    "type": _integer(0),
    "metavar": "ID",
}


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, found {text!r}")
    return text
