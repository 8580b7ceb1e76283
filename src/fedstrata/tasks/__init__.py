"""What is learned: data sets, partitions, models, and a user's own."""
