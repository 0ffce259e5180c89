"""Environments: what an agent with tools works in, and the episodes that come of it.

==================== ==============================================================================
:mod:`.protocol`     tasks, tools, messages, outcomes; what an environment has to do, what an
                     episode leaves, and tasks as rows of prompts
:mod:`.checking`     does an environment of one's own do what is asked of one
:mod:`.registry`     environments by name: ``desk``, ``tau2``, a file of one's own
:mod:`.turns`        text to a tool call, or why it is none
:mod:`.conversation` token ids of an episode: appended to, never tokenised again; a chat template
                     taken apart
:mod:`.episodes`     many episodes at a time over a generator; tools in threads, time limits
:mod:`.play`         one of them
:mod:`.scoring`      shaped rewards, partial credit, curriculum
:mod:`.desk`         the shipped environment
:mod:`.tau2`         the adapter to tau2-bench
==================== ==============================================================================
"""
