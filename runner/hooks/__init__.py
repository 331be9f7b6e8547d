"""Calls into user code while a run trains, evaluates and predicts: native hooks, and SessionRunHooks of tf.estimator.

`hook` has the base class `Hook` and `Every`. `session_hooks` calls a SessionRunHook as a MonitoredSession did, on a
traced step and at its turn; `trace_session` is the session that it gets.
`builtin_hooks` knows the hooks of TensorFlow that the runner does by itself (savers, step counters); `evaluation_hooks`
has those of one evaluation or prediction. `profiler` records steps for TensorBoard, and `profile_table` makes a table
of what it recorded.
"""
