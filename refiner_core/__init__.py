"""The science: answers, rewards, training, evaluation, cards; torch only where it is needed."""

__version__ = "0.1.0"
