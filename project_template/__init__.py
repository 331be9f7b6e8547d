"""The files that `python -m runner command=new` copies. They are not imported from here.

`gitignore` becomes `.gitignore`, and `{name}` in README.md becomes the name of the folder.
"""
