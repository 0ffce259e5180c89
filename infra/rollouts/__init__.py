"""vLLM servers that a stage starts on its own nodes, and samples from them.

In: a recipe with ``generation_backend=vllm`` in ``grpo``, ``sample`` or ``evaluate``. Out: a
generator, and a way to send it weights.

In rank 0, around the whole training (:func:`~infra.rollouts.nodes.open_on_nodes` with several
nodes, where all ranks enter it)::

    with open_vllm(config, tokenizer, workdir, should_stop=io.should_stop) as rollouts:
        for step in ...:
            rollouts.sync(engine.hand_over, str(step))      # before each batch; all ranks of an
            ...                                             # engine call `hand_over` together
            rollouts.generate(requests, params, on_completion)

The first ``sync`` starts the servers, on the very weights that it is given; it and later ones
return when every server has proven that it has them. ``sync`` and ``generate`` may be called from
different threads: each waits for the other, so no sample is of two versions.

Access: servers of the first node listen on loopback, those of further nodes on their node's
address, and all ask for a key on every route. vLLM itself asks for it only
under ``/v1``, and leaves the routes that pause it, load weights, run methods of its workers or
unpickle (``/pause``, ``/collective_rpc``, ``/update_weights`` …) open to everyone with an account
on the node; our middleware (:mod:`refiner_vllm_extension`) closes them. A server that accepts
requests without the key is not used, and the key is sent only to processes started by this stage.
"""
