"""Trace a model_fn into a graph whose parts can be run.

`trace_step` calls model_fn once to discover its variables (`variable_request`); `variable_store` makes them under their
names; then it traces the step. `replica_writes` keeps what model_fn writes to them the same on all replicas. The result
is a `trace.Trace`: one graph, from which train_op, predictions or metrics are pruned, so that what is not fetched does
not run, as in a session. `random_state` gives random operations seeds that survive a resume. `partitioned_variable`
places, reads and writes variables made of parts. `xla` compiles a step. `numeric_checks` finds the operation that made
a NaN.
"""
