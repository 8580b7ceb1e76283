"""The Flower engine: orders and replies as Flower's messages, in simulation and in a deployment (docs/flower.md).

codec.py       orders and replies to Flower's records and back
server.py      the engine over a Grid, and the ServerApp
client.py      the ClientApp
node.py        what it says and does
failures.py    what it says of a failure
environment.py the variables that tell a node's process its recipe and data
simulation.py  a whole Flower with simulated clients, for `fedstrata run --engine flower`
"""

import os

# Flower reads these when it is imported. It phones home only if the user says so.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
