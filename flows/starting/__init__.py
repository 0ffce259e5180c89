"""Beginning: a folder with a recipe of one's own, what its fields mean, completion in shells.

``flags`` -> ``folder`` (their values fill the templates beside it; all files or none); ``fields``
explains fields, ``completing`` completes command lines.
"""
