"""A client's side of Flower: the app that every node runs, in a deployment or in a simulation (docs/flower.md).

client.py      the ClientApp
node.py        what it says and does, by its own recipe
environment.py the variables that tell a node's process its recipe and data
simulation.py  a whole Flower with simulated nodes, for `fedstrata run --engine flower`
"""

import fedstrata.engines.flower  # noqa: F401 - it tells Flower, before that is imported, not to phone home
