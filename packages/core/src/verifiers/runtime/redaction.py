"""Remove secrets from whatever leaves the process: settings that are saved, messages, tracebacks,
command lines.

A secret is known by its *name* (``judge_api_key``, ``X-Api-Key``, the values of ``headers``), by
its *shape* (``sk-…``, ``Bearer …``, a login or a long value in a URL), or by its *value*: those of
environment variables with KEY, TOKEN, SECRET or PASSWORD in their names, and those that settings
brought (``remember_secrets``), in every form in which they are printed. ``***`` stands for it; in
the identity of a run a short digest follows, so that two secrets differ. Text of models and datasets
is not searched. A long text is cut before it is searched, and every pattern takes time in proportion
to the text, whatever stands in it.
"""

from __future__ import annotations

import functools
import hashlib
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from verifiers.runtime.decoding import decode_json

HIDDEN = "***"
MIN_SECRET_CHARS = 8
"""Shorter values ("1", "true") are not searched for in texts; replacing them would corrupt the
text."""

MAX_TEXT_CHARS = 32_768
"""Of a longer text, which quotes a reply or a file, both ends are shown."""
_ROOM_CHARS = 4_096
"""Searched beyond a cut, so that a secret across it is known."""

_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_CREDENTIAL = re.compile(
    r"(^|_)((api|subscription|access|private|signing|secret)_?keys?|secret_access_keys?|client_secrets?"
    r"|(api|access|auth|bearer|session|refresh|id|hub|hf|github|wandb|judge)_tokens?)$"
    r"|^((set_)?cookies?|(proxy_)?authorization)$"
)
_SECRET = re.compile(
    r"(^|_)(secrets?|passwords?|passwd|passphrase|credentials?)$|^tokens?$|^(extra_|default_|request_)?headers?$"
)
_VARIABLE = re.compile(r"[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD)")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_DIGEST = re.compile(r" [0-9a-f]{8}$")
_DIGESTED = re.compile(re.escape(HIDDEN) + r"( [0-9a-f]{8})?$")
_KEYS = r"(api[-_]?key|(access|auth|session|refresh)[-_]token|secret[-_](access[-_])?key|client[-_]secret|passw(or)?d)"
_ENDS_OF_NAMES = "|".join(
    f"(?<={end}=)"
    for end in "key token secret password passwd pwd code sig signature auth credential".split()
)
_PATTERNS = (
    re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",}]+"),
    re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"),
    re.compile(rf"(?i)((?:{_KEYS})['\"]?\s*[:=]\s*['\"]?)[^\s'\",}}]+"),
    re.compile(r"()(?<=://)(?!git@)[^/\s?#'\"]+(?=@)"),  # a login, or a token alone
    re.compile(  # a value of an address: by its name, or as long as no word is
        rf"(?i)([?&#;][\w.~-]++=(?:{_ENDS_OF_NAMES}|(?<!version=)(?=[^&\s#'\"]{{16}})))[^&\s#'\"]+"
    ),
    re.compile(
        r"()\b(sk-[\w-]{16,}|(hf|gsk|r8|gh[pousr])_\w{20,}|github_pat_\w{20,}|(glpat|nvapi|xox[abprs])-[\w-]{16,}"
        r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,})"
    ),
    re.compile(  # a JWT; a run of its characters is searched once, and only if two more follow
        r"(?<![\w-])(?=[\w-]{19,}+\.[\w-]{16,}+\.[\w-])((?:[\w-]*?-)?)eyJ[\w-]{16,}\.[\w-]+\.[\w-]+"
    ),
)
_SECRET_HEADER = re.compile(
    r"key|token|secret|passw|passphrase|passcode|credential|auth|cookie|session|signature|jwt|bearer"
    r"|access|private|csrf|xsrf|otp|login|pwd|(^|_)(sig|sid|code|pin)(_|$)"
)
_PLAIN_HEADER = re.compile(
    r"^(accept|content)(_|$)|(^|_)(agent|app|application|beta|channel|client|cluster|encoding|env"
    r"|environment|format|group|host|ids?|lang|language|locale|mode|model|name|org|organization"
    r"|origin|priority|project|provider|purpose|referer|referrer|region|route|router|run|service|source"
    r"|stage|team|tenant|tier|timeout|title|trace|type|user|version|zone)(_|$)"
)
_PLAIN_WORDS = re.compile(
    r"\A(?:(?>(?:[A-Za-z][a-z]{0,18}|[A-Z]{1,12}|[A-Z][a-z]{1,12}[A-Z]{1,2}[a-z]{0,12}|v?[0-9]{1,8})"
    r"(?![A-Za-z0-9]))(?:[ .,:;/@()&?|~_-]{1,4}+|\Z))++\Z"
)
"""Words as people write them, numbers and versions between them: no letters and digits together."""
_DATE_OR_VERSION = re.compile(r"\A(20[0-9]{2}-[0-9]{2}-[0-9]{2}|v?[0-9]{1,4}(\.[0-9]{1,4}){1,3})\Z")
_SCHEME = re.compile(r"(?i)\A\s{0,9}(?:bearer|basic|token)\s{1,9}")
_remembered: set[str] = set()
"""Secrets in all their forms."""


# --- names and values -----------------------------------------------------------------------------


def is_secret_name(name: str) -> bool:
    """Whether the value of a setting, header or variable with this name is a secret.

    >>> [name for name in ("judgeApiKey", "X-Api-Key", "HF_TOKEN", "eos_token", "max_tokens") if is_secret_name(name)]
    ['judgeApiKey', 'X-Api-Key', 'HF_TOKEN']
    """
    words = _words(name)
    is_variable = name.isupper() and len(name) > 3 and _VARIABLE.match(name) is not None
    return bool(
        _CREDENTIAL.search(words) or _SECRET.search(words) or is_variable
    ) and not words.endswith("max_tokens")


def is_credential_name(name: str) -> bool:
    """Whether a column of this name holds a key or a header; ``secret`` and ``password`` may be
    data of a task."""
    return _CREDENTIAL.search(_words(name)) is not None


def remember_secrets(settings: object) -> None:
    """Remove the values of secret names, at any depth, from every later ``redacted_text``."""

    def remember(text: str, _: str) -> str:
        remember_values([text])
        return text

    _walk(settings, remember, lambda name: is_secret_name(name) and not _is_headers(name))
    _remember_headers_in(settings)


def _remember_headers_in(settings: object, name: str = "") -> None:
    if isinstance(settings, Mapping):
        if _is_headers(name):
            remember_headers(settings)
        for key, member in settings.items():
            # a mapping within headers has the names of headers too
            is_deeper = _is_headers(name) and isinstance(member, Mapping)
            _remember_headers_in(member, name if is_deeper else str(key))
    elif isinstance(settings, list | tuple):
        for member in settings:
            _remember_headers_in(member, name)


def _is_headers(name: str) -> bool:
    return _words(name).endswith(("header", "headers"))


def remember_values(values: Iterable[str]) -> None:
    """Remove secrets that have no name from every later ``redacted_text``."""
    for value in values:
        _remembered.update(_forms(value), _forms(_SCHEME.sub("", value, count=1)))


def remember_headers(headers: Mapping[str, object]) -> None:
    """Remove the values of headers from every later ``redacted_text``, except for those that are no
    secrets (`is_plain_header`)."""
    remember_values(
        str(text) for name, text in headers.items() if not is_plain_header(name, str(text))
    )


def is_plain_header(name: str, value: str) -> bool:
    """Whether the value of a header, or of a query, is certainly no secret: its name does not say
    so, and the value is a date or a version, or words and numbers where the name asks for such.

    >>> [is_plain_header("X-Team", value) for value in ("blue-team, night shift", "tk4fQ29zLw", "Bearer night-shift")]
    [True, False, False]
    >>> [is_plain_header(name, "night-shift") for name in ("X-Gate", "X-Api-Key", "X-Project-Token")]
    [False, False, False]
    """
    words = _words(name)
    if is_secret_name(name) or _SECRET_HEADER.search(words) or _SCHEME.match(value):
        return False
    if re.match(r"(accept|content_(type|encoding|language)|user_agent|.*_beta$)", words):
        return True
    value = value.strip()
    return bool(
        _DATE_OR_VERSION.match(value) or (_PLAIN_HEADER.search(words) and _PLAIN_WORDS.match(value))
    )


@functools.lru_cache(maxsize=1024)
def _forms(secret: str) -> tuple[str, ...]:
    """A secret as it is printed: without spaces at its ends, in JSON, as a literal of Python, in a
    URL, in HTML; in Python and JSON also within another text of JSON.

    >>> _forms("pass/word ")
    ('pass%2Fword', 'pass/word')
    """
    text = secret.strip()
    encoded = text.encode("utf-8", "surrogatepass")
    forms = {text, repr(text)[1:-1], repr(encoded)[2:-1], html.escape(text)}
    forms |= {quote(encoded), quote(encoded, safe=""), quote_plus(encoded)}
    for is_ascii in (True, False):
        escaped = json.dumps(text, ensure_ascii=is_ascii)[1:-1]
        forms |= {escaped, json.dumps(escaped, ensure_ascii=is_ascii)[1:-1]}
    long_enough = [form for form in forms if len(text) >= MIN_SECRET_CHARS]
    return tuple(sorted(long_enough, key=lambda form: (-len(form), form)))


# --- texts ----------------------------------------------------------------------------------------


def redacted_text(text: str, max_chars: int | None = MAX_TEXT_CHARS) -> str:
    """The text with secrets replaced by ``***``; of a text longer than ``max_chars`` both ends (None:
    all of it).

    >>> redacted_text("headers: {'Authorization': 'Bearer abc123'}, judge_api_key='x', https://me:pass@host")
    "headers: {'Authorization': 'Bearer ***'}, judge_api_key='***', https://***@host"
    """
    if max_chars is None:
        return _without_secrets(text)
    room, half = max(_ROOM_CHARS, *map(len, _remembered), 0), max_chars // 2
    if len(text) <= max_chars + 2 * room:
        redacted_whole = _without_secrets(text)
        if len(redacted_whole) <= max_chars:
            return redacted_whole
        head, tail = redacted_whole[:half], redacted_whole[-half:]
    else:  # without what is beside the cut, which may be a part of a secret
        head = _without_secrets(text[: half + room])[:-room][:half]
        tail = _without_secrets(text[-half - room :])[room:][-half:]
    return f"{head}\n… {len(text) - max_chars} characters left out …\n{tail}"


def _secrets() -> list[str]:
    """What is hidden wherever it stands: remembered secrets and those of variables, longest first
    (a secret may be the beginning of another)."""
    variables = [
        form
        for name, value in os.environ.items()
        if len(value) >= MIN_SECRET_CHARS and any(part in name.upper() for part in _VARIABLES)
        for form in _forms(value)
    ]
    return sorted({*_remembered, *variables}, key=len, reverse=True)


def _without_secrets(text: str, secrets: Sequence[str] | None = None) -> str:
    for secret in _secrets() if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def redacted_words(words: Iterable[str]) -> list[str]:
    """The words of a command line without secrets: values of options, members of JSON objects,
    values of headers.

    >>> redacted_words(["-a", '{"api_key": "x", "n": 1}', "--header", "X-Run: 5", "--env.args.password=y", "-n", "3"])
    ['-a', '{"api_key": "***", "n": 1}', '--header', 'X-Run: ***', '--env.args.password=***', '-n',
    '3']
    """
    printable, option = [], ""
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        name = (flag if equals else option).rpartition(".")[2].lstrip("-")
        is_option = word.startswith("-") and not equals
        printable.append(word if is_option else f"{flag}{equals}{_redacted_value(value, name)}")
        option = word if is_option else ""
    return printable


def _redacted_value(value: str, option: str) -> str:
    if is_secret_name(option):
        header, colon, _ = value.partition(":")
        return f"{header}: {HIDDEN}" if colon and "header" in option else HIDDEN
    try:
        content = decode_json(value)
    except ValueError:
        return redacted_text(value, None)
    redacted_content = redacted(content) if isinstance(content, dict | list) else content
    return (
        value if redacted_content == content else json.dumps(redacted_content, ensure_ascii=False)
    )


# --- values ---------------------------------------------------------------------------------------


def redacted(settings: object) -> Any:
    """A JSON value without secrets: those of secret names, at any depth, and those that texts
    contain.

    >>> redacted({"extra_headers": {"X-Run": "5"}, "judge": {"api_key": "abc", "model": "m"}, "temperature": 0.5})
    {'extra_headers': {'X-Run': '***'}, 'judge': {'api_key': '***', 'model': 'm'}, 'temperature':
    0.5}
    """
    secrets = _secrets()
    return _walk(
        settings,
        lambda text, name: HIDDEN,
        is_secret_name,
        lambda text: _without_secrets(text, secrets),
    )


def without_secrets(
    settings: Mapping[str, object], prefix: str = ""
) -> tuple[dict[str, object], list[str]]:
    """(the settings without those that hold a secret, the dotted names that were left out).

    >>> without_secrets({"n": 3, "judge": {"model": "m", "api_key": "abc"}})
    ({'n': 3, 'judge': {'model': 'm'}}, ['judge.api_key'])
    """
    remaining: dict[str, object] = {}
    left_out: list[str] = []
    for key, value in settings.items():
        pair = {key: value}
        if str(redacted(pair)).count(HIDDEN) == str(pair).count(HIDDEN):
            remaining[key] = value
        elif isinstance(value, Mapping) and is_secret_name(key):
            left_out += [f"{prefix}{key}.{member}" for member in value]
        elif isinstance(value, Mapping):
            remaining[key], names = without_secrets(value, f"{prefix}{key}.")
            left_out += names
        else:
            left_out.append(f"{prefix}{key}")
    return remaining, left_out


def redacted_column(column: object) -> object:
    """A column of a saved rollout without the values of credentials' names; its texts are data and
    stay."""
    return _walk(column, lambda text, name: HIDDEN, is_credential_name)


def digested(settings: object) -> Any:
    """As ``redacted``, with 8 hex digits that tell secrets apart; a value that is redacted already
    stays.

    The digest is PBKDF2 with the name as salt, cut to 32 bits: a key cannot be recovered from it,
    nor a password confirmed with certainty.
    """
    return _walk(settings, _digested, is_secret_name, _digested_text)


def without_digest(value: object) -> object:
    """A redacted text without its digest, other values unchanged: version 0.2.0
    stored no digests."""
    return _DIGEST.sub("", value) if isinstance(value, str) and HIDDEN in value else value


def _digested(text: str, name: str) -> str:
    return text if _DIGESTED.match(text) else f"{HIDDEN} {_digest(text, name)}"


def _digested_text(text: str) -> str:
    if len(text) < MIN_SECRET_CHARS or _DIGESTED.match(text):
        return text
    readable = redacted_text(text, None)
    return text if readable == text else f"{readable} {_digest(text, '')}"


@functools.lru_cache(maxsize=1024)
def _digest(text: str, name: str) -> str:
    salt = f"verifiers identity {_words(name)}".encode()
    return hashlib.pbkdf2_hmac(
        "sha256", text.encode("utf-8", "surrogatepass"), salt, 20_000, dklen=4
    ).hex()


def _walk(
    value: object,
    hide: Callable[[str, str], str],
    is_secret: Callable[[str], bool],
    show: Callable[[str], str] | None = None,
    name: str = "",
    inside: bool = False,
) -> object:
    """A copy of a JSON value: ``hide(text, name)`` for what stands below a secret name,
    ``show(text)`` for others."""
    if isinstance(value, Mapping):
        return {
            key: _walk(member, hide, is_secret, show, str(key), inside or is_secret(str(key)))
            for key, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walk(member, hide, is_secret, show, name, inside) for member in value]
    if inside:
        if value is None or isinstance(value, bool) or value == "":
            return value
        return hide(str(value), name)
    return show(value) if show is not None and isinstance(value, str) else value


def _words(name: str) -> str:
    """A name in lower case with underscores: ``judgeApiKey`` and ``Judge-Api-Key`` are
    ``judge_api_key``."""
    return re.sub(r"[-\s]+", "_", _WORD_START.sub("_", name)).lower()
