"""What ``scan`` looks for: keys that detect-secrets knows, newer keys by their prefix, e-mail addresses and home folders.

Of detect-secrets those detectors are used that go by a key's own form. Left out are both entropy detectors, KeywordDetector
and IPPublicDetector, which take words, hashes and version numbers of ordinary answers for secrets, and NpmDetector, whose
match runs to the end of the line (``npm-token`` ends with the token).
"""

from __future__ import annotations

import functools
import html
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from gymdata.errors import MissingExtraError, RefusedError, needs, option

#: Modules and classes below ``detect_secrets.plugins``.
_DETECTORS = """
artifactory:ArtifactoryDetector aws:AWSKeyDetector azure_storage_key:AzureStorageKeyDetector basic_auth:BasicAuthDetector
cloudant:CloudantDetector discord:DiscordBotTokenDetector github_token:GitHubTokenDetector gitlab_token:GitLabTokenDetector
ibm_cloud_iam:IbmCloudIamDetector ibm_cos_hmac:IbmCosHmacDetector jwt:JwtTokenDetector mailchimp:MailchimpDetector
openai:OpenAIDetector pypi_token:PypiTokenDetector sendgrid:SendGridDetector slack:SlackDetector
softlayer:SoftlayerDetector square_oauth:SquareOAuthDetector stripe:StripeDetector
telegram_token:TelegramBotTokenDetector twilio:TwilioKeyDetector
"""
#: detect-secrets' pattern of a JWT ends before the signature; some patterns take the borders along.
_JWT_END, _WORD_END, _BORDERS = re.compile(r"[\w.=-]*"), re.compile(r"\w*"), " \t\r\n=:\"'"
#: A shorter value is not looked for outside the text that showed what it is.
LITERAL = 6


class Found(NamedTuple):
    """Characters ``start`` to before ``end`` of a text."""

    start: int
    end: int
    kind: str


Find = Callable[[str], tuple[Found, ...]]


@functools.cache
def finder(*, keys: bool = True) -> Find:
    """The function that finds all in a text, in order and apart from each other; it remembers texts that come again.

    Raises MissingExtraError without detect-secrets; without ``keys`` it is not used.
    """
    with needs("scan"):
        plugins = [
            getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)()
            for module, _, name in (detector.partition(":") for detector in _DETECTORS.split() if keys)
        ]
    lines = files("gymdata.scan").joinpath("keys.txt").read_text(encoding="utf-8").splitlines()
    named = [(kind.replace("-", "_"), p) for kind, _, p in (line.partition(" ") for line in lines if line[0] != "#")]
    # Those that begin a word as one pattern, which is searched for once.
    words = "|".join(f"(?P<{kind}>{p})" for kind, p in named if p[0] != "=")
    ours = [
        re.compile(rf"(?<![\w-])(?:{words})"),
        *(re.compile(f"(?P<{kind}>{p[1:]})") for kind, p in named if p[0] == "="),
    ]

    def find(text: str) -> tuple[Found, ...]:
        matches = (match for pattern in ours for match in pattern.finditer(text))
        named = [Found(*match.span(), str(match.lastgroup).replace("_", "-")) for match in matches]
        return apart([*named, *_known(plugins, text)])

    return functools.lru_cache(maxsize=4_096)(find)


def _known(plugins: list[Any], text: str) -> Iterator[Found]:
    """What detect-secrets finds, by its patterns: its functions give the values, but not where they are."""
    for plugin in plugins:
        kind = re.sub(r"[^a-z0-9]+", "-", plugin.secret_type.lower())
        valid = getattr(plugin, "is_formally_valid", bool)
        for pattern in plugin.denylist:
            for match in pattern.finditer(text):
                if not valid(match[0]):
                    continue
                # A group is the value without its surroundings, or a prefix only.
                least = 1 if kind == "basic-auth-credentials" else 16
                group = 1 if pattern.groups and len(match[1] or "") >= least else 0
                start, end = match.span(group)
                if group == 0 and (rest := (_JWT_END if "json" in kind else _WORD_END).match(text, end)):
                    end = rest.end()
                inner = text[start:end].strip(_BORDERS)
                start = text.index(inner, start)
                yield Found(start, start + len(inner), kind)


def apart(spans: list[Found]) -> tuple[Found, ...]:
    """In order, those that overlap as one, of the kind of the first."""
    result: list[Found] = []
    for span in sorted(spans, key=lambda f: (f.start, -f.end)):
        if result and span.start < result[-1].end:
            result[-1] = result[-1]._replace(end=max(span.end, result[-1].end))
        elif span.end > span.start:
            result.append(span)
    return tuple(result)


def without(text: str, spans: Iterable[Found]) -> str:
    """``text`` with ``[redacted:KIND]`` in the place of what was found in it; the same object where nothing was."""
    for span in reversed(tuple(spans)):
        text = f"{text[: span.start]}[redacted:{span.kind}]{text[span.end :]}"
    return text


def publishable(page: str, target: str | Path, allowed: bool) -> str:
    """An HTML page that may leave this machine: the user's own home folder is ``~`` in it. Raises RefusedError where it
    holds anything else that ``scan`` finds (without the extra ``scan``, by our own patterns), unless that is ``allowed``."""
    page = page.replace(f"{Path.home()}/", "~/") if len(Path.home().parts) > 1 else page
    try:
        find = finder()
    except MissingExtraError:
        find = finder(keys=False)
    if not allowed and (kinds := Counter(span.kind for span in find(html.unescape(page)))):
        listed = ", ".join(f"{kind} ({n:,})" for kind, n in kinds.most_common())
        hint = "`gymdata scan RUN` lists them, `gymdata scan RUN --redact -o OUT` writes a copy without them; "
        raise RefusedError(
            f"{target} is not written: the page would hold what should not be published: {listed}",
            hint=f"{hint}{option('allow_findings')} writes it nevertheless",
        )
    return page
