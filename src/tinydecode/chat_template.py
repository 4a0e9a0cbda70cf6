"""Rendering chat templates: jinja2, sandboxed, set up as transformers does.

Templates come with models and are not trusted: the sandbox keeps them from everything but the
values they are given.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render_chat(template: str, variables: dict[str, Any]) -> str:
    """Render a chat template.

    Args:
        template: jinja source.
        variables: what the template sees: messages, add_generation_prompt, bos_token, ...

    Raises:
        ValueError: the template raised an exception (its message), or it cannot be rendered.
    """
    try:
        return _environment().from_string(template).render(variables)
    except _TemplateRefusal as error:
        raise ValueError(f"the chat template refuses: {error}") from error
    except Exception as error:  # whatever foreign code may run into
        raise ValueError(f"the chat template failed: {error}") from error


class _TemplateRefusal(Exception):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _to_json(value: Any, **options: Any) -> str:
    """jinja2's own filter escapes HTML, which would alter tool descriptions."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
