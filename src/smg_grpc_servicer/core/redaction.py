"""Keeps credentials out of answers and logs.

`redact` leaves out members whose key says "credential" and masks credentials inside the texts that
remain; `redact_text` masks them in one text. Both may take too much, are idempotent, and cost time
in proportion to the input. What looks like any other word (a bare 40-letter AWS secret without its
key) cannot be told and stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from smg_grpc_servicer.core.jsonable import Json, jsonable

MASK = "[redacted]"

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD_BREAK = re.compile(r"[^A-Za-z0-9]+")

# Anywhere in a key, words run together ("x-api-key", "apiKey", "awsSecretAccessKey").
_SECRET_PART = re.compile(
    r"apikeys?|secret|passw(or)?d|passphrase|credential|authorization|privatekey|accesskey"
    r"|sessionkey|signingkey|encryptionkey|masterkey|accountkey|authkey|hmackey|adminkey"
    r"|accesstoken|authtoken|bearer|cookie|connectionstring"
)
# As the last word of a key; a number there is a count or a switch, not a credential.
_SECRET_LAST = frozenset({"token", "auth", "jwt", "pwd", "passwd"})
# "..._tokens" is a count or a list of ids unless one of these stands before it.
_TOKEN_OWNER = frozenset(
    {"access", "api", "auth", "bearer", "client", "hf", "id", "refresh", "security", "session"}
)
# "..._token" is the tokenizer's own business after one of these.
_TOKEN_ROLE = frozenset(
    {
        "additional", "audio", "begin", "bos", "boi", "cls", "decoder", "draft", "end", "eoi",
        "eos", "first", "image", "last", "mask", "next", "pad", "per", "sep", "special", "start",
        "stop", "think", "unk", "video", "vision",
    }
)  # fmt: skip

_PLACES = frozenset({"file", "path", "dir", "directory"})

_KEY_IN_TEXT = (
    r"api[_-]?keys?|secret|passw(?:or)?d|passphrase|credentials?|private[_-]?key|access[_-]?key"
    r"|(?:access|auth|hf|session|security|refresh|bearer|id)[_-]?tokens?"
)
_PLACE_IN_TEXT = r"(?![_-]?(?:file|path|dir)\b)"
_VALUE_OF_KEY = rf"(?:{_KEY_IN_TEXT}){_PLACE_IN_TEXT}[\w-]{{0,32}}\\?[\"']?\s{{0,4}}[=:]\s{{0,4}}"
_KEY_HINTS = ("key", "secret", "passw", "passphrase", "credential", "token")

# What must occur (in lower case) for the pattern to be tried; the pattern; what takes its place.
# Repetitions are bounded where a start can occur often, so that no text makes a pattern run away.
_TEXT_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    # A private key block, also one that is cut short.
    (
        ("private key",),
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----"
            r"(?:.*?-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|.*)",
            re.DOTALL,
        ),
        MASK,
    ),
    # User information of a URL, also with a password that should have been escaped.
    (("://",), re.compile(r"(?<=://)[^\s/?#]{1,512}@"), f"{MASK}@"),
    (
        ("://",),
        re.compile(r"(?<=://)[^\s/?#@\[\]:]{0,256}:(?!\d{1,5}(?:[/?#\s]|$))[^\s@]{1,256}@"),
        f"{MASK}@",
    ),
    (
        ("?", "&", ";"),
        re.compile(
            r"(?i)([?&;](?:[\w.-]{0,32}(?:key|token|secret|sig|signature|password|credential))=)"
            r"[^&;#\s\"']+"
        ),
        rf"\g<1>{MASK}",
    ),
    (
        ("bearer",),
        re.compile(r"(?i)\bbearer\s+(?!auth|token)[A-Za-z0-9._~+/=-]{4,}"),
        f"Bearer {MASK}",
    ),
    (
        ("basic",),
        re.compile(r"\b[Bb]asic\s+(?=[A-Za-z+/]*[0-9=])[A-Za-z0-9+/=]{8,}"),
        f"Basic {MASK}",
    ),
    # name=value, "name": "value" (also inside quoted JSON) and --name value.
    (
        _KEY_HINTS,
        re.compile(rf"(?i)({_VALUE_OF_KEY})(\\?[\"'])(?!\2)(?:(?!\2).){{1,4096}}"),
        rf"\g<1>\g<2>{MASK}",
    ),
    (
        _KEY_HINTS,
        re.compile(
            rf"(?i)({_VALUE_OF_KEY})"
            r"(?!none\b|null\b|true\b|false\b|bearer\b|basic\b)[^\s\"'\\,;&}\])]+[\])]?"
        ),
        rf"\g<1>{MASK}",
    ),
    (
        ("--",),
        re.compile(rf"(?i)(--[\w-]{{0,32}}(?:{_KEY_IN_TEXT}|token)\s{{1,4}})(?!-)\S+"),
        rf"\g<1>{MASK}",
    ),
    (
        ("token",),
        re.compile(r"(?i)(?<![A-Za-z0-9])(token[\"']?\s{0,4}=\s{0,4}[\"']?)[^\s\"',;&}]{8,}"),
        rf"\g<1>{MASK}",
    ),
    # Credentials with a shape of their own.
    (
        ("hf_", "api_org_", "akia", "asia", "gh", "eyj", "aiza"),
        re.compile(
            r"(?<![A-Za-z0-9_])(?:"
            r"hf_(?=[A-Za-z]*[0-9])[A-Za-z0-9]{8,}|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
            r"|eyJ[\w-]{8,1024}\.[\w-]{8,8192}\.[\w-]*|AIza[\w-]{30,}"
            r")"
        ),
        MASK,
    ),
    (
        ("sk", "nvapi", "glpat", "xox"),
        re.compile(
            r"(?<![A-Za-z0-9_])(?:sk|nvapi|glpat|gsk|xox[abprs])[-_]"
            r"(?=[\w-]{0,64}[0-9A-Z])[\w-]{12,}"
        ),
        MASK,
    ),
)


def is_secret_key(key: str, value: object = None) -> bool:
    """Whether a member of this name may hold a credential."""
    words = [word for word in _WORD_BREAK.split(_CAMEL.sub("_", key).lower()) if word]
    if not words:
        return False
    if words[-1] in _PLACES:
        return False  # Where a credential lies is not the credential.
    if _SECRET_PART.search("".join(words)):
        return True
    number = isinstance(value, (bool, int, float)) or (
        isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
    )
    last = words[-1]
    before = set(words[:-1])
    if last == "tokens":
        return not number and (not before or bool(before & _TOKEN_OWNER))
    if last == "token" and before & _TOKEN_ROLE:
        return False
    return last in _SECRET_LAST and not number


def redact(mapping: Mapping[str, object]) -> dict[str, Json]:
    """A JSON-able copy of `mapping` without credentials, at any depth."""
    plain = jsonable(mapping)
    return _object(plain) if isinstance(plain, dict) else {}


def redact_text(text: str) -> str:
    """`text` with what looks like a credential masked."""
    lower = text.lower()
    for hints, pattern, mask in _TEXT_RULES:
        if any(hint in lower for hint in hints):
            text = pattern.sub(mask, text)
    return text


def _value(value: Json) -> Json:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return _array(value)
    return _object(value) if isinstance(value, dict) else value


def _object(members: dict[str, Json]) -> dict[str, Json]:
    result = {
        redact_text(key): _value(value)
        for key, value in members.items()
        if not is_secret_key(key, value)
    }
    # An environment entry or a header written as {"name": ..., "value": ...}.
    name = members.get("name", members.get("key"))
    if isinstance(name, str) and "value" in members and is_secret_key(name, members["value"]):
        result["value"] = MASK
    return result


def _array(values: list[Json]) -> list[Json]:
    result = [_value(value) for value in values]
    for index, value in enumerate(values[:-1]):
        # A command line's `--api-key X`, or a header as the pair ["authorization", "X"].
        if not isinstance(value, str) or not is_secret_key(value, values[index + 1]):
            continue
        follower = values[index + 1]
        flag = value.startswith("-") and "=" not in value
        if isinstance(follower, str) and not follower.startswith("-") and flag:
            result[index + 1] = MASK
        elif len(values) == 2 and not flag:
            result[1] = MASK
    return result
