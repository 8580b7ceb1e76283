"""The three transforms that the quickstart uses."""

import torch


class Compose:
    """One after the other."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class ToTensor:
    """Channels first, from 0 to 1."""

    def __call__(self, image):
        return torch.from_numpy(image).permute(2, 0, 1).float() / 255


class Normalize:
    """(x − mean) / std, by channel."""

    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std
