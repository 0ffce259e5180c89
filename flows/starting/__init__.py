"""First steps: a folder with a new recipe, explanations of fields, completion in shells.

``flags`` -> ``folder`` (fills the templates beside it with their values; all files or none).
``fields`` explains fields, ``completion`` completes command lines.
"""
