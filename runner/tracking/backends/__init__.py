"""The places other than MLflow where a run is recorded, each fed by its own `Shipper`.

`csv_tracker` writes files into model_dir. `user_tracker` is the supervisor's end of a user's class, which
`tracker_process` calls in another process; the two exchange JSON lines. `build` makes the trackers of
`tracking.backend`. `session` records what an Estimator does in a script (`RunConfig(tracking=...)`), through
`session_process`.
"""
