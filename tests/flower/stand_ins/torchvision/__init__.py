"""In place of torchvision."""
