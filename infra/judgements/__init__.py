"""The workspace's store of judgements: what was judged once is not asked again.

In: judgements under 16-byte keys. Out: files that any number of processes, nodes and users of a
workspace read and add to, without a lock.

=========================================  =======================================================
:mod:`~infra.judgements.segments`          the files: names, header, records; what they hold
:mod:`~infra.judgements.table`             records in memory: sorted arrays, looked up many at once
:mod:`~infra.judgements.table`           what is new in the files
:mod:`~infra.judgements.segments`           the one file that this process writes
:mod:`~infra.judgements.store`            oldest files go, small ones are merged
:mod:`~infra.judgements.store`             all of it as a store
=========================================  =======================================================

A loss of any of it costs calls and nothing else, so nothing here ever fails a step.
"""
