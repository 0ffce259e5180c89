"""The science of refiner: answers, rewards, training, evaluation, cards; torch only where needed."""

__version__ = "0.1.0"
