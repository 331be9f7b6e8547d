"""The settings that a script gives as objects and a config as keys: one frozen dataclass for both.

`limits` declares a setting's default and limits, and checks them. `metric_rules` has the rules that follow an
evaluation's metric: EarlyStopping, ReduceLROnPlateau, KeepBest. `data_service` has DataService, `step_range` StepRange.
`runner.config.schema` names the keys under which they stand; what acts by them is in `runner.estimator`,
`runner.checkpoint`, `runner.data`, `runner.hooks`.
"""
