"""The Hugging Face Hub as a place to publish to; this package alone speaks with it to write.

`preflight` asks before a run whether it will take what the run makes, `target` publishes, `client`
and `session` carry the requests, `patience` bears outages, `errors` puts the Hub's words into ours.
"""
