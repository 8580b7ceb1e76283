"""Which layer do the clients disagree about? Angles, divergences and outliers of a run, layer by layer.

`python examples/which_layer.py DIR` looks at a run that exists; without DIR it first runs the recipe `quickstart`.
"""

import sys

import numpy as np

import fedstrata


def main() -> None:
    """Average each layer's figures over rounds and clients, and name the client that differs most."""
    run = fedstrata.Run(sys.argv[1]) if sys.argv[1:] else fedstrata.run(settings={"training.rounds": 10})
    rounds = [run.layers(line["round"]) for line in run.history()]
    names = run.layer_names
    width = max(len("layer"), *map(len, names))
    print(f"{'layer':{width}}  angle  moved by  outlier (angle)")
    for at, name in enumerate(names):
        # [rounds · clients]: NaN where a client did not send the layer or was lost
        angles = np.concatenate([figures["angle"][:, at] for figures in rounds])
        moved = np.concatenate([figures["divergence"][:, at] / figures["norm"][:, at] for figures in rounds])
        who = np.concatenate([figures["clients"] for figures in rounds])
        mean_of = {int(k): np.nanmean(angles[who == k]) for k in np.unique(who) if np.isfinite(angles[who == k]).any()}
        outlier = max(mean_of, key=mean_of.__getitem__)
        print(
            f"{name:{width}}  {np.degrees(np.nanmean(angles)):4.0f}°  {np.nanmean(moved):8.1%}"
            f"  client {outlier} ({np.degrees(mean_of[outlier]):.0f}°)"
        )
    lost = {(entry["client"], entry["why"]) for line in run.history() for entry in line["lost"]}
    for client, why in sorted(lost):
        print(f"client {client} was lost: {why}")


if __name__ == "__main__":
    main()
