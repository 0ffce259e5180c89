"""`refiner certify`: what a node can do, tried through the trainer's own code.

In: a recipe (or none), and how much time there is. Out: a
:class:`~refiner_core.contract.proofs.Certificate`.

::

    node.certify ── a process per part, each with a deadline ──> part.main
                        numerics   kernels, bf16 against fp32, sampling     (one device)
                        ranks      plain against ZeRO, all_reduce           (rank.measure_as)
                        speed      SFT, GRPO update, memory                 (one device)
                        servers    vLLM: every way of weight transfer
                        faults     kill -9 and resume

A part says what it has found check by check, so that one that hangs or takes the GPU down loses
nothing of what was found before it, and none of the parts behind it.
"""
