"""The one name that the quickstart imports."""


class IidPartitioner:
    """Only says how many partitions there are."""

    def __init__(self, num_partitions):
        self.num_partitions = num_partitions
