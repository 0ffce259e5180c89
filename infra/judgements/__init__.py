"""The workspace's store of judgements: what was judged once is not asked again.

In: judgements under 16-byte keys. Out: files that any number of processes, nodes and users of a
workspace read and add to, without a lock. ``segments`` are the files, and the one that this process
writes; ``store`` is the whole, kept within its limit.

A loss of any of it costs calls and nothing else, so nothing here ever fails a step.
"""
