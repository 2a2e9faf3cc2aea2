"""How a comparison is put to a judge: in the roles that its template knows, or as one text for an ordinary model.

Invariants: what a response says is data; it is put in once and never read as a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gymdata.errors import DataError, UsageError
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


class Roles:
    """The messages of one comparison: the conversation, then the roles principle (when there is one), response_1 and
    response_2. ``identity`` distinguishes forms."""

    identity: ClassVar[Identity] = {"form": "roles"}

    def messages(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None
    ) -> list[Message]:
        shown = {"principle": principle} if principle else {}
        shown |= {"response_1": response_1, "response_2": response_2}
        return [*conversation, *({"role": role, "content": content} for role, content in shown.items())]


class Prompt:
    """One user message, made by a Jinja template. Raises DataError for a template that does not work."""

    def __init__(self, template: str, name: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        self._name = "--judge-prompt" if name is None else f"--judge-prompt {name}"
        self.identity: Identity = {"form": "prompt", "template": blake2b(template.encode(), digest_size=8).hexdigest()}
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise DataError(f"{self._name}: is no Jinja template: {error}") from error
        mark_1, mark_2 = "\x001\x00", "\x002\x00"
        (rendered,) = self.messages([{"role": "user", "content": "question"}], mark_1, mark_2, "principle")
        for variable, mark in (("response_1", mark_1), ("response_2", mark_2)):
            if mark not in rendered["content"]:
                text = f"{self._name}: the template never shows {variable}"
                raise UsageError(text, hint=f"put {{{{ {variable} }}}} in it")

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
        except (TemplateError, ArithmeticError, ValueError, TypeError) as error:
            hint = "it may use conversation, response_1, response_2 and principle"
            raise DataError(f"{self._name}: {error}", hint=hint) from error
        return [{"role": "user", "content": text}]


Form = Roles | Prompt
