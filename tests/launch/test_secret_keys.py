"""The command lists which keys of a config are secret, from what OmegaConf reads for them, and shows it without."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from runner.config import parsing, schema
from runner.launch import app
from runner.launch.secret_keys import listed_in
from runner.system.redaction import SecretList, masked

ENV = {
    "A_TOKEN": "hunter22",
    "WHICH": "A_TOKEN",
    "LOGIN_PASSWORD": "{user: hunter33, pin: 12345, hosts: [hunter44, b]}",
    "QUOTED_TOKEN": "'hunter55'",
    "SHORT_TOKEN": "abc",
    "REGION": "europe",
    "FOO": "foovalue",
}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET_PASSWORD", raising=False)


def listed_for(params: dict[str, Any], secrets: Any = None) -> dict[str, str]:
    """Return key below params -> its entry in the list, as it is after the key."""
    composed = OmegaConf.create({"run": {"secrets": secrets}, "params": params})
    found = listed_in(composed, ENV)
    below = [entry.removeprefix("params.") for entry in found if entry.startswith("params.")]
    return {entry.partition("=")[0]: entry.partition("=")[2] for entry in below}


@pytest.mark.parametrize(
    ("written", "entry"),
    [
        ("${oc.env:A_TOKEN}", "$A_TOKEN"),
        ("${oc.env:'A_TOKEN'}", "$A_TOKEN"),
        ('${oc.env:"A_TOKEN"}', "$A_TOKEN"),
        ("${oc.env:${oc.env:WHICH}}", "$A_TOKEN"),
        ("${oc.${params.kind}:A_TOKEN}", "$A_TOKEN"),
        ("at ${oc.env:A_TOKEN}, ${oc.env:REGION}", "$A_TOKEN"),
        ("${params.other}", "$A_TOKEN"),
        ("typed hunter22", "$A_TOKEN"),
        ("${oc.env:A_TOKEN} ${oc.env:FOO}", "$A_TOKEN,$FOO"),
        ("aHVudGVyMjI=", ""),  # in base64
        ("${oc.decode:${oc.env:LOGIN_PASSWORD}}", ""),
        ("${oc.decode:${oc.env:QUOTED_TOKEN}}", ""),
        ("${oc.env:A_TOKEN}${oc.decode:${oc.env:QUOTED_TOKEN}}", ""),
        ("${oc.env:SHORT_TOKEN}", ""),
        ("${oc.env:UNSET_PASSWORD,hunter66}", ""),
        ("${params.password}", ""),
        ("${params.password} ${oc.env:A_TOKEN}", ""),
        ("typed hunter77", ""),
        ("${oc.env:REGION}", None),
        ("${oc.env:UNSET_PASSWORD,null}", None),
        ("https://me:hunter88@host", None),  # masked anywhere
    ],
)
def test_a_key_is_listed_with_the_variables_that_are_all_that_is_secret_of_it(written: str, entry: str | None) -> None:
    params = {"x": written, "kind": "env", "other": "${oc.env:A_TOKEN}", "password": "hunter77"}
    assert listed_for(params, ["$FOO"]).get("x") == entry


def test_what_is_made_of_a_secret_is_listed_wherever_it_leads() -> None:
    params = {
        "login": "${oc.decode:${oc.env:LOGIN_PASSWORD}}",
        "copy": "${params.login}",
        "urls": ["a", "${oc.env:A_TOKEN}", {"deep": "${params.urls.1}"}],
        "db": {"password": "hunter77", "host": "h"},
        "db_of_others": "${params.db}",
        "broken": "${oc.env:NOT_THERE}",
        "missing": "???",
        "none": None,
        "after": "${oc.env:A_TOKEN}",
    }
    assert listed_for(params) == {
        "login": "", "copy": "", "urls.1": "$A_TOKEN", "urls.2.deep": "$A_TOKEN", "after": "$A_TOKEN",
    }  # fmt: skip
    assert OmegaConf.create({"x": "${oc.env:REGION}"}).x == "europe", "the resolver of OmegaConf is back"


def test_a_saved_config_says_what_is_secret_where_no_variable_is_set(tmp_path: Path) -> None:
    composed = OmegaConf.merge(
        schema.to_tree(schema.Config()),
        {"model": {"fn": "a.b", "params": {"x": "at ${oc.env:A_TOKEN}", "y": "${oc.decode:${oc.env:LOGIN_PASSWORD}}"}}},
        {
            "input": {
                "train": {"fn": "a.d"},
                "eval": {"params": {"z": "${oc.env:A_TOKEN}"}, "fn": "a.c", "first": {"batch_size": 3}},
            }
        },
    )
    assert OmegaConf.is_dict(composed)
    tree: Any = OmegaConf.to_container(composed, resolve=True)
    tree["run"]["secrets"] = listed_in(composed, ENV)  # type: ignore[arg-type]
    path = tmp_path / "config.yaml"
    schema.save(parsing.parse(tree), path)
    assert path.stat().st_mode & 0o777 == 0o600
    saved = schema.read(path)
    assert "hunter22" in str(saved)
    shown = masked(saved, SecretList.of(saved["run"]["secrets"], {}))
    assert shown["model"]["params"] == {"x": "***", "y": {"user": "***", "pin": "***", "hosts": ["***", "***"]}}
    assert shown["input"]["eval"]["first"]["params"] == {"z": "***"}, "a named block has what stands beside it"
    assert "hunter" not in str(shown) and "hunter" not in str(saved["run"])
    schema.save(
        parsing.parse({**tree, "model": {"fn": "a.b", "params": {}}, "input": {"train": {"fn": "a.d"}}}),
        tmp_path / "open.yaml",
    )
    (tmp_path / "any").touch()
    assert (tmp_path / "open.yaml").stat().st_mode == (tmp_path / "any").stat().st_mode


WORDS = (
    "+model.params.db_password=hunter77",
    "+model.params.x=${oc.env:A_TOKEN}",
    "+model.params.text='at ${oc.env:A_TOKEN,hunter66}'",
    "+model.params.login_password=${oc.env:LOGIN_PASSWORD,none}",
    "+model.params.url='https://me:hunter88@host/x'",
    "+model.params.customer_id=cust4711",
    "+model.params.sort_key=kept",
    "run.secrets=[customer_id]",
)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Hydra's `--info` sets the level of all logs, for the process that it would end."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", ["runner", *flags, *WORDS])
    with pytest.raises(SystemExit) if "--help" in flags else nullcontext():
        assert app.run_command_line() == 0
    out, err = capsys.readouterr()
    assert "hunter" not in out + err and "cust4711" not in out + err
    return out


@pytest.mark.parametrize("of_hydra", ["job", "all"])
def test_cfg_shows_interpolations_and_no_secrets(
    of_hydra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = yaml.safe_load(printed(capsys, monkeypatch, "--cfg", of_hydra))["model"]["params"]
    assert params["x"] == "${oc.env:A_TOKEN}" and params["text"] == "at ${oc.env:A_TOKEN,***}"
    assert params["login_password"] == "${oc.env:LOGIN_PASSWORD,none}"
    assert params["db_password"] == params["customer_id"] == "***"
    assert params["url"] == "https://***@host/x" and params["sort_key"] == "kept"


def test_cfg_resolved_shows_no_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    params = yaml.safe_load(printed(capsys, monkeypatch, "--cfg", "job", "--resolve"))["model"]["params"]
    assert params["x"] == params["login_password"] == "***" and params["text"] == "at ***"
    assert params["decay_steps"] == 1000
    head, _, rest = printed(capsys, monkeypatch, "--cfg", "job", "--resolve", "--package", "model.params").partition(
        "\n"
    )
    assert head == "# @package model.params" and yaml.safe_load(rest) == params
    assert printed(capsys, monkeypatch, "--cfg", "job", "--package", "model.params.x") == "***\n"
    assert printed(capsys, monkeypatch, "--cfg", "job", "--package", "model.params.sort_key") == "kept\n"


@pytest.mark.parametrize("flags", [("--cfg", "hydra"), ("--info", "all"), ("--info", "config"), ("--help",)])
def test_what_else_hydra_prints_has_no_secrets(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, monkeypatch, *flags)
    assert "sort_key" in out


def test_a_config_without_secrets_is_printed_as_hydra_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["runner", "--cfg", "job"])
    assert app.run_command_line() == 0
    out = capsys.readouterr().out
    assert out == OmegaConf.to_yaml(OmegaConf.create(out))
    assert "decay_steps: ${train.max_steps}\n" in out
