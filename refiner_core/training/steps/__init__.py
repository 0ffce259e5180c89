"""What every training loop does around a step, whatever is trained.

In order of reading: ``health`` (is this step fit to be made), ``boundary`` (between two steps:
save, stop, go on), ``saving`` (one save in a thread of its own), ``telling`` (where it is and where
its time went).
"""
