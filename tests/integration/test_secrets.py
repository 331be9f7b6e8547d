"""120 secrets are planted into a run and a sweep, in every way in which a config can have one; none leaves them.

What a run keeps for itself by design (config.yaml, .hydra, .tracking.json, a sweep's multirun.yaml) has them, for its
owner alone. Nothing else below the folder does, nor the screen, the trackers, or the command line of a child.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote_plus

import psutil
import pytest
import yaml

PRIVATE = (".hydra", "config.yaml", "config.evaluate.yaml", "multirun.yaml", ".tracking.json")
WRITTEN_BY_THE_TEST = ("conf", "planted.py", "__pycache__")

NAMES = (
    "password", "db_password", "API_KEY", "apiKey", "token", "hf_token", "clientSecret", "AWS_SECRET_ACCESS_KEY",
    "aws_access_key_id", "private_key", "SSH_PRIVATE_KEY", "credentials", "jwt", "session_cookie", "basic_auth",
    "wandb_key", "openai_key", "stripe_key", "storage_key", "hmac_key", "otp", "conn_str", "sendgrid_key", "OpenAIKey",
    "datadog_app_key", "mapbox_key", "azure_storage_key", "gcp_key", "github_key", "sentry_dsn", "connection_string",
    "totp_secret", "mfa_code", "slack_webhook_url", "master_key", "recovery_codes", "db_pw", "aws_creds", "comet_key",
    "neptune_key", "anthropic_key", "cohere_key", "twilio_key", "mlflow_key", "slack_key", "google_maps_key",
    "hf_key", "gitlab_key", "encryption_key", "app_key",
)  # fmt: skip
LISTED = ("customer_id", "internalHost", "patient", "pepper", "seat")
VARIABLES = {
    "MY_TOKEN": "plain", "AWS_SECRET_ACCESS_KEY": "with/slash+", "TLS_PRIVATE_KEY": 'with "quotes"',
    "DB_PASSWORD": "@:", "QUOTED_TOKEN": "q", "NESTED_TOKEN": "n", "REUSED_TOKEN": "r", "HEADER_TOKEN": "h",
    "LIST_TOKEN": "l", "TAG_TOKEN": "t", "NAME_TOKEN": "m", "EVAL_TOKEN": "e", "TRAIN_TOKEN": "i", "URL_PASSWORD": "u",
    "TRACKER_TOKEN": "k", "FIRST_TOKEN": "1", "SECOND_TOKEN": "2", "FOO": "foo", "BAR": "bar",
}  # fmt: skip
"""Name of a variable of the environment -> what its value ends with."""
TEXTS = (
    "postgresql://me:{}@host/db", "https://me:{}@host/x", "https://{}@host/x", "redis://:{}@host:6379/0",
    "amqp://me:a/{}@host", "https://host/x?token={}&b=1", "https://host/x?key={}", "https://host/f?code={}",
    "https://host/x?a=1&sig={}", "https://host/?to=https%3A%2F%2Fx%3Ftoken%3D{}", "https://hooks.slack.com/services/T0/{}",
    "Server=db;User=me;Password={};Port=3", "AccountName=a;AccountKey={};X=1", "host=h user=me password={}",
    "Authorization: Bearer {}", "Authorization: Basic {}", "X-Api-Key: {}", "Cookie: id={}", "tool --password {} -v",
    "tool --api-key={}", '{{"client_secret": "{}"}}', "{{'password': '{}'}}", "GITHUB_TOKEN={}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", "password: {}\nhost: h", "Bearer 1{}",
)  # fmt: skip
TOKENS = (
    "ghp_{}", "gho_{}", "github_pat_{}", "hf_{}", "sk-{}", "sk-proj-{}", "sk-ant-api03-{}", "glpat-{}", "xoxb-1-{}",
    "sk_live_{}", "rk_live_{}", "pypi-{}", "ya29.{}", "eyJhbGciOiJI.eyJzdWIiOiIx.{}", "npm_{}",
)  # fmt: skip

SOURCE = """
import json, os, pathlib, sys
from urllib.parse import quote
import base64
import runner
import tensorflow as tf

def input_fn(params):
    return tf.data.Dataset.from_tensors(([1.0], [2.0])).repeat(4).batch(1)

def texts(tree):
    for value in tree.values() if isinstance(tree, dict) else tree:
        yield from texts(value) if isinstance(value, (dict, list)) else [str(value)]

def model_fn(features, labels, mode, params, config):
    params = json.loads(json.dumps(dict(params), default=dict))
    if params.get("typed_token") == os.environ.get("FAILS", "no token"):
        said = []
        for text in texts(params):
            said += [text, json.dumps(text), quote(text), base64.b64encode(text.encode()).decode()]
        raise ValueError("cannot log in: " + " | ".join(said))
    logits = features @ tf.compat.v1.get_variable("w", [1, 1])
    loss = tf.reduce_mean((logits - labels) ** 2)
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return runner.EstimatorSpec(mode, logits, loss, train_op)

class Everything:
    def __init__(self, password):
        self.file = open(pathlib.Path(__file__).with_name("everything.txt"), "a")

    def note(self, *what):
        print(*what, file=self.file, flush=True)

    def start(self, run_id, name, params, tags):
        self.note(run_id, name, params, tags)
        return "mine"

    def log_points(self, points):
        self.note(points)

    def log_file(self, path, folder):
        self.note(path.name, path.read_bytes())

    def log_input(self, dataset):
        self.note(dataset)

    def set_tags(self, tags):
        self.note(tags)

    def end(self, status):
        self.note(status)
"""


class Planted(NamedTuple):
    """What was planted, and where.

    Attributes:
      values: each secret -> a word for it in a failure.
      env: variables of the environment.
    """

    project: Path
    values: Mapping[str, str]
    env: Mapping[str, str]


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    values: dict[str, str] = {}

    def new(what: str) -> str:
        value = secrets.token_hex(12)
        values[value] = what
        return value

    env = {name: f"{new(name)}{more}" for name, more in VARIABLES.items()}
    env["LOGIN_PASSWORD"] = f"{{user: {new('decoded')}, pin: {int(new('number'), 16)}}}"
    number = next(value for value, what in values.items() if what == "number")
    values[str(int(number, 16))] = values.pop(number)
    params: dict[str, Any] = {name: new(name) for name in (*NAMES, *LISTED)}
    params |= {f"text_{number}": text.format(new(text)) for number, text in enumerate(TEXTS)}
    params |= {f"word_{number}": text.format(new(text)) for number, text in enumerate(TOKENS)}
    params |= {
        "learning_rate": 0.1,
        "sort_key": "kept-readable",
        "num_tokens": 512,
        "a": "${oc.env:MY_TOKEN}",
        "b": "${oc.env:AWS_SECRET_ACCESS_KEY}",
        "c": "${oc.env:TLS_PRIVATE_KEY}",
        "d": "x ${oc.env:DB_PASSWORD} y",
        "e": "${oc.env:'QUOTED_TOKEN'}",
        "f": "${oc.env:${oc.env:WHICH}}",
        "g": "${oc.decode:${oc.env:LOGIN_PASSWORD}}",
        "h": "${model.params.reused}",
        "reused": "${oc.env:REUSED_TOKEN}",
        "i": "${model.params.db_password}",
        "j": "token ${oc.env:HEADER_TOKEN}",
        "k": ["a", "${oc.env:LIST_TOKEN}", {"deep": "${model.params.k.1}"}],
        "l": f"${{oc.env:UNSET_PASSWORD,{new('default')}}}",
        "m": "${oc.env:FIRST_TOKEN}-${oc.env:SECOND_TOKEN}",
        "n": "${oc.env:FOO}",
        "o": f"typed {env['BAR']}",
        "p": base64.b64encode(f"me:{env['MY_TOKEN']}".encode()).decode(),
        "q": quote_plus(env["TLS_PRIVATE_KEY"]),
        "r": "postgresql://me:${oc.env:URL_PASSWORD}@host/db",
    }
    settings = {
        "run": {"secrets": [*LISTED, "$FOO", "$BAR"], "progress": "plain"},
        "model": {"fn": "planted.model_fn", "params": params},
        "input": {
            "train": {"fn": "planted.input_fn", "batch_size": 1, "params": {"where": "${oc.env:TRAIN_TOKEN}"}},
            "eval": {
                "fn": "planted.input_fn", "batch_size": 1, "params": {"where": "${oc.env:EVAL_TOKEN}"},
                "first": {"shuffle_seed": 1},
            },
        },
        "tracking": {
            "backend": [
                "mlflow", "csv", {"fn": "planted.Everything", "params": {"password": "${oc.env:TRACKER_TOKEN}"}}
            ],
            "run_name": "run ${oc.env:NAME_TOKEN}",
            "tags": {"team": "${oc.env:TAG_TOKEN}", "api_token": new("tag")},
        },
        "train": {"max_steps": 2},
        "eval": {"steps": 1},
    }  # fmt: skip
    project = tmp_path / "project"
    group = project / "conf" / "experiment"
    group.mkdir(parents=True)
    (group / "planted.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(settings, sort_keys=False)}")
    (project / "planted.py").write_text(SOURCE)
    for what in ("typed_password", "typed_token", "other_typed_token"):
        new(what)
    env["WHICH"] = "NESTED_TOKEN"
    return Planted(project, values, env)


class Ended(NamedTuple):
    """How a command ended: its exit code, all that it said, and the command lines of its children."""

    code: int
    said: str
    children: str


def run(planted: Planted, words: list[str], env: Mapping[str, str]) -> Ended:
    command = [sys.executable, "-m", *words]
    children: set[str] = set()
    is_over = threading.Event()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=planted.project, env={**os.environ, **env}, **pipes)

    def watch() -> None:
        while not is_over.wait(0.2):
            for child in _children_of(process.pid):
                children.add(child)

    watching = threading.Thread(target=watch)
    watching.start()
    said, _ = process.communicate(timeout=400)
    is_over.set()
    watching.join()
    return Ended(process.returncode, said, "\n".join(children))


def _children_of(pid: int) -> Iterator[str]:
    try:
        process = psutil.Process(pid)
        typed = process.cmdline()
        found = process.children(recursive=True)
    except psutil.Error:
        return
    for child in found:
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        # Until it runs its own program, a child has the words of the process that it was forked from: what was typed.
        if words != typed:
            yield " ".join(words)


def typed(planted: Planted) -> dict[str, str]:
    return {what: value for value, what in planted.values.items() if "typed" in what}


def leaks_in(data: bytes, values: Mapping[str, str]) -> list[str]:
    """Return what `data` has of the values, as they are, in URLs or in base64."""
    found = [what for value, what in values.items() if value.encode() in data]
    for value, what in values.items():
        # Wherever a value begins within what was encoded, it has these characters there.
        encoded = [base64.b64encode(b"0" * before + value.encode())[4:-4] for before in range(3)]
        if any(part in data for part in encoded):
            found.append(f"{what} in base64")
    return found


def check_folder(planted: Planted) -> set[str]:
    """Check every byte below the folder of the project. Return the secrets in files that are private by design."""
    leaks: dict[str, list[str]] = {}
    kept: set[str] = set()
    for path in planted.project.rglob("*"):
        parts = path.relative_to(planted.project).parts
        if not path.is_file() or path.is_symlink() or set(parts) & set(WRITTEN_BY_THE_TEST):
            continue
        is_artifact = "store" in parts
        found = leaks_in(path.read_bytes(), planted.values)
        if set(parts) & set(PRIVATE) and not is_artifact:
            kept |= set(found)
            mode = stat.S_IMODE(path.stat().st_mode) & stat.S_IMODE(path.parent.stat().st_mode)
            assert not found or mode & 0o077 == 0, path
        elif found:
            leaks[str(path.relative_to(planted.project))] = found
    assert leaks == {}
    return kept


@pytest.mark.slow
def test_120_secrets_stay_in_a_run_and_in_a_sweep(planted: Planted, empty_mlflow_database: Path) -> None:
    assert len(planted.values) >= 120
    secret = typed(planted)
    uri = "tracking.uri=sqlite:///store/mlflow.db"
    words = ["experiment=planted", uri, f"+model.params.typed_password={secret['typed_password']}"]

    store = planted.project / "store"
    store.touch()  # so there can be no database in it
    first = run(planted, ["runner", *words, "model_dir=run"], planted.env)
    assert first.code == 0, first.said
    assert "is not recorded completely" in first.said
    assert leaks_in(first.said.encode(), planted.values) == []
    assert "runner.tracking.ship" in first.children and leaks_in(first.children.encode(), planted.values) == []
    kept = check_folder(planted)
    planted_there = set(planted.values.values()) - {"typed_token", "other_typed_token"}
    assert planted_there - kept == set()  # nothing was masked where it is needed
    assert "kept-readable" in (planted.project / "everything.txt").read_text()

    # Later, by hand, by somebody without the variables.
    store.unlink()
    store.mkdir()
    shutil.copy(empty_mlflow_database, store / "mlflow.db")
    artifacts = {"_MLFLOW_SERVER_ARTIFACT_ROOT": f"file://{store}/artifacts"}
    shipped = run(planted, ["runner.tracking.ship", "run"], artifacts)
    assert shipped.code == 0, shipped.said
    assert leaks_in(shipped.said.encode(), planted.values) == []
    (artifact,) = store.rglob("config.yaml")
    recorded = yaml.safe_load(artifact.read_text())
    assert recorded["model"]["params"]["sort_key"] == "kept-readable"
    assert recorded["model"]["params"]["a"] == recorded["model"]["params"]["g"]["user"] == "***"
    check_folder(planted)

    swept = f"+model.params.typed_token={secret['typed_token']},{secret['other_typed_token']}"
    sweep = run(
        planted,
        ["runner", "-m", *words, swept, "sweep.dir=sweep", "input.eval=null"],
        {**planted.env, **artifacts, "FAILS": secret["other_typed_token"]},
    )
    assert sweep.code == 2, sweep.said  # the second job says all that it knows
    assert "cannot log in: " in sweep.said and '| *** | "***" |' in sweep.said
    assert leaks_in(sweep.said.encode(), planted.values) == []
    assert leaks_in(sweep.children.encode(), planted.values) == []
    assert len(list(store.rglob("config.yaml"))) == 3
    check_folder(planted)
