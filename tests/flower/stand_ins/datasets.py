"""In place of the Hugging Face `datasets` that Flower's quickstart-pytorch reads: a few made-up pictures.

Partition k of n has the classes near 10 k / n and its own number of samples, so that clients differ.
"""

from functools import cache

import numpy as np


def pictures(count, classes, seed):
    """Noise around a pattern per class, as arrays of bytes."""
    draw = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).uniform(60, 190, size=(10, 32, 32, 3))
    labels = draw.choice(classes, count)
    noisy = patterns[labels] + draw.normal(0, 40, size=(count, 32, 32, 3))
    return [{"img": image, "label": int(label)} for image, label in zip(noisy.clip(0, 255), labels, strict=True)]


class Rows:
    """As much of `datasets.Dataset` as the quickstart uses."""

    def __init__(self, rows, transform=None):
        self.rows, self.transform = rows, transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        if self.transform is None:
            return row
        batch = self.transform({key: [value] for key, value in row.items()})
        return {key: values[0] for key, values in batch.items()}

    def with_transform(self, transform):
        return Rows(self.rows, transform)

    def with_format(self, name):
        return self

    def train_test_split(self, test_size, seed):
        first = int(len(self.rows) * (1 - test_size))
        return Splits(train=Rows(self.rows[:first]), test=Rows(self.rows[first:]))


class Splits(dict):
    """As much of `datasets.DatasetDict`."""

    def with_transform(self, transform):
        return Splits({name: rows.with_transform(transform) for name, rows in self.items()})


def load_dataset(name, split):
    """The server's test set, which it first looks at before the first round."""
    _capture()
    return Rows(pictures(100, np.arange(10), seed=999))


@cache
def _capture():
    import flower_capture

    flower_capture.install()
