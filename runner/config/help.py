"""The texts of `--help`, `--help` with a KEY, GROUP, WORD or PAGE.md, and `--version`, taken from the comments of
`conf/` and the pages of `docs/`.

They need no composed config, and no Hydra, whose import takes longer than the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import platform
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runner
from runner.system.redaction import masked_override

if TYPE_CHECKING:
    from runner.config.mistakes import ConfigError

_PAGES = ("how_to", "tutorial", "explanation", "reference")
"""Folders of pages that travel in the wheel."""

_FOR_PROGRAMS = ("# @package", "# yaml-language-server:")
"""Beginnings of the comments that Hydra and editors read."""

_SHOWN_PACKAGES = ("tensorflow", "keras", "mlflow", "hydra-core")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key of a config file.

    Attributes:
      key: the key with its group: `train.max_steps`.
      value: the value as written in the file; '' if further keys are nested below.
      comment: the comment above the key.
      option: the name of the file, which is an option of the group: `default`.
    """

    key: str
    value: str
    comment: str
    option: str

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    @property
    def setting(self) -> str:
        """The key and its value, without a secret of the user's own file."""
        return masked_override(f"{self.key}={self.value}")

    @property
    def line(self) -> str:
        """The key, its value and the first sentence of its comment, in one line of 120 columns."""
        written = self.setting if self.value else f"{self.key}: ..."
        first = re.split(r"(?<=[.])\s", self.comment, maxsplit=1)[0]
        start = f"{written:<45}"
        return start + textwrap.shorten(first, max(120 - len(start), 20), placeholder=" ...")

    @property
    def text(self) -> str:
        """The key, its value, the whole comment and its limits."""
        from runner.config.error_messages import limits_in_words  # of the schema, which the lines do not need

        written = self.setting if self.value else f"{self.key}:"
        said = [self.comment]
        if self.value:
            said.append(limits_in_words(self.key))
        paragraphs = [_wrap(text) for text in said if text]
        return "\n".join([written, *paragraphs])


def answer(words: Sequence[str]) -> str:
    """Return the answer to `--version`, `--help` and `--help KEY`, and to a shell that asks for the values of a key; ''
    to everything else.

    `--help train.max_steps=5` is Hydra's: it shows the config with this value.

    Raises:
      ConfigError: there is no such key.
    """
    if "--version" in words:
        return version()
    shell = next((word.removeprefix("query=") for word in words if word.startswith("query=")), "")
    if shell and words[0] in ("-sc", "--shell_completion"):
        # Hydra completes keys and options. It knows no values of a key but its default.
        separator = "\n" if shell == "fish" else " "
        return separator.join(values_for(os.environ.get("COMP_LINE", "")))
    asked = [word for word in words if word not in ("--help", "-h")]
    asks_for_help = len(asked) < len(words)
    if not asks_for_help or any("=" in word or word.startswith("-") for word in asked):
        return ""
    if not asked:
        return overview()
    return "\n\n".join(map(help_on, asked))


def values_for(line: str) -> list[str]:
    """Return `key=value` for each value with which the last word of a command line may go on; []: Hydra knows more."""
    word = line.rpartition(" ")[2]
    key, is_value, begun = word.partition("=")
    if not is_value:
        return []
    from runner.config.error_messages import choices_of  # of the schema, which a word without "=" does not need

    names_function = re.search(r"^(model|input\..+)\.fn$", key)
    values = _own_modules() if names_function else choices_of(key)
    return [f"{key}={value}" for value in values if value.startswith(begun)]


def _own_modules() -> list[str]:
    """Return the dotted names of the modules in the folder where the user is, and in the folders of it."""
    files = [*glob.glob("*.py"), *glob.glob("*/*.py")]
    names = [".".join(Path(file).with_suffix("").parts) for file in files]
    return sorted(name for name in names if not re.search(r"(^|\.)(_|tests?\b|conftest|setup$)", name))


def version() -> str:
    """Return the line of `--version`: the versions of the runner and of the packages that affect a run."""
    from importlib import metadata  # 10 ms, which every other command would wait for

    others = []
    for name in _SHOWN_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):  # a build of another name, such as keras-nightly
            others.append(f"{name} {metadata.version(name)}")
    others.append(f"Python {platform.python_version()}")
    return f"estimator-runner {runner.__version__} ({', '.join(others)})"


def overview() -> str:
    """Return the answer to `--help`: the groups and their options, and a line for each key of the default run.

    Returns:
      The answer; '' if the user's conf/runner.yaml is damaged or has no texts for it. Then Hydra answers.
    """
    import yaml  # 20 ms, which no other answer needs

    files = _files()
    start = next(path for path in files if path.stem == "runner")
    try:
        tree = yaml.safe_load(_text_of(start))
        texts = tree["hydra"]["help"]
        header = texts["header"]
        footer = texts["footer"]
        chosen = _chosen_options(tree["defaults"])
    except (yaml.YAMLError, KeyError, TypeError):
        return ""
    lines = [header, "Groups (group=option; the first is the default):"]
    for group in sorted(_groups(files)):
        options = sorted(path.stem for path in files if path.parent.name == group)
        default = chosen.get(group)
        if default in options:
            options.remove(default)
            options.insert(0, default)
        lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "Keys of the default run (key=value):"]
    for path in files:
        is_of_default_run = path == start or chosen.get(path.parent.name) == path.stem
        if is_of_default_run:
            lines += [entry.line for entry in entries_in(path)]
    lines += ["", footer.rstrip("\n")]
    return "\n".join(lines)


def _chosen_options(defaults: Iterable[Any]) -> dict[str, Any]:
    """Return group -> option of a defaults list; an entry that is no mapping chooses none."""
    chosen: dict[str, Any] = {}
    for entry in defaults:
        if isinstance(entry, dict):
            chosen.update(entry)
    return chosen


def help_on(word: str) -> str:
    """Return the help on a key, a group, or a word in keys or comments; of `training.md#input`, that part of the page.

    Raises:
      ConfigError: nothing matches the word.
    """
    if re.search(r"\.md(#|$)", word):
        return page_on(word)
    files = _files()
    entries: list[Entry] = []
    for path in files:
        entries += entries_in(path)
    options = [path for path in files if path.parent.name == word]
    if options:
        return _text_on_group(word, options)
    if word == "keys":
        lines = [entry.line for entry in entries if entry.group not in ("model", "input")]
        return "\n".join(dict.fromkeys(lines))
    below = [entry for entry in entries if entry.key == word or entry.key.startswith(f"{word}.")]
    if below:
        return "\n\n".join(_text_on_key(key, below) for key in _keys(below))
    lines = _lines_with(word, entries)
    if not lines:
        raise _unknown_word(word, entries, _groups(files))
    return "\n".join(lines)


def _text_on_group(group: str, options: Sequence[Path]) -> str:
    """Return the help on a group: its options, and all keys of each of their files."""
    names = ", ".join(dict.fromkeys(path.stem for path in options))
    parts = [f"{group}=<one of: {names}>"]
    for path in options:
        parts.append(f"--- {group}={path.stem} ---\n{_wrap(head_of(path), indent='')}")
        parts += [entry.text for entry in entries_in(path)]
    return "\n\n".join(parts)


def _lines_with(word: str, entries: Sequence[Entry]) -> list[str]:
    """Return the lines of the entries with a word: first those with it in their keys, then those in their comments."""
    begins = re.compile(rf"(?<![^\W_]){re.escape(word)}", re.IGNORECASE)  # a word: `early` is not in `nearly`
    by_key = [entry.line for entry in entries if begins.search(entry.key)]
    by_comment = [entry.line for entry in entries if begins.search(entry.comment)]
    return list(dict.fromkeys([*by_key, *by_comment]))


def _unknown_word(word: str, entries: Sequence[Entry], groups: Sequence[str]) -> ConfigError:
    """Return the error for a word that no key, group or comment has."""
    from runner.config.mistakes import UnknownKey
    from runner.system.suggestions import did_you_mean

    keys = _keys(entries)
    names = [key.rpartition(".")[2] for key in keys]
    hint = did_you_mean(word, [*keys, *names, *groups])
    return UnknownKey(
        f"--help {word}: no key or group has this name, and no comment contains it.{hint} "
        f"Groups: {', '.join(groups)}. To list all keys: --help keys."
    )


def page_on(word: str) -> str:
    """Return a page of the documentation, or the part of it below a heading.

    Args:
      word: the page's name, and perhaps an anchor as in the address of the site: `training.md#input`.

    Raises:
      UnknownKey: there is no such page, or no such heading.
    """
    from runner.config.mistakes import UnknownKey
    from runner.system.suggestions import did_you_mean

    name, _, anchor = word.partition("#")
    file = name.rpartition("/")[2]
    folder = shipped("docs")
    pages: dict[str, Path] = {}
    for kind in reversed(_PAGES):  # of pages of the same name, that in the first of the folders is meant
        for path in sorted((folder / kind).glob("*.md")):
            pages[path.name] = path
    if file not in pages:
        raise UnknownKey(
            f"--help {word}: there is no such page.{did_you_mean(name, pages)} Pages: {', '.join(sorted(pages))}."
        )
    text = pages[file].read_text(encoding="utf-8").rstrip()
    if not anchor:
        return text
    parts = _parts_of(text)
    if anchor not in parts:
        raise UnknownKey(
            f"--help {word}: the page has no such heading.{did_you_mean(anchor, parts)} It has {', '.join(parts)}."
        )
    return parts[anchor]


def _parts_of(page: str) -> dict[str, str]:
    """Return anchor -> its part of a page: the text from a heading to the next one of its level or a higher one."""
    lines = page.splitlines()
    headings: list[tuple[int, int, str]] = []
    is_code = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            is_code = not is_code
        heading = re.match(r"#+(?= )", line)
        if heading and not is_code:  # in code it is a comment
            headings.append((number, len(heading[0]), line.lstrip("# ")))
    parts = {}
    for position, (start, level, title) in enumerate(headings):
        ends = [number for number, other_level, _ in headings[position + 1 :] if other_level <= level]
        end = ends[0] if ends else len(lines)
        plain_title = re.sub(r"[^\w\s-]", "", title.lower()).strip()
        anchor = re.sub(r"\s+", "-", plain_title)  # as the site makes it
        parts[anchor] = "\n".join(lines[start:end]).rstrip()
    return parts


def _text_on_key(key: str, entries: Sequence[Entry]) -> str:
    """Return the help on a key; if the files of its group differ in it, one text for each.

    Args:
      key: the key.
      entries: entries of it and of other keys.
    """
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.key == key:
            texts.setdefault(entry.text, entry.option)
    if len(texts) == 1:
        return next(iter(texts))
    group = key.partition(".")[0]
    return "\n\n".join(f"with {group}={option}: {text}" for text, option in texts.items())


def _keys(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.key for entry in entries))


def _groups(files: Sequence[Path]) -> list[str]:
    return list(dict.fromkeys(path.parent.name for path in files if path.stem != "runner"))


def _files() -> list[Path]:
    """Return the config files, the user's first. A user's file replaces the runner's of the same group and name."""
    found: dict[Path, Path] = {}
    for folder in (shipped("conf"), Path.cwd() / "conf"):
        for path in [folder / "runner.yaml", *sorted(folder.glob("*/*.yaml"))]:
            if path.is_file():
                found[path.relative_to(folder)] = path
    return list(found.values())


def shipped(name: str) -> Path:
    """Return a folder of the repository: inside the package in a wheel, beside it in a checkout."""
    package = Path(runner.__file__).parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def _text_of(path: Path) -> str:
    from runner.config.schema import text_of  # `--version` needs no schema

    return text_of(path)


def head_of(path: Path) -> str:
    """Return the comment at the beginning of a file."""
    lines = _text_of(path).splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return _join_comments(line for line in lines[:end] if not line.startswith(_FOR_PROGRAMS))


def entries_in(path: Path) -> Iterator[Entry]:
    """Yield the keys of a config file, with the comments above them.

    Of `runner.yaml`, only the keys that belong to no group are yielded. The keys in an experiment's file belong to
    other groups, so none of them is yielded.
    """
    group = "" if path.stem == "runner" else path.parent.name
    if group == "experiment":
        return
    comments: list[str] = []
    names: list[str] = []
    for line in _text_of(path).splitlines():
        if line.strip().startswith("#"):
            comments.append(line)
            continue
        match = re.match(r"( *)([\w-]+):(?: +(.*))?$", line.split(" #")[0].rstrip())
        if match:
            indent, name, value = match.groups()
            names = [*names[: len(indent) // 2], name]  # two spaces a level
            key = ".".join([group, *names]).lstrip(".")
            if group or names[0] not in ("defaults", "hydra"):
                yield Entry(key, value or "", _join_comments(comments), path.stem)
        comments = []


def _join_comments(lines: Iterator[str] | Sequence[str]) -> str:
    return " ".join(line.strip().removeprefix("#").strip() for line in lines)


def _wrap(text: str, indent: str = "    ") -> str:
    return textwrap.fill(text, 79, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
