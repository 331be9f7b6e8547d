"""Writes docs/reference/config/, a page for each group of conf/: `python docs/make_config_reference.py [folder]`.
conf/schema/ is copied there.

Keys, defaults and their meaning are those of the YAML files, types and limits those of `runner/config/schema.py`.
`make docs` runs it before each build; the pages are not committed.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runner.config.error_messages import class_at, limits_in_words  # noqa: E402
from runner.config.help import Entry, entries_in, head_of  # noqa: E402

CONF = ROOT / "conf"
WITHOUT_A_PAGE = ("experiment",)
"""Its files set keys of the other groups, and have none of their own."""


def groups() -> list[str]:
    """Return the groups that get a page."""
    folders = (path for path in CONF.iterdir() if any(path.glob("*.yaml")))
    return sorted(path.name for path in folders if path.name not in WITHOUT_A_PAGE)


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"index.md": index_page(), **{f"{group}.md": group_page(group) for group in groups()}}


def index_page() -> str:
    """Return the page with the groups and the keys that are in none."""
    rows = (f"| [`{group}`]({group}.md) | {prose(summary(group))} |" for group in groups())
    own = "\n\n".join(described(entry, set()) for entry in entries_in(CONF / "runner.yaml"))
    return f"""# Config

Every key, its default, what it takes and what it means. `python -m runner --help KEY` says the same in a terminal.
[How to write your own config](../../how_to/config.md) is another page. [Editors](../../how_to/config.md#in-an-editor)
read the same from [JSON Schemas](schema/config.json).

| group | |
|---|---|
{chr(10).join(rows)}

## Keys of no group

{own}
"""


def group_page(group: str) -> str:
    """Return the page of a group: its keys, for each option in turn where it has several."""
    options = sorted((CONF / group).glob("*.yaml"), key=lambda path: (path.stem != "default", path.stem))
    anchors: set[str] = set()
    parts = [f"# {group}"]
    if len(options) > 1:
        names = ", ".join(f"`{group}={path.stem}`" for path in options)
        parts.append(f"One of {names}. The command line takes one: `python -m runner {group}={options[-1].stem}`.")
    for path in options:
        if len(options) > 1:
            parts.append(f"## {group}={path.stem}")
        entries = list(entries_in(path))
        if not entries or entries[0].comment != head_of(path):  # a file may begin with the comment of its first key
            parts.append(prose(head_of(path)))
        parts += [described(entry, anchors) for entry in entries]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(group: str) -> str:
    """Return what a group decides: the first sentence about its class in the schema."""
    first = (class_at(group).__doc__ or "").partition("\n")[0].replace("`", "")
    return re.split(r"[.;] |[.;:]$", first)[0] + "."


def described(entry: Entry, anchors: set[str]) -> str:
    """Return the heading and the text of a key; the first one of a name on a page has it as its anchor."""
    anchor = "" if entry.key in anchors else f" {{ #{entry.key} }}"
    anchors.add(entry.key)
    facts = [f"Default: `{entry.value}`.", limits_in_words(entry.key)] if entry.value else ["Keys of its own follow."]
    return "\n\n".join(part for part in (f"### `{entry.key}`{anchor}", prose(entry.comment), " ".join(facts)) if part)


def prose(text: str) -> str:
    """Return a comment of YAML as Markdown: what looks like code as code, pages as links, no other markup."""
    return "".join(_marked(re.sub(r"--help (\w+\.md)", _page, text)))


def _page(named: re.Match[str]) -> str:
    """Return the path of a page that `--help` prints."""
    (path,) = (ROOT / "docs").glob(f"*/{named[1]}")
    return str(path.relative_to(ROOT))


def _marked(text: str) -> Iterator[str]:
    for is_code, words in groupby(re.split(r"(\s+)", text), _looks_like_code):
        joined = "".join(words)
        page = re.search(r"docs/([\w/]+\.md)", joined)
        if page:
            yield joined.replace(page[0], f"[{page[1]}](../../{page[1]})")
            continue
        file = re.search(r"conf/(\w+)/(\w+)\.yaml", joined)
        if file:
            yield joined.replace(file[0], f"[`{file[1]}={file[2]}`]({file[1]}.md)")
            continue
        if not is_code:
            yield re.sub(r"([*<|\[\]`])", r"\\\1", joined)
            continue
        code = joined.rstrip(".,;:)")
        opening = "(" if code.startswith("(") and ")" not in code else ""
        yield f"{opening}`{code.removeprefix(opening)}`{joined[len(code) :]}"


def _looks_like_code(word: str) -> bool:
    return re.search(r"^\(?\+?[\w.]+=\S|^\(?[a-z_]+(\.[a-z_]+)+|[a-z]_[a-z]|^\w+/\w+", word) is not None


def write(folder: Path) -> Iterable[Path]:
    """Write all pages into `folder`. Return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
    shutil.copytree(CONF / "schema", folder / "schema", dirs_exist_ok=True)
    return sorted(folder.glob("*.md"))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference" / "config")
