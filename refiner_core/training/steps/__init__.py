"""Surroundings of a training step, whatever is trained.

In order of reading: ``health`` (is this step fit to be made), ``boundary`` (between two steps:
save, stop, go on; where it is and where its time went).
"""
