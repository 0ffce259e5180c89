"""`refiner certify`: what a node can do, tried through the trainer's own code.

In: a recipe (or none), and how much time there is. Out: a
:class:`~refiner_core.contract.proofs.Certificate`.

::

    node.certify ── a process per part, each with a deadline ──> part.main
                        numerics   kernels, bf16 against fp32, sampling     (one device)
                        ranks      plain against ZeRO, collectives          (rank.measure_as)
                        speed      SFT, GRPO update, sampling, memory, save (one device)
                        servers    vLLM: every way of weight transfer
                        faults     a planted NaN and out-of-memory; kill -9 and resume
                        hang       a planted hang

A part says what it has found check by check, so that one that hangs or takes the GPU down loses
nothing of what was found before it, and none of the parts behind it. On a CPU the faults, which
mostly wait, go beside the parts that time nothing.
"""
