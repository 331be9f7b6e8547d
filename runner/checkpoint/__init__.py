"""A step on disk: write, verify, keep, restore, and continue from.

`writer` writes the files of a step and `reader` opens them; `layout` knows their names and how they are published;
`manifest` holds their checksums and `integrity` checks them, so that a damaged checkpoint gives way to the one before
it. `async_saver` writes while training goes on, from a `snapshot`. `retention` deletes what is not to be kept.
`input_position` tells one input from another, finds the next example, and decides whether its state is saved;
`warm_start` takes values from another model's checkpoint. `manifest` and `layout` are free of TensorFlow.
"""
