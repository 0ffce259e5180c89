"""Engines, which update the weights: plain torch or DeepSpeed, one process or many.

:mod:`refiner_core.training.engines.protocol` is the interface for a training loop;
:func:`refiner_core.training.engines.plain.open_engine` chooses by the recipe.
"""
