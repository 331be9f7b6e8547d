"""Secrets within a text: what is known to be secret, in each form in which programs write it, and what looks like one.

The time to find all forms grows in proportion to the length of the text, also for a text that was made to be slow:
what precedes a secret is searched for, the secret is read from there, and the search goes on behind the secret.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from urllib.parse import quote, quote_plus, unquote

from runner.system.secret_names import LIST, types_hidden_by, words_of

MASK = "***"

SHORTEST = 4
"""Shortest secret, in characters, that is masked in texts; shorter ones would occur in too many words."""

NO_SECRETS = frozenset({"", "null", "none", "true", "false", MASK})
"""Values, in lower case, that say nothing although they stand where a secret does."""

REFERENCE = re.compile(r"[\"']?\$\{(?:[^{},]|\$\{[^{},]*\})*(?:, *(?:null|none|''|\"\"))?\}[\"']?", re.IGNORECASE)
"""Matches an interpolation as it is written, without a default or with one that says nothing: `${oc.env:TOKEN}`,
`${oc.env:TOKEN,null}`. It says where a secret is found, and is none itself.
"""

_SHORTEST_WITHIN = 8
"""Least number of characters of base64 that are searched for, when the secret is a part of a longer text that was
encoded as a whole.
"""

_END = r"\s\"'<>"

_NAMES_A_PARAMETER = re.compile(r"(?:.*[-_])?(?:sig|signature)|key|code", re.IGNORECASE)
"""Names that are secret in the address of a request, such as those of Google, Azure and Amazon."""


def _is_always_secret(name: str, value: str) -> bool:
    return True


class _Form(NamedTuple):
    """A form in which texts have secrets.

    Attributes:
      opening: matches what precedes the secret. Its group `name`, if it has one, must name a secret.
      secret: matches what follows. The secret is its group `secret`, or without one the whole match.
      is_secret: reports whether a value is a secret, from (the group `name` of `opening` or '', the value).
    """

    opening: re.Pattern[str]
    secret: re.Pattern[str]
    is_secret: Callable[[str, str], bool] = _is_always_secret

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each secret of this form in `text`."""
        found = self.opening.search(text)
        while found is not None:
            secret = self._secret_after(text, found)
            after = found.end()
            if secret is not None:
                yield secret
                after = secret[1]
            found = self.opening.search(text, after)

    def _secret_after(self, text: str, opening: re.Match[str]) -> tuple[int, int] | None:
        """Return (start, end) of the secret behind an opening; None: there is none."""
        name = opening.groupdict().get("name", "")
        # Checked before the value is read: a text of many names could have a long value behind each of them, and
        # reading all would take the square of the time.
        if name and not _may_name_a_secret(name):
            return None
        value = self.secret.match(text, opening.end())
        if value is None or value[0].startswith(MASK):
            return None
        group: str | int = 0
        if value.groupdict().get("secret") is not None:
            group = "secret"
        secret = value[group]
        is_nothing = secret.lower() in NO_SECRETS or REFERENCE.fullmatch(secret)
        if is_nothing or not self.is_secret(name, secret):
            return None
        return value.span(group)


def _may_name_a_secret(name: str) -> bool:
    return bool(types_hidden_by(words_of(name))) or _NAMES_A_PARAMETER.fullmatch(name) is not None


def _hides(name: str, value: str) -> bool:
    """Report whether the value of a key `name` is secret. A number is secret if the name hides values of any type
    (`password`), but not if it hides only texts (`token`).
    """
    types = types_hidden_by(words_of(name))
    is_number = re.fullmatch(r"[-+\d.,e]+", value) is not None
    return object in types or (bool(types) and not is_number)


def _is_certain(name: str, value: str) -> bool:
    """Report whether a key `name` is secret with any value. A `token` is not: it may be a token of a text."""
    last = name.rpartition(".")[2]
    return name != LIST and object in types_hidden_by(words_of(last))


def _is_assigned(name: str, value: str) -> bool:
    """Report whether `name=value` is secret. `token=x` occurs in code, GITHUB_TOKEN=x in an environment."""
    return _is_certain(name, value) or (name.isupper() and _hides(name, value))


def _is_in_query(name: str, value: str) -> bool:
    """Report whether a parameter of a URL is secret."""
    return _hides(name, value) or _NAMES_A_PARAMETER.fullmatch(name) is not None


def _is_header(name: str, value: str) -> bool:
    """Report whether a header of HTTP is secret: X-Api-Key, PRIVATE-TOKEN."""
    return "-" in name and _hides(name, value)


_QUOTED = r"\"[^\"]*\"|'[^']*'"
_VALUE = re.compile(rf"(?:{_QUOTED}|[^{_END}]+)")
_LINE = re.compile(r"[^\"'<>\r\n]+(?:(?<==)\"[^\"]*\"[^\"'<>\r\n]*)*")
"""The rest of a line, with quotes only as in `response="x"`."""

# In http URLs also a user without a password, which may be an access token; git@ and postgres@ are only names.
_USER_IN_HTTP = _Form(re.compile("https?://", re.I), re.compile(rf"[^{_END}/?#]+(?=@)"))
# Whoever knows the path of a webhook may post.
_WEBHOOK = _Form(
    re.compile(
        r"https?://(?:hooks\.slack\.com/\w+|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com/"
        r"\w+|chat\.googleapis\.com/v1/spaces)/",
        re.I,
    ),
    re.compile(rf"[^{_END}]+"),
)
# The `?` may be that of a URL in a parameter of another, where it is encoded.
_PARAMETER = _Form(
    re.compile(r"(?:[?&#]|%3F|%26)(?P<name>[\w.-]+)(?:=|%3D)", re.I),
    re.compile(rf"(?:(?!%26)[^{_END}&#])+", re.I),
    _is_in_query,
)
# A part of a connection string: `Server=db; Password = x;`.
_CONNECTION = _Form(
    re.compile(r"(?<![\w?&#])(?:password|pwd|accountkey|sharedaccesskey|sharedaccesssignature)\s*=\s*", re.I),
    re.compile(rf"{_QUOTED}|[^;{_END}]+"),
)
_ASSIGNMENT = _Form(
    re.compile(r"(?<![\w.?&#-])(?P<name>[\w.-]++)="),
    re.compile(rf"{_QUOTED}|[^;&{_END}]+"),
    _is_assigned,
)
# What `${oc.env:NAME,default}` gives where the variable is not set.
_DEFAULT = _Form(
    re.compile(r"\boc\.env:\s*[\"']?(?P<name>[\w.-]+)[\"']?\s*,\s*"),
    re.compile(rf"[\"']?(?P<secret>[^{_END}{{}}]+)"),
    _hides,
)
_FLAG = _Form(
    re.compile(r"(?<![\w-])--(?P<name>[A-Za-z][\w-]*)(?:\s+|=)"), re.compile(rf"(?!-){_VALUE.pattern}"), _hides
)
_SCHEMES = "Bearer|Basic|Token|ApiKey|Negotiate|Key"
_AUTHORIZATION = _Form(
    re.compile(rf"\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?=(?:{_SCHEMES})\s)\w+\s+", re.I), _VALUE
)
# The value of another scheme may have several words: Digest username="me", response="x".
_OTHER_AUTHORIZATION = _Form(
    re.compile(rf"\b(?:proxy-)?authorization[\"']?\s*+:\s*+[\"']?+(?!(?:{_SCHEMES})\s)", re.I), _LINE
)
_COOKIE = _Form(re.compile(r"(?<![\w-])(?:set-)?cookie[\"']?:\s*[\"']?", re.I), _LINE)
_HEADER = _Form(re.compile(r"(?<![\w-])(?P<name>[A-Za-z]+(?:-[A-Za-z]+)+)[\"']?\s*:\s*[\"']?"), _VALUE, _is_header)
_BEARER = _Form(re.compile(r"\bBearer\s+", re.I), re.compile(r"(?=[\w.~+/-]*\d)[\w.~+/-]{8,}=*"))
# Of JSON, also within JSON, or of a Python dict. In a text that was cut, the last quote is missing.
_ENTRY = _Form(
    re.compile(r"(?<!\\)(?P<quote>\\{0,3}[\"'])(?P<name>[\w.-]+)(?P=quote)\s*:\s*"),
    re.compile(r"(?P<open>\\{0,3}[\"'])(?P<secret>(?:(?!(?P=open))(?:\\.|[^\\]))*)|[\w.+-]+", re.S),
    _hides,
)
# Of YAML, or of a message.
_LINE_WITH_NAME = _Form(
    re.compile(r"^[ \t-]*+(?!(?:proxy-)?authorization)(?P<name>\w[\w.-]*+):[ \t]++", re.M | re.I), _LINE, _is_certain
)
_PEM = _Form(re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"), re.compile(r".+?(?=-----END|\Z)", re.S))
_FORMS = (
    _USER_IN_HTTP, _WEBHOOK, _PARAMETER, _CONNECTION, _ASSIGNMENT, _DEFAULT, _FLAG, _AUTHORIZATION,
    _OTHER_AUTHORIZATION, _COOKIE, _HEADER, _BEARER, _ENTRY, _LINE_WITH_NAME, _PEM,
)  # fmt: skip

_AFTER_NO_LETTER = "(?<![A-Za-z0-9])"
_AFTER_NO_WORD = "(?<![A-Za-z0-9_-])"  # not disk-, task-
_HAS_LONG_PART = "(?=[A-Za-z0-9_-]*[A-Za-z0-9]{16})"  # not words between dashes: sk-learn-pipelines-of-2024
_TOKENS = (
    rf"{_AFTER_NO_LETTER}gh[pousr]_[A-Za-z0-9]{{20,}}",
    rf"{_AFTER_NO_LETTER}github_pat_[A-Za-z0-9_]{{20,}}",
    rf"{_AFTER_NO_LETTER}gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|oas)-[A-Za-z0-9_-]{{20,}}",
    rf"{_AFTER_NO_LETTER}xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{{10,}}",
    rf"{_AFTER_NO_LETTER}xapp-\d-[A-Za-z0-9-]{{10,}}",
    rf"{_AFTER_NO_LETTER}hf_[A-Za-z0-9]{{34,}}",  # often of letters alone
    rf"{_AFTER_NO_LETTER}(?:hf|gsk|npm|r8|nvapi|dckr_pat|dop_v1|shp(?:at|ss|ca|pa)|sbp|figd|lin_api|glsa|pul|whsec|sntry[su]|tvly"
    r"|pcsk|jina|ntn)[_-](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{20,}",
    rf"{_AFTER_NO_LETTER}(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{{16}}(?![A-Za-z0-9])",
    rf"{_AFTER_NO_LETTER}AIza[A-Za-z0-9_-]{{35}}",
    rf"{_AFTER_NO_LETTER}ya29\.[A-Za-z0-9_.-]{{20,}}",
    rf"{_AFTER_NO_LETTER}GOCSPX-[A-Za-z0-9_-]{{20,}}",
    rf"{_AFTER_NO_LETTER}[sr]k_(?:live|test)_[A-Za-z0-9]{{16,}}",
    rf"{_AFTER_NO_LETTER}dapi[0-9a-f]{{32}}",
    rf"{_AFTER_NO_WORD}(?:sk-|pplx-|pypi-|nvapi-|xai-|hvs\.){_HAS_LONG_PART}[A-Za-z0-9_-]{{20,}}",
    rf"{_AFTER_NO_WORD}SG\.[A-Za-z0-9_-]{{16,}}\.[A-Za-z0-9_-]{{16,}}",
    rf"{_AFTER_NO_WORD}eyJ[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]*",  # a JSON Web Token
)
_TOKEN = re.compile("|".join(_TOKENS))
"""Tokens whose first letters say what they are, with their lengths or the least that they have."""


def masked_in(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with MASK in place of each of `secrets`, in all forms, and of what looks like a secret."""
    text = _mask_known_secrets(text, secrets)
    parts = []
    end = 0  # of what is copied or masked so far
    for first, last in sorted(_find_secret_spans(text)):
        if last <= end:  # inside the span before
            continue
        if first >= end:  # else it overlaps the span before, and lengthens that
            parts += [text[end:first], MASK]
        end = last
    return "".join([*parts, text[end:]])


def has_one_of(secrets: Iterable[str], text: str) -> bool:
    """Report whether `text` has one of `secrets` that is long enough, in any form."""
    return _mask_known_secrets(text, secrets) != text


def secrets_in(text: str) -> Iterator[str]:
    """Yield what looks like a secret in `text`, as it is written and decoded (`%40` is @). Of a user and password in a
    URL this is the password, or without a password the user, which may be an access token.
    """
    for first, last in _find_secret_spans(text):
        secret = text[first:last].strip("\"'")
        is_of_user = text.startswith("://", first - 3) and text.startswith("@", last)
        if is_of_user:
            _, _, password = secret.partition(":")
            secret = password or secret
        yield from {secret, unquote(secret)} - NO_SECRETS


def _find_secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of everything in `text` that looks like a secret; these may overlap."""
    yield from _users_in_urls(text)
    for token in _TOKEN.finditer(text):
        yield token.span()
    for form in _FORMS:
        yield from form.spans(text)


_USER = re.compile(r"(?<=[\w+.-])(?<!http)(?<!https)://(?P<user>[^/:@]*:)", re.IGNORECASE)


def _users_in_urls(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the user and password in URLs of other schemes than http. The password may have a slash or
    `@` in it.
    """
    if "://" not in text:
        return
    for word in re.finditer(rf"[^{_END}]+", text):
        # The password ends at the last @ of the word. It is looked for once per word, and not from each URL on, which
        # could take the square of the time.
        end = word[0].rfind("@")
        found = _USER.search(word[0], 0, max(end, 0))
        if found is not None:
            start = word.start()
            yield start + found.start("user"), start + end


def _mask_known_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with MASK in place of each of `secrets` that is long enough, in all forms."""
    forms: set[str] = set()
    for secret in secrets:
        if len(secret) >= SHORTEST:
            forms |= _written_forms_of(secret)
    # The longest form first, since a shorter one may be a part of it.
    present = [form for form in sorted(forms, key=len, reverse=True) if form in text]
    if not present:
        return text
    return re.sub("|".join(map(_pattern_of, present)), MASK, text)


def _pattern_of(form: str) -> str:
    # 1234 is not masked inside 12345, which is another number.
    return rf"(?<!\d){form}(?!\d)" if form.isdigit() else re.escape(form)


_UNQUOTED_IN_URLS = ("", "/", "!'()*", ":/?#[]@!$&'()*+,;=")
"""Characters that programs leave as they are in URLs."""


@functools.lru_cache(maxsize=1024)
def _written_forms_of(secret: str) -> frozenset[str]:
    """Return `secret` as it is, and as programs write it: in JSON, in Python, in URLs and in base64."""
    if secret.isdigit() and len(secret) < _SHORTEST_WITHIN:  # its other forms would be found in much else
        return frozenset({secret})
    data = secret.encode("utf-8", "surrogatepass")
    forms = {secret}
    for quoted in (json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret)):
        forms.add(quoted[1:-1])
    in_urls = {quote(data, safe=kept) for kept in _UNQUOTED_IN_URLS}
    in_urls.add(quote_plus(data))
    for form in in_urls:
        with_small_letters = re.sub("%..", lambda code: code[0].lower(), form)  # %c3 for %C3
        forms |= {form, with_small_letters}
    return frozenset(forms.union(_base64_forms_of(data)))


_AS_IN_URLS = str.maketrans("+/", "-_")


def _base64_forms_of(data: bytes) -> Iterator[str]:
    """Yield what to search for to find `data` in base64: its own base64; and of the base64 of a longer text with `data`
    in it, the characters that depend on `data` alone. These differ by where `data` begins, modulo three bytes.
    """
    whole = base64.b64encode(data).decode().rstrip("=")
    forms = [whole]
    # (number of bytes before `data`, number of leading characters that also have bits of these bytes)
    for before, shared in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(before) + data).decode()
        has_padding = encoded.endswith("=")
        encoded = encoded.rstrip("=")
        if has_padding:  # in a longer text, the last character would also have bits of what follows `data`
            encoded = encoded[:-1]
        forms.append(encoded[shared:])
    for form in forms:
        if form is whole or len(form) >= _SHORTEST_WITHIN:
            yield form
            yield form.translate(_AS_IN_URLS)
