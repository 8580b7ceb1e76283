"""In place of Flower Datasets, which would ask the hub."""

import numpy as np
from datasets import Rows, pictures


class FederatedDataset:
    """Partitions by class instead of the hub's CIFAR-10."""

    def __init__(self, dataset, partitioners):
        self.parts = partitioners["train"].num_partitions

    def load_partition(self, index):
        classes = (np.arange(4) + 10 * index // self.parts) % 10
        return Rows(pictures(60 + 20 * index, classes, seed=index))
