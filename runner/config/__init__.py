"""Build one checked `Config` from `conf/` and the command line, before TensorFlow is imported.

`schema` declares every key with its type, default and limits; `settings` has the groups of keys that a script gives as
objects. `hydra` tells Hydra where config files are and composes them; `hydra_mistakes` checks the words of a command
line and rewords Hydra's errors. `parsing` converts a composed tree to a `Config`; `validation` and
`strategy_validation` check combinations of keys. `error_messages` words mistakes in keys and values; `changed_keys` has
removed and renamed keys. `saved_config` reads the config.yaml of an earlier run. `user_code` finds the functions that a
config names, without importing them. Errors are `ConfigError`s: one message, exit code 2.
"""
