"""The workspace's store of judgements, so that nothing is judged twice.

In: judgements under 16-byte keys. Out: files that any number of processes, nodes and users of a
workspace read and add to, without a lock, within a size limit.

Losing judgements costs only calls, so errors here never fail a step.
"""
