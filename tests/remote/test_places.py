"""Which URLs are a model_dir: those of object stores; no other is written to, in particular no folder named `gs:`."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runner
from runner import Estimator, RunConfig
from runner.classic.__main__ import main
from runner.classic.compat.check import check_source
from runner.classic.compat.differences import CHANGED
from runner.classic.compat.installed_names import Installed
from runner.classic.estimator import Estimator as ClassicEstimator
from runner.classic.run_config import RunConfig as ClassicRunConfig
from runner.config.mistakes import ConfigError, NotAllowed
from runner.remote.mirror import known_folder, local_folder, mirror_of, remote_dir, writing
from runner.remote.store import Store
from tests.config.test_config import parsed
from tests.support.command_line import CommandLine
from tests.support.line import line, points

REFUSED = (
    "memory://b/run",
    "ram://b/run", "hdfs://namenode/run", "s3a://bucket/run", "file:///tmp/run", "http://host/run", "s3://key:word@bucket/run",
    "s3:///run", "gs://bucket/a//b", "az://bucket/../run", "gs://bucket/run?x=1",
)  # fmt: skip

FACES: dict[str, Callable[[str], Any]] = {
    "RunConfig": lambda url: RunConfig(model_dir=url),
    "Estimator": lambda url: Estimator(line, url),
    "RunConfig.replace": lambda url: RunConfig().replace(model_dir=url),
    "classic.RunConfig": lambda url: ClassicRunConfig(model_dir=url),
    "classic.Estimator": lambda url: ClassicEstimator(line, url),
    "TF_CONFIG": lambda url: ClassicRunConfig(tf_config=f'{{"model_dir": "{url}"}}'),
    "runner.load": runner.load,
    "model_dir": lambda url: parsed(f"model_dir='{url}'"),
}


@pytest.mark.parametrize("face", FACES)
def test_a_url_that_is_no_object_store_is_refused_and_nothing_is_written(
    face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for url in REFUSED:
        with pytest.raises(ValueError) as refusal:
            FACES[face](url)
        assert "word" not in str(refusal.value) and url.partition("://")[0] in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text, says",
    [
        ("predict.output=s3://bucket/run", "predict.output"), ("new.path=s3://bucket/run", "new.path"),
        ("export.dir=hdfs://node/run", "export.dir"), ("sweep.dir=file:///run", "sweep.dir"),
    ],
)  # fmt: skip
def test_another_folder_is_no_url(text: str, says: str) -> None:
    with pytest.raises(NotAllowed, match=says):
        parsed(text)


@pytest.mark.parametrize("scheme", ["ram", "hdfs"])  # ram is TensorFlow's own
def test_an_export_is_in_an_object_store_or_refused_and_nothing_is_written(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"{scheme}://bucket/export"
    for config in (RunConfig, ClassicRunConfig):
        with pytest.raises(ValueError, match=rf"RunConfig\(export_dir={url}\)"):
            config(export_dir=url)
    estimator = Estimator(line, str(tmp_path / "run"))
    estimator.train(points(), max_steps=1)
    with pytest.raises(ValueError, match=rf"export_dir_base={url}\)"):
        estimator.export_saved_model(url, lambda: pytest.fail("it is called"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_store_in_memory_which_no_other_process_sees_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    for words in (
        ["-m", "sweep.dir=memory://b/s"],
        ["export.dir=memory://b/e", "export.exporters=[final]"],
        ["model_dir=memory://b/r", "run.inline=true"],
    ):
        done = command_line(*words, "tracking=none", cwd=tmp_path)
        assert done.returncode == 2 and "memory://b/" in done.stderr, done.stderr
    assert not [path for path in tmp_path.rglob("*") if ":" in path.name]


def test_the_jobs_of_a_sweep_at_a_url_are_not_of_other_launchers(tmp_path: Path, command_line: CommandLine) -> None:
    done = command_line("-m", "hydra/launcher=joblib", "sweep.dir=s3://b/s", "run.seed=1,2", cwd=tmp_path)
    assert done.returncode == 2 and "sweep.dir=s3://b/s with hydra/launcher=joblib" in done.stderr, done.stderr
    assert not [path for path in tmp_path.rglob("*") if ":" in path.name]


def test_the_command_line_of_scripts_refuses_a_url_before_it_starts_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    for url in REFUSED:
        monkeypatch.setattr(sys, "argv", ["runner.classic", "--model-dir", url, str(script)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2 and "--model-dir" in (said := capsys.readouterr().err) and "word" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_check_says_that_tensorflow_opens_a_url_itself() -> None:
    source = "import tensorflow as tf\nmodel_dir = 's3://bucket/run'\ntf.io.gfile.exists(model_dir)"
    (said,) = [one for one in check_source(source, "code.py", Installed()) if one.verdict == CHANGED]
    assert (said.line, said.name) == (3, "tf.io.gfile.exists") and "config.remote_dir" in said.text
    local = check_source(source.replace("s3:/", ""), "code.py", Installed())
    assert {one.verdict for one in local} == {"unchanged"}


@pytest.mark.usefixtures("stores_in_memory")
def test_a_url_has_one_local_folder_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    leased_urls = [local_folder("model_dir=", url) for url in ("memory://b/run", "memory://b/run/", "memory://c/run")]
    assert leased_urls[0] == leased_urls[1] != leased_urls[2]
    assert all(Path(place).parent == tmp_path / "estimator-runner" for place in leased_urls)
    assert Path(local_folder("model_dir=", "memory://b/run", str(tmp_path / "own"))).parent == tmp_path / "own"
    assert local_folder("model_dir=", "some/folder") == "some/folder"
    with pytest.raises(ConfigError, match="adlfs"):
        local_folder("model_dir=", "az://b/run")


@pytest.mark.usefixtures("stores_in_memory")
def test_what_lies_below_a_url_that_was_written_to_belongs_to_it_and_no_url_is_around_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    url = f"memory://{uuid.uuid4().hex}/runs/sweep"
    folder = Path(local_folder("sweep.dir=", url))
    writing(folder)
    (folder / "3").mkdir()
    (folder / "3" / "run.json").write_text("{}")
    assert mirror_of(folder / "3" / "export").lost is not None and mirror_of(folder / "3").url == url
    for job in (local_folder("model_dir=", f"{url}/3"), known_folder(f"{url}/3/")):
        assert job == str(folder / "3")
    assert remote_dir(folder / "3") == f"{url}/3" and remote_dir(tmp_path) is None
    with pytest.raises(NotAllowed, match=f"export.dir=.*runs: in .*runs is {url}"):
        local_folder("export.dir=", url.removesuffix("/sweep"))
    assert mirror_of(folder).close() == ""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))  # another machine knows it from the bucket
    assert known_folder(f"{url}/3") != local_folder("model_dir=", f"{url}/3")
    elsewhere = Path(local_folder("model_dir=", f"{url}/3"))
    assert elsewhere.name == "3" and (elsewhere / "run.json").exists() and remote_dir(elsewhere) == f"{url}/3"
    with pytest.raises(NotAllowed, match=f"{url}.*Choose another place"):
        local_folder("model_dir=", url.removesuffix("/sweep"))
    writing(elsewhere)
    assert Store(url).lease(Store(url).highest())["folder"] != Store(url).lease(1)["folder"]
    assert mirror_of(elsewhere).close() == "" and Store(url).leased_urls() == []
