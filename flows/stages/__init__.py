"""Functions of the kinds of stages: they connect records and configuration with the science.

One module per kind of stage, or for related kinds: ``data``, ``sampling``, ``evaluating``,
``export``, ``fetch``, ``external`` (external trainers). Shared: ``work`` (inputs of a stage,
refused if they differ from its plan), ``judging`` (a judge with store and servers, and the judge as
a service).
"""
