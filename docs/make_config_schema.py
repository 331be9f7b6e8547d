"""Writes conf/schema/, the JSON Schemas by which editors know the keys: `python docs/make_config_schema.py [folder]`.

`make schema` runs it. The files are committed, travel in the wheel, and are copied by command=new. Keys, types and
limits are those of `runner/config/schema.py`, descriptions the comments of conf/.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runner.config.error_messages import limits_in_words  # noqa: E402
from runner.config.help import Entry, entries_in, head_of  # noqa: E402
from runner.config.schema import (  # noqa: E402
    TRACKERS,
    Config,
    InputBlock,
    VocabularyConfig,
    class_at,
)  # fmt: skip
from runner.config.settings.limits import Limits, limits_of  # noqa: E402

CONF = ROOT / "conf"
Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest that every editor knows."""

COMPOSED = r"\$\{|^\?\?\?$"
"""Texts in whose place Hydra puts a value of the key's type: `${other.key}`, and ??? for one that has to be set."""

SAME_KEYS = {"input.eval": "input.train", "input.predict": "input.train", "eval_strategy": "strategy"}
"""Where the files explain a key once: settings of the first are explained at the second."""

JSON_TYPES: Mapping[Any, Sequence[str]] = {
    int: ["integer"],
    float: ["number"],
    bool: ["boolean"],
    str: ["string", "number", "boolean"],  # OmegaConf makes a text of them: run_name: 7
}


def schemas() -> dict[str, Schema]:
    """Return file name -> schema: config.json for files with `# @package _global_`, else that of the file's group."""
    return {"config.json": config_schema(), **{f"{group}.json": group_schema(group) for group in groups()}}


def groups() -> list[str]:
    """Return the groups that have keys of their own, in the order of the schema."""
    return [setting.name for setting in dataclasses.fields(Config) if class_at(setting.name)]


def options(group: str) -> list[str]:
    """Return the names of the files of a group: the values that it may have."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def config_schema() -> Schema:
    """Return the schema of a file whose keys are those of the whole config."""
    keys = settings(Config, "")["properties"]
    for group in groups():
        # A defaults list belongs to a file, and not to the keys of a group below another key.
        own = {"allOf": [{"$ref": f"{group}.json"}, {"not": {"required": ["defaults"]}}]}
        keys[group] = {"description": heads(group), **own}
    choices = {f"override /{group}": one_of(options(group), ["string", "array", "null"]) for group in groups()}
    hydra = {"type": "object", "description": "Hydra's own settings: runner --hydra-help"}
    return file_schema("The config of a run", {"defaults": defaults(choices, []), **keys, "hydra": hydra})


def group_schema(group: str) -> Schema:
    """Return the schema of a file of a group."""
    cls: Any = class_at(group)
    own = [*options(group), "_self_"]
    return file_schema(f"Settings of the group {group}", {"defaults": defaults({}, own)} | keys_of(cls, group))


def file_schema(title: str, keys: Schema) -> Schema:
    """Return the schema of a file with these keys and no others."""
    # An empty file, or one of comments only, has no keys.
    return {"$schema": DRAFT, "title": title, "type": ["object", "null"], "properties": keys,
            "additionalProperties": False}  # fmt: skip


def defaults(groups_of_options: Schema, files: list[str]) -> Schema:
    """Return the schema of a defaults list; groups and options of the user's own are allowed beside ours."""
    option = {"type": ["string", "array", "null"]}
    entry = {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": groups_of_options,
             "additionalProperties": option}  # fmt: skip
    return {
        "description": "Files that this one starts from, or the options of groups that it chooses.",
        "type": "array",
        "items": {"anyOf": [one_of(files, ["string"]), entry]},
    }


def one_of(offered: Sequence[str], allowed: Sequence[str]) -> Schema:
    """Return the schema of a value for which an editor offers some texts, and of which others are allowed."""
    others = {"type": list(allowed)}
    return {"anyOf": [{"enum": list(offered)}, others]} if offered else others


# --- a key ----------------------------------------------------------------------------------------------------------


def settings(cls: Any, at: str, further: Any = False) -> Schema:
    """Return the schema of the settings of a dataclass.

    Args:
      cls: the dataclass.
      at: the key of the settings.
      further: the schema of keys that the class does not have; False: there are none.
    """
    keys = keys_of(cls, at)
    return {"type": ["object", "string"], "pattern": COMPOSED, "properties": keys, "additionalProperties": further}


def keys_of(cls: Any, at: str) -> Schema:
    """Return name -> schema of the fields of a dataclass."""
    hints = get_type_hints(cls)
    keys = {}
    for setting in dataclasses.fields(cls):
        key = f"{at}.{setting.name}".lstrip(".")
        keys[setting.name] = facts(key) | value_of(key, hints[setting.name], limits_of(setting))
    return keys


def value_of(key: str, hint: Any, limits: Limits) -> Schema:
    """Return the schema of the value of a key."""
    if dataclasses.is_dataclass(hint):
        return settings(hint, key)
    found = of_many_shapes(key) or of_type(hint, limits)
    words = limits_in_words(key)
    return {**found, "patternErrorMessage": words} if "pattern" in found and words else found


def of_many_shapes(key: str) -> Schema | None:
    """Return the schema of a key of which a dataclass says less than the config allows; None for other keys."""
    text = {"type": "string", "pattern": COMPOSED}
    if key == "input.eval":
        block = settings(InputBlock, key)
        named = settings(InputBlock, key, further=block)  # settings beside named evaluations are common to them
        return named | {"type": ["object", "string", "null"]}
    if key == "train.warm_start.vocabularies":
        vocabulary = settings(VocabularyConfig, key)
        return {"type": ["object", "string"], "pattern": COMPOSED, "additionalProperties": vocabulary}
    if key in ("train.hooks", "eval.hooks"):
        hook = object_with_fn()
        return {"type": ["array", "string"], "pattern": COMPOSED, "items": {"anyOf": [hook, text]}}
    if key == "tracking.backend":
        backend = [one_of(TRACKERS, ["string"]), object_with_fn()]
        return {"anyOf": [*backend, {"type": "array", "items": {"anyOf": backend}}]}
    return None


def object_with_fn() -> Schema:
    """Return the schema of `{fn: package.module.Class, params: {}}`."""
    fn = {"type": "string", "description": "package.module.Class, or a function."}
    params = {"description": "What it is called with, by name.", "type": ["object", "string"], "pattern": COMPOSED}
    known = {"fn": fn, "params": params}
    return {"type": "object", "properties": known, "required": ["fn"], "additionalProperties": False}


def of_type(hint: Any, limits: Limits) -> Schema:
    """Return the schema of a value of a type within limits, or of the text from which Hydra makes it."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    parts = [part for part in get_args(hint) if part is not NoneType] if is_union else [hint]
    found = of_part(parts[0], limits)
    if len(parts) < len(get_args(hint)) and is_union:
        found |= {"enum": [*found["enum"], None]} if "enum" in found else {"type": [*found["type"], "null"]}
    if "enum" in found:
        return {"anyOf": [found, {"type": "string", "pattern": COMPOSED}]}
    if "string" in found["type"]:
        return found
    return {**found, "type": [*found["type"], "string"], "pattern": COMPOSED}


def of_part(part: Any, limits: Limits) -> Schema:
    """Return the schema of a value of a type that is no union."""
    if get_origin(part) is list:
        return {"type": ["array"], "items": of_type(get_args(part)[0], limits)}
    if get_origin(part) is dict:
        value = get_args(part)[1]
        return {"type": ["object"]} | ({} if value is Any else {"additionalProperties": of_type(value, limits)})
    if limits.choices:
        return {"enum": [*limits.choices]}
    if limits.auto:
        return {"type": ["integer", "string"], "pattern": f"^auto$|{COMPOSED}", **bounds(limits)}
    return {"type": [*JSON_TYPES[part]], **(bounds(limits) if part in (int, float) else {})}


def bounds(limits: Limits) -> Schema:
    """Return the limits of a number."""
    # The largest integer of 64 bits is no number of JavaScript's, in which editors compare.
    largest = limits.maximum if limits.maximum < Limits().maximum else None
    found = {"minimum": limits.minimum, "maximum": largest,
             "exclusiveMinimum": limits.above, "exclusiveMaximum": limits.below}  # fmt: skip
    return {name: bound for name, bound in found.items() if bound is not None}


# --- what conf/ says of it ------------------------------------------------------------------------------------------


def entries() -> dict[str, list[Entry]]:
    """Return key -> what the files of its group say of it."""
    found: dict[str, list[Entry]] = {}
    for path in [CONF / "runner.yaml", *sorted(CONF.glob("*/*.yaml"))]:
        for entry in entries_in(path):
            found.setdefault(entry.key, []).append(entry)
    return found


ENTRIES = entries()


def facts(key: str) -> Schema:
    """Return the description of a key, and its default where all files of the group have the same."""
    said = ENTRIES.get(key)
    for one, other in SAME_KEYS.items():
        if not said and key.startswith(f"{one}."):
            said = ENTRIES.get(other + key.removeprefix(one))
    if not said:
        return {}
    comments: dict[str, list[str]] = {}
    for entry in said:
        comments.setdefault(entry.comment, []).append(entry.option)
    words = [*comments]
    if len(comments) > 1:
        words = [f"With {said[0].group}={', '.join(names)}: {comment}" for comment, names in comments.items()]
    return {"description": "\n".join(filter(None, [*words, limits_in_words(key)])), **default_of(said)}


def default_of(said: Sequence[Entry]) -> Schema:
    """Return the default that all of these entries have; nothing if they differ, or if it is composed of other keys."""
    values = {entry.value for entry in said}
    (value, *others) = values
    if others or not value or "${" in value:
        return {}
    return {"default": yaml.safe_load(value)}


def heads(group: str) -> str:
    """Return what the files of a group say at their beginning."""
    said = [(path.stem, head_of(path)) for path in sorted((CONF / group).glob("*.yaml"))]
    return said[0][1] if len(said) == 1 else "\n".join(f"{group}={option}: {head}" for option, head in said)


def texts() -> dict[str, str]:
    """Return file name -> text."""
    return {name: json.dumps(schema, indent=1, ensure_ascii=False) + "\n" for name, schema in schemas().items()}


def write(folder: Path) -> None:
    """Write all schemas into a folder, and remove those of groups that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    for name, text in texts().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else CONF / "schema")
