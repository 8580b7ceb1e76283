from . import models as models
from . import partitions as partitions
from .seeded import SeededTask as SeededTask
from .seeded import cifar10 as cifar10
from .seeded import fashion_mnist as fashion_mnist
from .seeded import from_dataset as from_dataset
from .seeded import mnist as mnist
from .seeded import mnist_mini as mnist_mini
