"""Chat templates: programs in jinja2's language that come with a checkpoint. They run in its sandbox, with limits."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

from minivllm.files import printable

MAX_TEMPLATE_CHARS = 10**6  # real ones have less than 30,000
MAX_SECONDS = 5.0
MAX_CHARS = 10**7  # of the output, and of any value in between
MAX_TOTAL = 10**9  # of all values together, which a template may keep


def render_chat_template(template: str, **variables: Any) -> str:
    """Render a chat template as transformers does.

    Raises ValueError if it is faulty, refuses the messages, runs for more than `MAX_SECONDS`, makes a text or list of
    more than `MAX_CHARS`, or more than `MAX_TOTAL` of them. The clock is looked at in every round of a loop, every call
    and every filter, and sizes after each. So one built-in operation is not stopped that takes long, or much memory, by
    itself, such as the `replace` of each letter of a long text by another long text.
    """
    try:
        environment = _environment()
    except ImportError:
        raise ValueError("chat templates need jinja2: pip install jinja2") from None
    try:
        if len(template) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"it has {len(template):,} characters, the most is {MAX_TEMPLATE_CHARS:,}")
        pieces, num_chars = [], 0
        for piece in environment.compile_with_limits(template).generate(**variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise ValueError(f"it made more than {MAX_CHARS:,} characters")
        return "".join(pieces)
    except Exception as error:  # a template is someone else's program and may fail in any way
        message = printable(error)
        raise ValueError(f"the model's chat template failed on these messages: {message}") from None


def _environment() -> Any:
    """The sandbox: what templates may use beyond jinja2's own, and the limits. Raises ImportError without jinja2."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(jinja2.ext.Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's text for training; here it is just text."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PassByLimits(NodeTransformer):
        """Makes each round of a loop, and each `a ~ b`, a call of the environment, where the limits are."""

        def visit_For(self, node):
            self.generic_visit(node)
            look = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(look))
            return node

        def visit_Concat(self, node):
            self.generic_visit(node)
            return nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})  # those that make large values of small ones

        def compile_with_limits(self, template: str) -> jinja2.Template:
            """The template, to be rendered at once: its time runs from here."""
            self.num_made = 0
            self.deadline = time.monotonic() + MAX_SECONDS
            tree = PassByLimits().visit(self.parse(template))
            return self.from_string(tree.set_environment(self).set_lineno(1))

        def check_time(self) -> None:
            if time.monotonic() > self.deadline:
                raise ValueError(f"it ran for more than {MAX_SECONDS:g} s")

        def within_limits(self, value: Any) -> Any:
            """`value`, which the template has made or writes, if it is not too large."""
            if isinstance(value, (str, bytes, list, tuple)):
                self.check_size(len(value))
                self.num_made += len(value)
                if self.num_made > MAX_TOTAL:
                    raise ValueError(f"it made more than {MAX_TOTAL:,} characters and items in all")
            return value

        def check_size(self, size: int) -> None:
            if size > MAX_CHARS:
                raise ValueError(f"it made a value of {size:,} characters or items, the most is {MAX_CHARS:,}")

        def concatenate(self, *values: Any) -> str:
            return "".join(map(str, values))

        def call(self, context, function, *args, **kwargs):
            self.check_time()
            return self.within_limits(super().call(context, function, *args, **kwargs))

        def call_binop(self, context, operator, left, right):
            if operator == "*":
                for sequence, times in ((left, right), (right, left)):
                    if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                        self.check_size(len(sequence) * times)
            if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > 4096:
                    raise ValueError("it calculated with numbers of more than 4,096 bits")
            return self.within_limits(super().call_binop(context, operator, left, right))

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _limited(environment, function) for name, function in environment.filters.items()}
    environment.finalize = environment.within_limits  # of all that is written, in macros too
    del environment.globals["lipsum"]  # placeholder text, as long as is asked for

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now)
    return environment


def _limited(environment: Any, function: Callable) -> Callable:
    """A filter that looks at the limits. `wraps` keeps the marks by which jinja2 knows what a filter wants."""

    @functools.wraps(function)
    def limited(*args, **kwargs):
        environment.check_time()
        return environment.within_limits(function(*args, **kwargs))

    return limited


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)
