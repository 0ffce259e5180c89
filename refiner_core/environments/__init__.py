"""Environments of agents with tools, and their episodes.

==================== ==============================================================================
:mod:`.protocol`     tasks, tools, messages, outcomes; the interface of an environment, records of
                     episodes, and tasks as rows of prompts
:mod:`.checking`     check of a custom environment against the interface
:mod:`.registry`     environments by name: ``desk``, ``tau2``, a custom file
:mod:`.turns`        text to a tool call, or a reason for refusal
:mod:`.conversation` token ids of an episode: append-only, never tokenised again; the parts of a
                     chat template
:mod:`.episodes`     many concurrent episodes over a generator; tools in threads, time limits
:mod:`.play`         one episode
:mod:`.scoring`      shaped rewards, partial credit, curriculum
:mod:`.desk`         the shipped environment
:mod:`.tau2`         the adapter to tau2-bench
==================== ==============================================================================
"""
