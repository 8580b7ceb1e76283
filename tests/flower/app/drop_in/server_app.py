"""The server: an algorithm by name, or FedLDF with FedProx and FedLayerWise."""

import flower_capture
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from drop_in.client_app import network
from fedstrata import Algorithm, named
from fedstrata.flower import Strategy
from fedstrata.objectives import FedProx
from fedstrata.selections import FedLDF
from fedstrata.weightings import FedLayerWise

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the rounds."""
    flower_capture.install()
    name = context.run_config["algorithm"]
    mixed = Algorithm(FedProx(mu=0.25), FedLDF(n=2), FedLayerWise())
    nodes = context.run_config["nodes"]
    strategy = Strategy(mixed if name == "mixed" else named(name), fraction_evaluate=0.0, min_available_nodes=nodes)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=context.run_config["rounds"])
