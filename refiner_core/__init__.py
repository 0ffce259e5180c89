"""Core computations: answers, rewards, training, evaluation, cards; torch only where needed.

Subpackages from the lowest up; each may import only those before it: ``contract`` (shared types),
``synthetic_words`` (the synthetic vocabulary), ``answers`` (claims and citations), ``judges``,
``rubrics``, ``rewards``, ``generation`` (sampling), ``environments`` (tasks with tools), ``data``,
``models`` (the shipped ones), ``evaluation``, ``cards``, ``report``, ``nightly``, ``training``,
``rejection`` (kept attempts), ``judge_report`` and ``rescoring`` (reliability of judges, and
answers judged again). ``tests/lint/arrows.py`` enforces it.
"""

__version__ = "0.1.0"
