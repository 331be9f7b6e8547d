"""Secrets are masked, by the names of their keys and in URLs; what only looks like one stays readable."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from urllib.parse import quote, quote_plus

import pytest

from runner.system import redaction, secret_texts
from runner.system.redaction import (
    SecretList,
    mask_text,
    masked,
    masked_override,
    secrets_of,
    secrets_of_overrides,
)

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
    "wandb_key", "openai_key", "OPENAI_KEY", "OpenAIKey", "stripe_key", "stripe_live_key", "storage_key", "hmac_key",
    "sendgrid_key", "datadog_app_key", "mapbox_key", "anthropicKey", "azure_storage_key", "cosmos_primary_key",
    "gcp_key", "google_maps_key", "hf_key", "HuggingFaceKey", "github_key", "GitLabKey", "slack_key", "sentry_dsn",
    "MLflowKey",
    "comet_key", "neptune_key", "openai_key_2", "master_key", "app_key", "client_key", "subscription_key",
    "consumer_key",
    "otp", "totp_secret", "mfa", "mfa_code", "conn_str", "conn_string", "connectionString", "dsn", "webhook_url",
    "slackWebhook", "creds", "aws_creds", "db_pw", "psk", "recovery_codes", "FIRST_TOKEN", "next_token",
]  # fmt: skip

PLAIN_KEYS = [
    "tokenizer", "tokenizer_file", "num_tokens", "tokens", "max_token_length", "token_dim", "tokenEmbedding",
    "pad_token", "eos_token", "mask_token", "start_token", "padToken", "author", "authors", "authority", "key",
    "keys", "public_key", "keyboard", "sort_key", "monkey", "secretary", "compass", "passes", "pass_through",
    "passenger", "pin_memory", "pattern", "spinning", "pat", "jwtlike", "path", "model.fn", "tracking.uri",
    "sessions", "session_ids_file", "signatures",
    "key_dim", "num_keys", "key_size", "query_key", "primary_key", "foreign_key", "group_key", "partition_key",
    "feature_key", "label_key", "weight_key", "image_key", "input_key", "join_keys", "row_key", "hash_key", "cache_key",
    "rng_key", "user_key", "time_key", "s3_key", "key_padding_mask", "keypoints", "turkey", "sos_token", "image_token",
    "cls_token", "otp_length", "mfa_dir", "webhook_port", "conn_timeout", "connections", "token_type_ids", "linear_key",
    "aws_region_key", "segment_key", "polygon_key", "test_key", "dev_key", "product_key", "write_key", "activation_key",
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
        ("a.password=${oc.env:DB_PASSWORD}", "a.password=${oc.env:DB_PASSWORD}"),
        ("a.password='${oc.env:DB_PASSWORD,none}'", "a.password='${oc.env:DB_PASSWORD,none}'"),
        ("a.password=${oc.env:DB_PASSWORD,hunter2}", "a.password=***"),
        ("a.password=${oc.env:${oc.env:WHICH}}", "a.password=${oc.env:${oc.env:WHICH}}"),
        ("a.password=x${b.c}", "a.password=***"),
        ("a.password=${b.c}x${b.c}", "a.password=***"),
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcd", "Authorization: Bearer ***"),
        ("curl -H 'Authorization: Basic dXNlcjpwYXNz' x", "curl -H 'Authorization: Basic ***' x"),
        ('Authorization: Digest username="u", response="x"', "Authorization: ***"),
        ("{'Authorization': 'Bearer abcd'}", "{'Authorization': '***'}"),
        ("sent Bearer abcd1234 to it", "sent Bearer *** to it"),
        ("X-Api-Key: hunter2", "X-Api-Key: ***"),
        ("Cookie: a=b; c=d", "Cookie: ***"),
        ("tool --password hunter2 --steps 3", "tool --password *** --steps 3"),
        ("tool --api-key='a b' -v", "tool --api-key=*** -v"),
        ("GET /v1?key=abcdef&x=2", "GET /v1?key=***&x=2"),
        ("https://h/f?code=xyz==", "https://h/f?code=***"),
        ("https://h/?u=https://x/?token=abc", "https://h/?u=https://x/?token=***"),
        ("https://h/?to=https%3A%2F%2Fx%3Ftoken%3Dabc%26b%3D1", "https://h/?to=https%3A%2F%2Fx%3Ftoken%3D***%26b%3D1"),
        ("jdbc:mysql://h/db?user=u&password=p", "jdbc:mysql://h/db?user=u&password=***"),
        ("host=h password=x y=z", "host=h password=*** y=z"),
        ("GITHUB_TOKEN=abc make", "GITHUB_TOKEN=*** make"),
        ('{"password": "hun\\"ter2", "a": 1}', '{"password": "***", "a": 1}'),
        ('{"api_key": 1234, "a": 1}', '{"api_key": ***, "a": 1}'),
        ("{'client_secret': 'x y', 'n': 2}", "{'client_secret': '***', 'n': 2}"),
        (r"{\"token\": \"hunter\"}", r"{\"token\": \"***\"}"),
        ("db_password: hunter2\nhost: h", "db_password: ***\nhost: h"),
        ("${oc.env:DB_PASSWORD,hunter2}", "${oc.env:DB_PASSWORD,***}"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
        ("redis://:a@h,redis://:b@h", "redis://***@h"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert mask_text(text, ()) == shown
    assert mask_text(shown, ()) == shown, "once more it stays as it is"


TAIL = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"


@pytest.mark.parametrize(
    "token",
    [
        f"ghp_{TAIL[:36]}", f"gho_{TAIL[:36]}", f"ghs_{TAIL[:36]}", f"github_pat_{TAIL}", f"hf_{TAIL[:34]}",
        f"hf_{'ab' * 17}", f"AKIA{TAIL[:16].upper()}", f"ASIA{TAIL[:16].upper()}", f"sk-{TAIL}", f"sk-proj-{TAIL}",
        f"sk-ant-api03-{TAIL}", f"glpat-{TAIL[:20]}", f"xoxb-123456789012-{TAIL}", f"xoxp-{TAIL}", f"AIza{TAIL[:35]}",
        f"sk_live_{TAIL[:24]}",
        f"rk_live_{TAIL[:24]}", f"pypi-{TAIL}", f"ya29.{TAIL}", f"npm_{TAIL[:36]}", f"eyJhbGciOiJI.eyJzdWIiOiIx.{TAIL}",
    ],
)  # fmt: skip
def test_a_token_whose_first_letters_say_what_it_is_is_masked_in_any_text(token: str) -> None:
    assert mask_text(f"with ({token}), {token}", ()) == "with (***), ***"
    assert mask_text(f"x{token}", ()) == f"x{token}", "it is part of a word"
    assert secrets_of({"neutral": token}) == {token}


@pytest.mark.parametrize(
    "text",
    [
        f"disk-{TAIL}", f"task-{TAIL}", "sk-learn-pipelines-of-2024-in-words", "hf_hub_download", "ghp_short", "AKIA1",
        "glint-of-light", "sort by key: value", "key=lambda x: x", "token=tokens[0]", "tokens: 512", "author: me",
        "--max_tokens 512", "--max_token 512", "max_token=512", "bearer of bad news", "?page=2&sort_key=name",
        "${oc.env:DB_PASSWORD,none}", "${oc.env:DB_PASSWORD}", "password=null", "use_auth=true",
        '{"pad_token": "<pad>"}',
        "the token: a word", "a.b@c.d",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_secret_stays_readable(text: str) -> None:
    assert mask_text(text, ()) == text


def test_a_known_secret_is_masked_in_every_form_in_which_programs_write_it() -> None:
    secret = 'p@ss/w ör"d+1\\x'
    data = secret.encode()
    forms = [
        secret, json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret), quote(secret),
        quote_plus(secret),
        quote(secret, safe=""), quote(secret, safe="").lower(), base64.b64encode(data).decode(),
        base64.urlsafe_b64encode(data).decode().rstrip("="),
    ]  # fmt: skip
    for form in forms:
        shown = mask_text(f"a {form} b", [secret])
        assert shown.strip("ab =\"'") == "***", form
    for before in ("user:", "use:", "us:"):  # it begins at any bit of the encoded text
        encoded = base64.b64encode(f"{before}{secret}@host".encode()).decode()
        assert base64.b64encode(data).decode()[4:-4] not in mask_text(encoded, [secret])
        assert "***" in mask_text(encoded, [secret])
    assert mask_text(f"a MTIzNA== {base64.b64encode(b'12345678').decode()}", ["1234", "12345678"]) == "a MTIzNA== ***="


@pytest.mark.timeout(120)  # each takes 0.3 s; 16,000 URLs in one word took 11 s, and other texts minutes
@pytest.mark.parametrize(
    "part",
    [
        "x://a:b", "http://a:b", "x://a:b@", "?a=", "?key=", "@", "=", "a=b;", "password=", "password ", "a.a", "a-a",
        "--password ", "--password '", "Bearer ", "Authorization: ", "cookie:", "eyJaaaaaaaaa.", "sk-", "xoxb-",
        '"a": "', "'password': \"", "\\", '\\"', "-", " ", "password: ", "-----BEGIN PRIVATE KEY-----", "https://hooks.",
        "oc.env:A_TOKEN,", "%3Fkey%3D",
    ],
)  # fmt: skip
def test_the_time_grows_with_the_length_of_the_text(part: str) -> None:
    mask_text(part * 16_000, ())
    secrets_of({"x": part * 16_000})


@pytest.mark.timeout(120)
def test_the_time_grows_with_the_number_of_secrets() -> None:
    secrets = [f"hunter-{number:04d}/+" for number in range(500)]
    assert mask_text("x://a:b" * 16_000 + secrets[7], secrets).endswith("b***")


def test_a_list_has_names_of_keys_and_keys_and_variables() -> None:
    listed = SecretList.of(["customerId", "model.params.url", "a.urls[1]", "$API_TOKEN", 7], {"API_TOKEN": "hunter22"})
    tree = {
        "customer_id": 7,
        "model": {"params": {"url": "x", "other": {"url": "y"}, "text": "at hunter22", "flag": True}},
        "a": {"urls": ["u", "v", {"w": 1}]},
        "url": "z",
        "run": {"secrets": ["customerId", "model.params.url"]},
    }
    assert masked(tree, listed) == {
        "customer_id": "***",
        "model": {"params": {"url": "***", "other": {"url": "y"}, "text": "at ***", "flag": True}},
        "a": {"urls": ["u", "***", {"w": 1}]},
        "url": "z",
        "run": {"secrets": ["customerId", "model.params.url"]},
    }
    assert secrets_of(tree, listed) == {"7", "x", "v", "hunter22"}
    assert masked({"model.params.url": "x", "model.url": "y"}, listed) == {"model.params.url": "***", "model.url": "y"}
    assert masked({"url": "x", "n": 1}, listed, "model.params") == {"url": "***", "n": 1}
    assert masked_override("+model.params.url=x", listed) == "+model.params.url=***"
    assert masked_override("model.params={url: x}", listed) == "model.params=***"
    assert masked_override("run.secrets=[customerId]", listed) == "run.secrets=[customerId]"
    assert masked(tree, SecretList.of(listed.entries(), {}))["model"]["params"]["text"] == "at hunter22"


def test_of_a_key_with_variables_only_these_are_secret_as_long_as_they_are_known() -> None:
    entries = ["a.x=$A,$B"]
    text = {"a": {"x": "hunter22 and hunter33"}}
    assert masked(text, SecretList.of(entries, {"A": "hunter22", "B": "hunter33"})) == {"a": {"x": "*** and ***"}}
    for env in ({}, {"A": "hunter22"}, {"A": "hunter22", "B": "another"}, {"A": "hunter22", "B": "and"}):
        assert masked(text, SecretList.of(entries, env)) == {"a": {"x": "***"}}
    both = SecretList.of(entries, {"A": "hunter22", "B": "hunter33"}) | SecretList.of(["a.x", "name"], {})
    assert masked({**text, "name": 1}, both) == {"a": {"x": "***"}, "name": "***"}


def test_lists_of_several_configs_stay_apart() -> None:
    first, second = SecretList.of(["mine"], {}), SecretList.of(["yours"], {})
    tree = {"mine": "a", "yours": "b"}
    with redaction.hiding(first):
        assert masked(tree) == {"mine": "***", "yours": "b"}
        assert masked(tree, second) == {"mine": "a", "yours": "***"}
        with redaction.hiding(second):
            assert masked(tree) == {"mine": "***", "yours": "***"}
    assert masked(tree) == tree
