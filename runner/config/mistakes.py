"""The kinds of mistakes in a config. Programs and tests compare the class of a mistake; its text may change."""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake in the config; the message names the key, the value, what is allowed and the nearest valid name.

    Attributes:
      key: the key whose value exceeds its limits; '': another mistake.
    """

    key = ""


class UnknownKey(ConfigError):
    """There is no such key, param, group or flag, or there is none any more."""


class WrongType(ConfigError):
    """The value has a type that the key does not take."""


class NotAllowed(ConfigError):
    """The value is none of those that the key takes."""


class OutOfRange(ConfigError):
    """The number is too small or too large, or does not fit the other numbers."""


class Malformed(ConfigError):
    """The text cannot be read as what the key takes: a path, a URI, a pattern, a name, YAML."""


class NotSet(ConfigError):
    """The command needs the key."""


class NotFound(ConfigError):
    """What the value names is not there: a file, a checkpoint, a metric, an option, a package."""


class Empty(ConfigError):
    """The value is a list or a text without anything in it."""


class Twice(ConfigError):
    """The same thing is named twice."""


class Conflict(ConfigError):
    """Two settings exclude each other."""


class NoEffect(ConfigError):
    """The setting would change nothing, because of another one."""
