"""A model_fn, called once, becomes a graph whose parts can be run.

`trace_step` calls it: first to discover the variables that it asks for (`variable_request`), then, after
`variable_store` has made them under their names, to trace. The result is a `trace.Trace`: one graph, of which train_op,
predictions or metrics are pruned, so that what is not fetched does not run (the semantics of a session). `random_state`
gives random operations seeds that resume, `partitioned_variable` places, reads and writes variables made of parts,
`xla` compiles a step, `numeric_checks` finds the operation of it that made NaN.
"""
