"""From `conf/` and the command line to one checked `Config`, before TensorFlow is imported.

`schema` declares every key: its type, default and limits. `hydra` tells Hydra where the config files are, composes them
and words its errors; `parsing` turns a composed tree into a `Config`; `validation` and `strategy_validation` check what
keys mean together. `error_messages` has the words for a wrong key or value; `changed_keys` the keys that were removed
or renamed. `saved_config` reads the config.yaml of an earlier run. `user_code` finds the functions that a config
names by their dotted names, without importing them. Errors here are `ConfigError`s: one message, exit code 2.
"""
