"""`refiner why`: from a printed number to what it was made of.

    words ──> figures ──> explanation
              which       protocol, samples, one answer with its judgements, files;
              recorded    for a terminal, or as JSON
              number

In: a number as it was printed, or names (`citation_f1 grpo greedy`); a workspace, or a card with
the ``refiner.json`` beside it. Out: everything behind it, each with the file that it lies in.
"""
