"""Publishing to the Hugging Face Hub; the only package that writes there.

``target`` opens the Hub, checks before a run that it will accept the results, and publishes;
``client`` sends requests and files, and is imported only where it is used; ``errors`` translates
the Hub's errors, and limits the waiting for outages.
"""
