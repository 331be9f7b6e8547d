"""A run in an object store: `model_dir=s3://bucket/run`, gs:// or az://.

The engine works in a local folder. A start holds a lease on the URL, under which it compares the folder with the
bucket's listing: it fetches all if a run was continued elsewhere, and else what the folder has lost. A process beside
the run, `python -m runner.remote.upload`, sends what is new. Nothing in the bucket is replaced or removed because a
folder differs, unless this start made or expired it.

    mirror.py   what others call: the folder of a URL, and the mirror that its writer begins and closes
    note.py     what a folder knows of its bucket: versions of files, whose they are, what a run has deleted
    store.py    the bucket: its lease, comparing and fetching
    upload.py   the process that follows the folder, and between the hosts of a cluster carries their messages

In a cluster of several hosts each has a folder and such a process. The chief's sends the checkpoints, a worker's the
state of its own input; each start of the tasks begins from what the bucket has.

Only `store` imports fsspec, when a URL is opened.
"""
