"""Secrets are masked, by the names of their keys and in URLs; what only looks like one stays readable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runner.system import redaction, secret_texts
from runner.system.redaction import mask_text, masked, masked_override, secrets_of, secrets_of_overrides

SECRET_KEYS = [
    "password", "passwd", "PASSWORD", "DB_PASSWORD", "db_password", "dbPassword", "dbpassword", "passwords",
    "passphrase", "db_pwd", "secret", "secrets", "secret_sauce", "clientSecret", "client-secret", "secretkey",
    "AWS_SECRET_ACCESS_KEY", "token", "hfToken", "HF_TOKEN", "HFToken", "hftoken", "access_token", "github.token",
    "token_value", "api_tokens", "api_key", "apikey", "apiKey", "APIKey", "OPENAI_API_KEY", "api_keys", "access_key",
    "aws_access_key_id", "private_key", "privateKey", "private-key", "credential", "credentials",
    "googleCredentials", "pwd", "db_pass", "account_key", "ssh_key", "license_key", "sas", "cookie", "session_cookies",
    "jwt", "pin", "passcode", "GITHUB_PAT", "auth", "AUTH", "auth_header", "authHeader", "basic_auth", "oauth",
    "oauth2", "Authorization", "model.params.db.password", "auth.user",
    "session_id", "sessionId", "signature", "request_signature",
]  # fmt: skip

PLAIN_KEYS = [
    "tokenizer", "tokenizer_file", "num_tokens", "tokens", "max_token_length", "token_dim", "tokenEmbedding",
    "pad_token", "eos_token", "mask_token", "start_token", "padToken", "author", "authors", "authority", "key",
    "keys", "public_key", "keyboard", "sort_key", "monkey", "secretary", "compass", "passes", "pass_through",
    "passenger", "pin_memory", "pattern", "spinning", "pat", "jwtlike", "path", "model.fn", "tracking.uri",
    "sessions", "session_ids_file", "signatures",
]  # fmt: skip


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_text_under_a_key_that_names_a_secret_is_masked(key: str) -> None:
    assert masked({key: "hunter2"}) == {key: "***"}
    assert secrets_of({key: "hunter2"}) == {"hunter2"}


@pytest.mark.parametrize("key", PLAIN_KEYS)
def test_a_key_that_only_looks_like_it_is_left_alone(key: str) -> None:
    assert masked({key: "hunter2"}) == {key: "hunter2"}
    assert secrets_of({key: "hunter2"}) == set()


def test_all_that_lies_under_a_secret_key_is_masked_at_any_depth() -> None:
    tree = {
        "params": {"width": 64, "login": [{"user": "me", "password": "pw-1"}, {"user": "you", "password": "pw-2"}]},
        "credentials": {"user": "me", "key": "abcd", "hosts": ["a", "b"]},
    }
    assert masked(tree) == {
        "params": {"width": 64, "login": [{"user": "me", "password": "***"}, {"user": "you", "password": "***"}]},
        "credentials": {"user": "***", "key": "***", "hosts": ["***", "***"]},
    }
    assert secrets_of(tree) == {"pw-1", "pw-2", "me", "abcd", "a", "b"}
    assert tree["params"]["login"][0]["password"] == "pw-1"  # type: ignore[index]  # the caller's is not changed


def test_a_dotted_key_counts_like_nested_ones() -> None:
    nested = {"model": {"auth": {"user": "me"}, "width": 3}}
    assert masked(nested) == {"model": {"auth": {"user": "***"}, "width": 3}}
    assert masked({"model.auth.user": "me", "model.width": 3}) == {"model.auth.user": "***", "model.width": 3}


def test_null_and_flags_stay_and_a_number_is_a_secret_only_where_secrets_are_numbers() -> None:
    tree = {"password": None, "use_auth": True, "pin_secret": 1234, "max_token": 512, "loss_per_token": 0.5}
    assert masked(tree) == {**tree, "pin_secret": "***"}
    assert secrets_of(tree) == {"1234"}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host", "https://***@host"),
        ("https://user:p%40ss@host:8080/path?x=1", "https://***@host:8080/path?x=1"),
        ("https://user:p@ss@host/a@b", "https://***@host/a@b"),
        ("HTTP://user:pw@host", "HTTP://***@host"),
        ("https://ghp_abc@github.com/x", "https://***@github.com/x"),
        ("postgresql+psycopg2://me:a/b@host/db", "postgresql+psycopg2://***@host/db"),
        ("redis://:pw@host:6379/0", "redis://***@host:6379/0"),
        ("https://host/x?a=1&token=abc&b=2", "https://host/x?a=1&token=***&b=2"),
        ("https://host/x?api_key=abc#end", "https://host/x?api_key=***#end"),
        (
            "https://a.blob.core.windows.net/c?sv=1&sig=abc%3D&se=2",
            "https://a.blob.core.windows.net/c?sv=1&sig=***&se=2",
        ),
        ("https://s3/x?X-Amz-Signature=abc&X-Amz-Date=1", "https://s3/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/***"),
        ("https://discord.com/api/webhooks/12/abc", "https://discord.com/api/webhooks/***"),
        ("Server=db;User=me;Password=p@w/;Port=3", "Server=db;User=me;Password=***;Port=3"),
        ("AccountName=a;AccountKey=ab/c==;X=1", "AccountName=a;AccountKey=***;X=1"),
        ("see https://a:b@c and https://d:e@f", "see https://***@c and https://***@f"),
    ],
)
def test_passwords_in_urls_are_masked(url: str, shown: str) -> None:
    assert masked({"uri": [url]}) == {"uri": [shown]}
    assert mask_text(url, ()) == shown
    assert masked_override(f"tracking.uri={url}") == f"tracking.uri={shown}"


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///mlflow.db", "http://localhost:5000", "http://host:80/path@version", "ssh://git@github.com/a/b",
        "git@github.com:a/b.git", "mail a@b.c, see http://x/y", "postgresql://me@host/db", "no url at all",
        '{"a": "mysql://host:33/x", "mail": "a@b"}',
    ],
)  # fmt: skip
def test_other_urls_are_left_alone(text: str) -> None:
    assert masked(text) == text
    assert secrets_of(text) == set()


def test_the_password_of_a_url_is_a_secret_as_it_is_written_and_as_it_is_meant() -> None:
    assert secrets_of({"uri": "https://user:p%40ss@host"}) == {"p%40ss", "p@ss"}
    assert secrets_of({"uri": "https://ghp_abc@github.com"}) == {"ghp_abc"}
    assert secrets_of({"uri": "https://host/x?sig=1&token=abc"}) == {"abc", "1"}


def test_secrets_are_masked_in_any_text_the_longest_first() -> None:
    text = "cannot log in with hunter22: hunter2 and abc at https://me:pw@host, step 12345 of 1234"
    assert mask_text(text, {"hunter2", "hunter22", "abc", "1234"}) == (
        "cannot log in with ***: *** and abc at https://***@host, step 12345 of ***"
    )
    assert mask_text("a.b (c)", {"a.b ("}) == "***c)"


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("a.password=x", "a.password=***"),
        ("++a.password=x=y", "++a.password=***"),
        ("+db.API_KEY='a b'", "+db.API_KEY=***"),
        ("a.token=x,y", "a.token=***"),
        ("a.token=512", "a.token=512"),
        ("a.secret=512", "a.secret=***"),
        ("a.password=null", "a.password=null"),
        ("a.use_auth=true", "a.use_auth=true"),
        ("a={user:me,password:x}", "a=***"),
        ("a={user:me,'api_key': x}", "a=***"),
        ("a={width:3,depth:4}", "a={width:3,depth:4}"),
        ("a.auth={user:me}", "a.auth=***"),
        ("~a.password", "~a.password"),
        ("train.max_steps=5", "train.max_steps=5"),
        ("--multirun", "--multirun"),
    ],
)
def test_an_override_shows_no_secret(override: str, shown: str) -> None:
    assert masked_override(override) == shown


def test_the_secrets_of_a_command_line_are_found_to_be_masked_in_what_is_said_of_it() -> None:
    overrides = ["-m", "a.b=3", "db.password='hunter2'", "a.token=abcd,efgh", "a={user: me, password: wxyz}", "x=[1"]
    secrets = secrets_of_overrides(overrides)
    assert {"hunter2", "abcd", "efgh", "wxyz"} <= secrets
    assert not {"me", "3", "[1", "1"} & secrets
    assert mask_text("cannot read db.password='hunter2' and abcd, wxyz}", secrets) == (
        "cannot read db.password=*** and ***, ***}"
    )


def test_other_values_and_keys_of_other_types_pass() -> None:
    tree = {1: "a", "x": (1, 2.5, None, True)}
    assert masked(tree) == {1: "a", "x": [1, 2.5, None, True]}


@pytest.mark.processes
def test_it_takes_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import runner.system.redaction; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    tops = {name.split(".")[0] for name in loaded if not name.startswith(("runner", "__editable__"))}
    assert tops <= sys.stdlib_module_names
    assert secret_texts.MASK == "***"


def test_names_of_the_users_own_are_hidden_too() -> None:
    redaction.extend_secrets(["customerId", "internal_host"])
    try:
        assert masked({"customer_id": 7, "model": {"internalHost": "h"}, "host": "x"}) == {
            "customer_id": "***", "model": {"internalHost": "***"}, "host": "x",
        }  # fmt: skip
        assert masked_override("a.customer_id=77") == "a.customer_id=***"
    finally:
        redaction.extend_secrets([])
    assert masked({"customer_id": 7}) == {"customer_id": 7}


def test_the_value_of_a_variable_that_is_named_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_also_secret", "_secret_values"):
        monkeypatch.setattr(redaction, name, frozenset())
    redaction.extend_secrets(["$API_TOKEN", "$SHORT", "$NOT_SET", "customer"], {"API_TOKEN": "hunter22", "SHORT": "a"})
    tree = {"plain": "hunter22", "header": "Bearer hunter22", "word": "a", "width": 22, "customer": "me"}
    assert masked(tree) == {"plain": "***", "header": "Bearer ***", "word": "a", "width": 22, "customer": "***"}
    assert secrets_of(tree) == {"hunter22", "me"}
    assert mask_text("cannot log in with hunter22", ()) == "cannot log in with ***"
