"""The files that `python -m runner command=new` writes. Nothing imports them from here.

`gitignore` becomes `.gitignore`, and `{name}` in README.md the name of the folder.
"""
