"""Engines, which move weights: in plain torch or under DeepSpeed, in one process or many.

:mod:`refiner_core.training.engines.protocol` says what a training loop may ask;
:func:`refiner_core.training.engines.plain.open_engine` picks by the recipe.
"""
