"""Beginning: a folder with a recipe of one's own, what its fields mean, completion in shells.

``questions`` -> ``drafting`` (answers become a recipe) -> ``folder`` (its files, all or none);
``fields`` explains fields, ``completing`` completes command lines.
"""
