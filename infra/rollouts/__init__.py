"""vLLM servers that a GRPO stage starts on its own nodes, and rollouts from them.

In: a recipe with ``grpo.generation_backend=vllm``. Out: a generator, and a way to send it weights.

In one process of each node (local rank 0), around the whole training::

    with open_vllm(config, tokenizer, workdir, should_stop=io.should_stop) as rollouts:
        for step in ...:
            rollouts.sync(engine.whole(), str(step))        # before each batch; all ranks of an
            ...                                             # engine enter `engine.whole()` together
            rollouts.generator.generate(requests, params, on_completion)

The first ``sync`` starts the servers, on the very weights that it is given; it and later ones
return when every server has proven that it has them. ``sync`` and ``generate`` may be called from
different threads: each waits for the other, so no sample is of two versions.

What is open: servers listen on loopback and ask for a key under ``/v1``. vLLM asks nobody for it on
the routes that pause it and load weights (``/pause``, ``/resume``, ``/collective_rpc``,
``/update_weights`` …), nor on ``/metrics``: whoever has an account on the node can call them while
the stage runs. ``/collective_rpc`` runs methods of vLLM's workers, and under ``ipc`` the server
unpickles what it is sent. On nodes that are shared with people who are not trusted, give the job
nodes of its own (``--exclusive``), or a container with a network of its own.
"""
