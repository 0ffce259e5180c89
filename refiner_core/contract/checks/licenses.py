"""Licences that a card's front matter may name: the Hub refuses a repository's card with another.

In: ``publish.license``. Out: whether the Hub knows it. The list is the Hub's; a licence that is not
on it is ``other``, and its text stands in the card (``publish.card_template``).
"""

from __future__ import annotations

_OPEN = (
    "apache-2.0 mit afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear "
    "ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 isc "
    "lgpl lgpl-2.1 lgpl-3.0 lgpl-lr lppl-1.3c ms-pl mpl-2.0 ncsa ofl-1.1 openmdw-1.0 osl-3.0 "
    "postgresql unlicense wtfpl zlib"
)
_CREATIVE_COMMONS = (
    "cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0"
)
_OF_DATA = "c-uda cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 odc-by odbl pddl"
_OF_MODELS = (
    "openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 "
    "bigcode-openrail-m apple-ascl apple-amlr deepfloyd-if-license "
    "fair-noncommercial-research-license h-research intel-research gemma grok2-community llama2 "
    "llama3 llama3.1 llama3.2 llama3.3 llama4"
)
LICENSES = frozenset(
    " ".join((_OPEN, _CREATIVE_COMMONS, _OF_DATA, _OF_MODELS, "unknown other")).split()
)
