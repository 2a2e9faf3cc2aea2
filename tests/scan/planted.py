"""Secrets of many kinds, none of them real and none of them in this file: each is put together when it is asked for."""

from __future__ import annotations

import base64
import json
import random
import string

_UPPER, _LOWER, _DIGITS = string.ascii_uppercase, string.ascii_lowercase, string.digits
_ANY, _HEX = string.ascii_letters + string.digits, "0123456789abcdef"


def planted(seed: int = 0) -> dict[str, tuple[str, str]]:
    """Kind → (a text that holds a secret, the part of it that must be nowhere)."""
    draw = random.Random(seed)

    def some(n: int, of: str = _ANY) -> str:
        # A digit is in every real one of this length.
        return "".join(draw.choice(of) for _ in range(n - 1)) + draw.choice([c for c in of if c.isdigit()] or of)

    def part(value: dict[str, str]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    def block(name: str) -> str:
        lines = "\n".join(some(64) for _ in range(4))
        return f"-----BEGIN {name}-----\n{lines}\n-----END {name}-----"

    whole = {
        "aws id": "AK" + "IA" + some(16, _UPPER + _DIGITS),
        "aws session id": "AS" + "IA" + some(16, _UPPER + _DIGITS),
        "github": "gh" + "p_" + some(36),
        "github app": "gh" + "s_" + some(36),
        "github fine-grained": "github" + "_pat_" + some(82),
        "gitlab": "gl" + "pat-" + some(20),
        "slack bot": "xo" + "xb-" + some(12, _DIGITS) + "-" + some(12, _DIGITS) + "-" + some(24),
        "slack app": "xa" + "pp-1-" + some(11, _UPPER + _DIGITS) + "-" + some(12, _DIGITS) + "-" + some(64, _HEX),
        "slack webhook": "https://hooks.slack." + "com/services/T" + some(8) + "/B" + some(8) + "/" + some(24),
        "stripe": "sk" + "_live_" + some(24),
        "stripe test": "rk" + "_test_" + some(24),
        "stripe webhook": "wh" + "sec_" + some(32),
        "rsa key": block("RSA PRIVATE" + " KEY"),
        "openssh key": block("OPENSSH PRIVATE" + " KEY"),
        "pgp key": block("PGP PRIVATE" + " KEY BLOCK"),
        "jwt": ".".join([part({"alg": "HS256", "typ": "JWT"}), part({"sub": "12345678"}), some(43)]),
        "npm": "np" + "m_" + some(36),
        "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + some(80),
        "openai": "s" + "k-" + some(48),
        "openai project": "s" + "k-proj-" + some(40) + "_" + some(40),
        "anthropic": "s" + "k-ant-api03-" + some(93),
        "openrouter": "s" + "k-or-v1-" + some(64, _HEX),
        "huggingface": "h" + "f_" + some(34),
        "google": "AI" + "za" + some(35),
        "google oauth": "ya" + "29." + some(60),
        "google secret": "GOC" + "SPX-" + some(28),
        "twilio account": "A" + "C" + some(32, _HEX),
        "twilio key": "S" + "K" + some(32, _HEX),
        "sendgrid": "S" + "G." + some(22) + "." + some(43),
        "mailchimp": some(32, _HEX) + "-u" + "s14",
        "discord": "M" + some(23) + "." + some(6) + "." + some(27),
        "telegram": some(10, "123456789") + ":" + some(35),
        "square": "sq0" + "csp-" + some(43),
        "groq": "gs" + "k_" + some(52),
        "xai": "xa" + "i-" + some(80),
        "replicate": "r" + "8_" + some(37),
        "digitalocean": "do" + "p_v1_" + some(64, _HEX),
        "shopify": "shp" + "at_" + some(32, _HEX),
        "databricks": "da" + "pi" + some(32, _HEX),
        "linear": "lin" + "_api_" + some(40),
        "postman": "PM" + "AK-" + some(24, _HEX) + "-" + some(34, _HEX),
        "vault": "hv" + "s." + some(24),
        "docker": "dckr" + "_pat_" + some(27),
        "e-mail": "ada.lovelace" + some(3) + "@" + "uni-" + some(5, _LOWER + _DIGITS) + ".edu",
        "home": "/ho" + "me/" + some(8, _LOWER),
        "home on a mac": "/Us" + "ers/" + some(8, _LOWER),
        "home on windows": "C:" + "\\Us" + "ers\\" + some(8, _LOWER),
    }
    secret, password, azure, bearer = some(40), some(14), some(86) + "==", some(40)
    within = {
        "aws secret": (f'aws_secret_access_key = "{secret}"', secret),
        "basic auth": (f"https://reader:{password}" + "@db.internal/x", password),
        "azure": ("Account" + f"Key={azure}", azure),
        "bearer": (f"Authorization: Bearer {bearer}", bearer),
    }
    return {kind: (value, value) for kind, value in whole.items()} | within
