"""The Flower engine: orders and replies as Flower's messages (docs/flower.md).

engine.py      the engine over a Grid; grid.py fetches replies one by one
codec.py       orders and replies to Flower's records and back
failures.py    what a node says of a failure, and what the server makes of it
"""

import os

# Flower reads these when it is imported. It phones home only if the user says so.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
