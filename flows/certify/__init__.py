"""`refiner certify`: tests of a node through the trainer's own code.

In: a recipe (or none), and a time limit. Out: a
:class:`~refiner_core.contract.proofs.Certificate`.

::

    node.certify_node ── a process per part, each with a deadline
                        numerics   kernels, bf16 against fp32, sampling     (one device)
                        ranks      plain against ZeRO, all_reduce           (rank.measure_as)
                        speed      SFT, GRPO update, sampling, memory       (one device)
                        servers    vLLM: new weights, the key
                        faults     kill -9 and resume

A part reports check by check, so if it hangs or crashes the GPU, its earlier checks and the other
parts are kept.
"""
