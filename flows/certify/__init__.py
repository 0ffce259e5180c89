"""`refiner certify`: what a node can do, tried through the trainer's own code.

In: a recipe (or none), and how much time there is. Out: a
:class:`~refiner_core.contract.proofs.Certificate`.

::

    node.certify_node ── a process per part, each with a deadline
                        numerics   kernels, bf16 against fp32, sampling     (one device)
                        ranks      plain against ZeRO, all_reduce           (rank.measure_as)
                        speed      SFT, GRPO update, sampling, memory       (one device)
                        servers    vLLM: new weights, the key
                        faults     kill -9 and resume

A part says what it has found check by check, so that one that hangs or takes the GPU down loses
nothing of what was found before it, and none of the parts behind it.
"""
