"""Functions of the kinds of stages: the wiring from records and configuration to the science.

One module for a kind of stage, or for kinds that belong together: ``data``, ``sampling``,
``evaluating``, ``export``, ``fetch``, ``foreign`` (trainers of others). What they share: ``work``
(what a stage may use, and what it was planned with, or it is refused), ``judging`` (a judge with
store and servers, and the judge as a service).
"""
