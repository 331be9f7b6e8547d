"""Files, processes, memory and the screen; nothing here depends on TensorFlow or on the runner's other packages.

`files` writes text and JSON so that a reader never sees half a file. `child_process` starts a process that ends with
its parent, and `task_server` has the messages to a server that forks one; `heartbeat` tells a parent that its child is
alive. `exit_codes` has the codes with which a process ends, and says which of them an error has.
`standard_streams` keeps stdout and stderr from raising errors, `redaction` masks secrets in everything that is written,
`console` prints the progress line, tables and numbers. `start_status` draws a line before there is a task. `gc_pause`
turns the garbage collector off during long imports. `memory` reports what a process may still use.
`user_frames` finds the user's lines in a traceback.

Every other package of the runner may import this one; it imports none of them.
"""
