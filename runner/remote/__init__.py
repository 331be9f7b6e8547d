"""A run in an object store: `model_dir=s3://bucket/run`, gs:// or az://, and memory:// within one process.

The engine works in a local folder. A start fetches what the bucket has, if this folder was not the last to write there,
and holds a lease on the URL; a process beside the run, `python -m runner.remote.upload`, sends what is new.

    mirror.py   what others call: the folder of a URL, and the mirror that its writer begins and closes
    store.py    the bucket: its lease, fetching, and the note in the folder of what both sides have
    upload.py   the process that follows the folder, and between the hosts of a cluster carries their messages

In a cluster of several hosts each has a folder and such a process. The chief's sends the checkpoints, a worker's the
state of its own input; each start of the tasks begins from what the bucket has.

Only `store` imports fsspec, when a URL is opened.
"""
