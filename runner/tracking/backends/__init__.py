"""The places other than MLflow where a run is recorded, each fed by a process of its own (`runner.tracking.ship`).

`csv_tracker` writes files into model_dir. `user_tracker` calls a user's class. `session` records what an Estimator
does in a script (`RunConfig(tracking=...)`). `host_metrics` measures a host, for MLflow.
"""
