"""What a node's process may be told by environment variables."""

RECIPE, DATA = "FEDSTRATA_FLOWER_RECIPE", "FEDSTRATA_FLOWER_DATA"
"""Environment variables: a node's recipe and data, where its node config does not say."""

MEMORY = "FEDSTRATA_FLOWER_MEMORY"
"""The folder in which a node keeps what its client remembers, where its node config does not say."""

SIMULATED = "FEDSTRATA_FLOWER_SIMULATED"
"""And one that a simulation sets for its clients: the text of a failure goes to whoever runs it, whose data it is."""
