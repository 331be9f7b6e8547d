"""docs/how_to/premade.md: its examples run, its config composes, and its tables list what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from runner.classic.compat import names
from runner.models import column_specs

TEXT = (Path(__file__).parents[2] / "docs" / "how_to" / "premade.md").read_text()


@pytest.mark.slow
def test_its_examples_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", TEXT, re.MULTILINE)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert printed == promised


def test_its_columns_can_be_made() -> None:
    block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    params = yaml.safe_load(block[1])["params"]
    columns = column_specs.Columns(params["columns"])
    assert [one.name for one in columns.chosen(params["wide"], "wide")] == ["job", "age_bucketized_X_job"]
    assert [one.name for one in columns.chosen(params["deep"], "deep")] == ["age", "job_embedding"]


def test_its_tables_list_all_kinds_and_heads() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| `", TEXT, re.MULTILINE)) | {"indicator"} == set(column_specs._KINDS)
    assert set(re.findall(r"^\| `(\w+Head)`", TEXT, re.MULTILINE)) == {
        one for one in names.NAMES if one.endswith("Head")
    } - {"Head"}
