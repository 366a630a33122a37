"""What computes gradients, in the worker process alone."""
