"""The science: answers, rewards, training, evaluation, cards; torch only where it is needed.

Rooms from the lowest up; each may import those before it: ``contract`` (the shared language),
``words`` (of the made-up world), ``answers`` (claims and citations), ``judges``, ``rubrics``,
``rewards``, ``generation`` (sampling), ``environments`` (tasks with tools), ``data``, ``models``
(the shipped ones), ``evaluation``, ``cards``, ``report``, ``nightly``, ``training``, ``rejection``
(kept attempts), ``judge_report`` and ``rescoring`` (how far judges can be trusted, and answers
judged again). ``tests/lint/arrows.py`` holds them to it.
"""

__version__ = "0.1.0"
