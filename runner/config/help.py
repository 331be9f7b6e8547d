"""`--help KEY`, `--help GROUP`, `--help WORD` and `--version`: what the comments of `conf/` say, without composing."""

from __future__ import annotations

import dataclasses
import platform
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import runner
from runner.config.error_messages import did_you_mean, limits_in_words
from runner.config.schema import ConfigError

_SHOWN_PACKAGES = ("tensorflow", "keras", "mlflow", "hydra-core")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key of a config file.

    Attributes:
      key: with its group: `train.max_steps`.
      value: as the file has it; '' where keys below it follow.
      comment: what stands over it.
      option: the file in the group: `default`.
    """

    key: str
    value: str
    comment: str
    option: str

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    @property
    def line(self) -> str:
        """The key, its value and the first sentence about it, in one line of a terminal of 120 columns."""
        written = f"{self.key}={self.value}" if self.value else f"{self.key}: ..."
        first = re.split(r"(?<=[.;])\s", self.comment, maxsplit=1)[0].rstrip(";")
        return textwrap.shorten(f"{written}  {first}", 119, placeholder=" ...").replace(written, f"{written:<44}", 1)

    @property
    def text(self) -> str:
        """All that is said of it."""
        written = f"{self.key}={self.value}" if self.value else f"{self.key}:"
        said = [self.comment, *([limits_in_words(self.key)] if self.value else [])]
        return "\n".join([written, *(_filled(one) for one in said if one)])


def version() -> str:
    """Return the line of `--version`: ours, and that of what decides how a run behaves."""
    others = [f"{name} {metadata.version(name)}" for name in _SHOWN_PACKAGES]
    return f"tf-runner {runner.__version__} ({', '.join([*others, f'Python {platform.python_version()}'])})"


def help_on(words: Sequence[str]) -> str:
    """Return what is known of each of `words`: a key, a group, or a word that keys or their comments contain.

    Raises:
      ConfigError: nothing is known of one.
    """
    return "\n\n".join(_help_on(word) for word in words)


def _help_on(word: str) -> str:
    files = _files()
    entries = [entry for path in files for entry in entries_in(path)]
    options = [path for path in files if path.parent.name == word]
    if options:
        names = ", ".join(dict.fromkeys(path.stem for path in options))
        parts = [f"{word}=<one of: {names}>"]
        for path in options:
            parts.append(f"--- {word}={path.stem} ---\n{_filled(head_of(path), indent='')}")
            parts += [entry.text for entry in entries_in(path)]
        return "\n\n".join(parts)
    if word == "keys":
        return "\n".join(dict.fromkeys(entry.line for entry in entries if entry.group not in ("model", "input")))
    below = [entry for entry in entries if entry.key == word or entry.key.startswith(f"{word}.")]
    if below:
        return "\n\n".join(_texts(key, [entry for entry in below if entry.key == key]) for key in _keys(below))
    topic = word.lower()
    lines = [entry.line for entry in entries if topic in f"{entry.key} {entry.comment}".lower()]
    if not lines:
        known = [*_keys(entries), *(key.rpartition(".")[2] for key in _keys(entries)), *_groups(files)]
        raise ConfigError(
            f"--help {word}: there is no such key or group, and no comment has the word.{did_you_mean(word, known)} "
            f"Groups: {', '.join(_groups(files))}. A line for each key: --help keys."
        )
    return "\n".join(dict.fromkeys(lines))


def _texts(key: str, entries: Sequence[Entry]) -> str:
    """Return what is said of a key; with the name of each file of the group where these say different things."""
    texts: dict[str, str] = {}
    for entry in entries:
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
    """Return the config files, the user's before ours; one of theirs takes the place of ours of that name."""
    package = Path(runner.__file__).parent
    ours = package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
    found: dict[Path, Path] = {}
    for folder in (ours, Path.cwd() / "conf"):
        for path in [folder / "runner.yaml", *sorted(folder.glob("*/*.yaml"))]:
            if path.is_file():
                found[path.relative_to(folder)] = path
    return list(found.values())


def head_of(path: Path) -> str:
    """Return the comment that a file begins with."""
    lines = path.read_text().splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return _joined(line for line in lines[:end] if not line.startswith("# @package"))


def entries_in(path: Path) -> Iterator[Entry]:
    """Yield the keys of a file; of `runner.yaml` those that it has itself, which are in no group."""
    group = "" if path.stem == "runner" else path.parent.name
    if group == "experiment":
        return
    above: list[str] = []
    parents: list[str] = []
    for line in path.read_text().splitlines():
        if line.strip().startswith("#"):
            above.append(line)
            continue
        match = re.match(r"( *)([\w-]+):(?: +(.*))?$", line.split(" #")[0].rstrip())
        if match:
            indent, name, value = match.groups()
            parents = [*parents[: len(indent) // 2], name]
            if group or parents[0] not in ("defaults", "hydra"):
                yield Entry(".".join([group, *parents]).lstrip("."), value or "", _joined(above), path.stem)
        above = []


def _joined(lines: Iterator[str] | Sequence[str]) -> str:
    return " ".join(line.strip().removeprefix("#").strip() for line in lines)


def _filled(text: str, indent: str = "    ") -> str:
    return textwrap.fill(text, 79, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
