"""Calls into user code while a run trains, evaluates and predicts: native hooks, and tf.estimator's SessionRunHooks.

`hook` has the base class `Hook` and the cadence `Every`. `session_hooks` calls a SessionRunHook at the steps at which a
MonitoredSession would call it; `trace_session` is the session that such a hook gets. `builtin_hooks` finds TensorFlow's
own hooks that the runner replaces (savers, step counters). `evaluation_hooks` calls the hooks of one evaluation or
prediction, `keras_callbacks` callbacks of Keras in training. `fetches` finds what native hooks fetch of each example,
and `plots` has hooks that draw it. `profiler` records steps for xprof, and `model_summary` writes tables of variables
and layers.
"""
