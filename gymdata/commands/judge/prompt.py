"""How a comparison is put to a judge: in the roles that its template knows, or as one text for an ordinary model.

Invariants: what a response says is data; it is put in once and never read as a template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gymdata.errors import DataError, UsageError, needs
from gymdata.rollouts.messages import Message
from gymdata.store.paths import Identity

#: The default of ``--judge-prompt default``. Variables: conversation (messages with role and content), response_1,
#: response_2, principle (text or nothing).
DEFAULT_PROMPT = """\
You compare two responses to the same conversation.
{% if principle %}
Principle: {{ principle }}
{% endif %}
# Conversation
{% for message in conversation %}
[{{ message.role }}]
{{ message.content }}
{% endfor %}
# Response 1
{{ response_1 }}

# Response 2
{{ response_2 }}

Weigh both. Then end with one JSON object and nothing after it:
{"score_1": S1, "score_2": S2, "ranking": R}
S1 and S2 say how helpful each response is, from 1 (not at all) to 5 (extremely). R compares them: 1 when response 1 is \
much better, 2 better, 3 slightly better, 4 when response 2 is slightly better, 5 better, 6 much better.
"""


class Form(Protocol):
    """Makes the messages of one comparison. ``identity`` distinguishes forms."""

    identity: Identity

    def messages(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None
    ) -> list[Message]: ...


class Roles:
    """The conversation, then messages in the roles principle (when there is one), response_1 and response_2."""

    identity: Mapping[str, Any] = {"form": "roles"}

    def messages(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None
    ) -> list[Message]:
        stated: list[Message] = [{"role": "principle", "content": principle}] if principle else []
        shown: list[Message] = [
            {"role": "response_1", "content": response_1},
            {"role": "response_2", "content": response_2},
        ]
        return [*conversation, *stated, *shown]


class Prompt:
    """One user message, made by a Jinja template. Raises DataError for a template that does not work."""

    def __init__(self, template: str, name: str | None = None) -> None:
        with needs("collect"):
            from jinja2 import StrictUndefined, TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        self._name = "--judge-prompt" if name is None else f"--judge-prompt {name}"
        self._fault = TemplateError
        digest = hashlib.blake2b(template.encode(), digest_size=8).hexdigest()
        self.identity: Identity = {"form": "prompt", "template": digest}
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise DataError(f"{self._name}: is no Jinja template: {error}") from error
        mark_1, mark_2 = (f"\x00{n}\x00" for n in (1, 2))
        rendered = self.messages([{"role": "user", "content": "question"}], mark_1, mark_2, "principle")[0]["content"]
        for name, mark in (("response_1", mark_1), ("response_2", mark_2)):
            if mark not in rendered:
                raise UsageError(f"{self._name}: the template never shows {name}", hint=f"put {{{{ {name} }}}} in it")

    @classmethod
    def load(cls, path: Path) -> Prompt:
        """From a file; the name ``default`` is the shipped template."""
        if str(path) == "default":
            return cls(DEFAULT_PROMPT)
        if not path.is_file():
            raise DataError.missing_path(path, "a Jinja template, or the word default")
        return cls(path.read_text(encoding="utf-8"), str(path))

    def messages(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None
    ) -> list[Message]:
        try:
            text = self._template.render(
                conversation=conversation, response_1=response_1, response_2=response_2, principle=principle
            )
        except (self._fault, ArithmeticError, ValueError, TypeError) as error:
            raise DataError(
                f"{self._name}: {error}", hint="it may use conversation, response_1, response_2 and principle"
            ) from error
        return [{"role": "user", "content": text}]
