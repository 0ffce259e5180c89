"""A worker extension of vLLM (``--worker-extension-cls``) that loads new weights completely.

In: a complete model folder, by ``POST /collective_rpc {"method": "refiner_load_weights"}``. Out:
how many heads were packed again.

On a CPU vLLM packs the output head into the layout of its matrix kernels when it loads a model. A
reload writes the embedding, to which the head is tied, but packs the head no more: the server says
200 and goes on with the old one. Here it is packed again. It needs nothing but vLLM itself.
"""

from __future__ import annotations

from typing import Any


class CompleteReload:
    """Methods that vLLM adds to its worker class."""

    def refiner_load_weights(self: Any, weights_path: str) -> dict[str, int]:
        """Load a checkpoint folder in place, the packed heads included."""
        self.reload_weights(weights_path=weights_path)
        return {"packed_heads": _pack_heads(self.model_runner.get_model())}


def _pack_heads(model: Any) -> int:
    """Pack again every embedding or head that has a packed copy of its weight."""
    packed = 0
    for layer in model.modules():
        names = {kind.__name__ for kind in type(layer).__mro__}
        if "VocabParallelEmbedding" in names and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
            packed += 1
    return packed
