"""Pages of the gallery: one for each experiment that promises a number, with code as it stands in the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.test_gallery import PROMISES

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
PAGES = sorted(path.stem for path in GALLERY.glob("*.md") if path.stem != "index")
BLOCK = re.compile(r'^```\w+ title="(.+?)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def test_every_experiment_that_promises_a_number_has_a_page() -> None:
    assert set(PROMISES) == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_reached_from_the_first_one_and_shows_its_command(page: str) -> None:
    assert f"({page}.md)" in (GALLERY / "index.md").read_text()
    assert f"gallery/{page}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"python -m runner experiment={page}" in (GALLERY / f"{page}.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_is_that_of_the_file(page: str) -> None:
    for name, text in BLOCK.findall((GALLERY / f"{page}.md").read_text()):
        assert text in (ROOT / name).read_text(), f"{page}.md shows other lines than {name} has:\n{text}"


@pytest.mark.parametrize("picture", sorted(GALLERY.glob("*.png")), ids=lambda path: path.name)
def test_a_picture_is_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size < 100_000
    assert any(f"({picture.name})" in path.read_text() for path in GALLERY.glob("*.md"))
