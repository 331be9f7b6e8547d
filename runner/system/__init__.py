"""The operating system and the screen: what the runner needs of both, and what knows nothing of TensorFlow or of runs.

`files` writes text and JSON so that a reader never sees half of it. `child_process` starts a process that ends with its
parent, and `task_server` has a server fork one; `heartbeat` tells a parent that its child is alive. `standard_streams`
keeps stdout and stderr from raising, `redaction` masks secrets in all that is written, `console` prints the progress
line, tables and numbers. `start_status` draws a line before there is a task. `gc_pause` keeps the garbage collector out
of long imports, `resources` tells what memory and cores a process may use, `user_frames` tells the user's lines of a
traceback from ours.

Every other room may import this one; it imports none.
"""
