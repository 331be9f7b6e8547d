"""Read an input by itself: its speed, the work of its stages, and what a change of one of them gains (`profile`)."""
