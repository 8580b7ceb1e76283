"""What a client does with an order: training, scores, evaluation."""
