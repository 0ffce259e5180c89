"""vLLM servers that a GRPO stage starts on its own nodes, and rollouts from them.

In: a recipe with ``grpo.generation_backend=vllm``. Out: a generator, and a way to send it weights.

In one process of each node (local rank 0), around the whole training::

    with open_vllm(config, tokenizer, workdir, should_stop=io.should_stop) as rollouts:
        for step in ...:
            rollouts.sync(engine.whole(), str(step))        # before each batch; all ranks of an
            ...                                             # engine enter `engine.whole()` together
            rollouts.generate(requests, params, on_completion)

The first ``sync`` starts the servers, on the very weights that it is given; it and later ones
return when every server has proven that it has them. ``sync`` and ``generate`` may be called from
different threads: each waits for the other, so no sample is of two versions.

Who can reach them: servers listen on loopback and ask for a key on every route. vLLM asks for it
under ``/v1`` alone, and leaves those that pause it, load weights, run methods of its workers or
unpickle (``/pause``, ``/collective_rpc``, ``/update_weights`` …) to everybody with an account on
the node; a middleware that the servers are started with (:mod:`refiner_vllm_extension`) closes
them. A server that lets somebody in without the key is not used, and the key goes to nobody but a
process that this stage has started.
"""
