"""Mask secrets in everything that is logged, recorded or shown: values of keys that name one, and passwords in URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"

SHORTEST = 4
"""Shortest secret, in characters, that is masked in texts; shorter ones would occur in too many words."""

# For keys as lower-case words between underscores: hfToken is _hf_token_, DB_PASSWORD is _db_password_.
_NAMES_A_SECRET = re.compile(
    r"password|passwd|passphrase|passcode|credential|_pwd_|_jwt_|_sas_|_cookies?_|_pin_$"
    r"|secrets?_|secret_?key"  # clientSecret, secret_sauce; not secretary
    r"|auth_|_authorization_|_bearer_"  # auth, basic_auth, oauth; not author
    r"|(?:api|access|account|private|signing|encryption|ssh|license|licence)_?keys?_"
    r"|_(?:access|api|auth|refresh)_tokens_"
)
# Only a final token: token_dim, max_token_length and num_tokens are sizes; pad_token and the like are vocabulary.
_NAMES_A_TOKEN = re.compile(
    r"(?<!_(?:pad|eos|bos|unk|cls|sep|oov|end)_)(?<!_(?:mask|stop)_)(?<!_(?:start)_)token_(?:value_)?$"
    r"|_session_id_$|_signature_$"
    r"|_pass_$|[a-z0-9]_pat_$"  # db_pass, GITHUB_PAT; a number is not hidden: num_pass may count passes
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_END = r"\s\"'<>"
_IN_URL = (
    # In http URLs also a user without a password, which may be an access token; git@ and postgres@ are only names.
    re.compile(rf"(https?://)([^{_END}/?#:@]*)(?::([^{_END}/?#]*))?(?=@)", re.IGNORECASE),
    # Passwords of databases may contain a slash.
    re.compile(rf"\b((?!https?:)[a-z][a-z0-9+.-]*://)([^{_END}/:@]*):([^{_END}]*)(?=@)", re.IGNORECASE),
    # Whoever knows the path of a webhook may post.
    re.compile(
        r"(https?://(?:hooks\.slack\.com/\w+|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com/"
        rf"\w+|chat\.googleapis\.com/v1/spaces)/)([^{_END}]+)",
        re.IGNORECASE,
    ),
)
"""URLs with a secret: what precedes it, and the secret as the last group that matches."""
_QUERY_IN_URL = re.compile(rf"([?&]([\w.-]+)=)([^{_END}&#]+)")
_NAMES_A_SIGNATURE = re.compile(r"(?:.*[-_])?(?:sig|signature)", re.IGNORECASE)
"""Names of URL parameters with a signature, such as Azure's sig and X-Amz-Signature."""
_CONNECTION = re.compile(
    rf"\b((?:password|pwd|accountkey|sharedaccesskey|sharedaccesssignature)\s*=\s*)"
    rf"(?!(?:null|none|true|false|\*+)\b)(?!\*)([^;{_END}]+)",
    re.IGNORECASE,
)
"""A part of a connection string: `Server=db;Password=x;`."""

_also_secret: frozenset[str] = frozenset()
"""Names of keys that `run.secrets` adds, in the form of `_words`."""

_secret_values: frozenset[str] = frozenset()
"""Values of environment variables that `run.secrets` names, as `$NAME`."""

_Types = tuple[type, ...]
"""Types of the values that a key hides: none (), texts (str,), or all (object,)."""


def extend_secrets(names: Iterable[str], env: Mapping[str, str] = os.environ) -> None:
    """Also hide the values of keys with these `names` (`run.secrets`), in the whole process; `$NAME` stands for the
    value of an environment variable, wherever it occurs.
    """
    global _also_secret, _secret_values
    names = list(names)
    _also_secret = frozenset(_words(name) for name in names if not name.startswith("$"))
    values = {env.get(name[1:], "") for name in names if name.startswith("$")}
    _secret_values = frozenset(value for value in values if len(value) >= SHORTEST)


def masked(tree: Any) -> Any:
    """Return a copy of nested mappings and lists with `***` in place of secrets; null, true and false stay.

    Each part of a dotted key (`model.params.db.password`) is checked, as if the keys were nested.
    """
    return _masked(tree, ())


def secrets_of(tree: Any) -> set[str]:
    """Return the values that `masked` hides, as texts; of a URL, its password."""
    return {text for text in _secrets(tree, ()) if text}


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with `***` in place of each of `secrets` that is long enough, and of secrets in URLs."""
    wanted = sorted({secret for secret in secrets if len(secret) >= SHORTEST} | _secret_values, key=len, reverse=True)
    if wanted:
        # 1234 is not masked inside 12345, which is another number.
        whole = (rf"(?<!\d){secret}(?!\d)" if secret.isdigit() else re.escape(secret) for secret in wanted)
        text = re.sub("|".join(whole), MASK, text)
    return _mask_urls(text)


def masked_override(text: str) -> str:
    """Return an override of the command line, `key=value`, with `***` for a secret value."""
    key, equals, value = text.partition("=")
    if not equals or value.lower() in ("", "null", "true", "false"):
        return _mask_urls(text)
    hidden = hidden_by(key)
    if object in hidden or (hidden and not re.fullmatch(r"[-+\d.,e]+", value)):
        return f"{key}={MASK}"
    if "{" in value and any(hidden_by(inner) for inner in re.findall(r"([\w.-]+)['\"]?\s*:", value)):
        # {user: me, password: x}: mask all of it, since parsing Hydra's grammar here would be complex
        return f"{key}={MASK}"
    return _mask_urls(text)


def secrets_of_overrides(overrides: Iterable[str]) -> set[str]:
    """Return the values that `masked_override` hides, including single ones of a list or a sweep, for `mask_text`."""
    found: set[str] = set()
    for text in overrides:
        key, _, value = text.partition("=")
        inner = [(key, value), *re.findall(r"([\w.-]+)['\"]?\s*:\s*([^,{}]+)", value)]
        for name, secret in inner:
            if masked_override(f"{name}={secret}") == f"{name}={MASK}":
                found |= {secret, *(part.strip("[]'\" ") for part in secret.split(","))}
    return found - {""}


def masked_value(key: str, value: Any) -> Any:
    """Return `value` as it may be shown beside its `key`."""
    return _masked(value, hidden_by(key))


def hidden_by(key: str) -> _Types:
    """Return the types of values that are secret under `key`, for isinstance; () if none."""
    hidden: _Types = ()
    for part in str(key).split("."):
        words = _words(part)
        if words in _also_secret or _NAMES_A_SECRET.search(words):
            return (object,)
        if _NAMES_A_TOKEN.search(words):
            hidden = (str,)
    return hidden


def _words(name: str) -> str:
    return f"_{'_'.join(_WORD.findall(name))}_".lower()


def _masked(tree: Any, hidden: _Types) -> Any:
    if isinstance(tree, Mapping):
        return {key: _masked(value, hidden + hidden_by(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_masked(value, hidden) for value in tree]
    if _is_secret(tree, hidden):
        return MASK
    return mask_text(tree, ()) if isinstance(tree, str) else tree


def _secrets(tree: Any, hidden: _Types) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _secrets(value, hidden + hidden_by(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _secrets(value, hidden)
    elif _is_secret(tree, hidden):
        yield str(tree)
    elif isinstance(tree, str):
        yield from _secrets_in_urls(tree)
        yield from (value for value in _secret_values if value in tree)


def _is_secret(value: Any, hidden: _Types) -> bool:
    is_of_variable = str(value) in _secret_values
    return value is not None and not isinstance(value, bool) and (isinstance(value, hidden) or is_of_variable)


def _mask_urls(text: str) -> str:
    if "=" in text:
        text = _CONNECTION.sub(rf"\1{MASK}", text)
    if "://" not in text:
        return text
    for pattern in _IN_URL:
        text = pattern.sub(rf"\1{MASK}", text)
    return _QUERY_IN_URL.sub(lambda found: found[1] + (MASK if _is_secret_query(found[2]) else found[3]), text)


def _is_secret_query(name: str) -> bool:
    return bool(hidden_by(name)) or _NAMES_A_SIGNATURE.fullmatch(name) is not None


def _secrets_in_urls(text: str) -> Iterator[str]:
    """Yield passwords and the like, as written and decoded (`%40` is @); for http also a user without a password."""
    yield from (value for _, value in _CONNECTION.findall(text))
    if "://" not in text:
        return
    for pattern in _IN_URL:
        for _, *found in pattern.findall(text):
            secret = found[-1] or found[0]
            yield from {secret, unquote(secret)}
    yield from (value for _, name, value in _QUERY_IN_URL.findall(text) if _is_secret_query(name))
