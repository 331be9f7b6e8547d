"""Where a run is recorded beside MLflow, each fed by a `Shipper` of its own.

`csv_tracker` writes files into model_dir. `user_tracker` is the supervisor's end of a class of the user's, which
`tracker_process` calls in a process of its own: the two exchange JSON lines. `build` makes what `tracking.backend`
names. `session` records what an Estimator does in a script (`RunConfig(tracking=...)`), by way of `session_process`.
"""
