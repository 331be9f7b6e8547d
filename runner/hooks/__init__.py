"""Calls into user code while a run trains, evaluates and predicts: native hooks, and tf.estimator's SessionRunHooks.

`hook` has the base class `Hook` and the cadence `Every`. `session_hooks` calls a SessionRunHook on a traced step, when
a MonitoredSession would; `trace_session` is the session that the hook gets. `builtin_hooks` finds TensorFlow's hooks
that the runner replaces (savers, step counters). `evaluation_hooks` has those of one evaluation or prediction.
`profiler` records steps for TensorBoard, and `profile_table` makes a table from the record.
"""
