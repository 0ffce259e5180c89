"""The Hugging Face Hub as a place to publish to; this package alone speaks with it to write.

``target`` opens the Hub, asks before a run whether it will take what the run makes, and publishes;
``client`` has the words for that, carries requests and files, and is loaded where it is used;
``errors`` puts the Hub's words into ours, and says how long outages are borne.
"""
