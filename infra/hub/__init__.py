"""The Hugging Face Hub as a place to publish to; this package alone speaks with it to write.

`preflight` asks before a run whether it will take what the run makes; `target` publishes: `client`
has the words for that, `upload` the files of a commit, `session` carries the requests, `patience`
bears outages, `errors` puts the Hub's words into ours.
"""
