"""Flower on machines of their own (docs/deployment.md).

init.py        `fedstrata flower init`: what each machine needs, from template/
credentials.py certificates for TLS, keys for nodes
superlink.py   the SuperLink, of which other machines reach the part for nodes only
"""
