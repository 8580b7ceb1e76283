"""Flower on machines of their own (docs/deployment.md).

init.py        `fedstrata flower init`: what each machine needs, from template/
credentials.py certificates for TLS, keys for nodes
server.py      the ServerApp, which runs an experiment with the nodes
superlink.py   the SuperLink, of which other machines reach the part for nodes only
"""

import fedstrata.engines.flower  # noqa: F401 - it tells Flower, before that is imported, not to phone home
