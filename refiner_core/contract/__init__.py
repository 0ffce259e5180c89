"""The shared language: configuration, marks, fingerprints, plan, records, errors, protocols.

Torch-free and leaf-like: everything may import it, it imports nothing of ours outside itself.
"""
