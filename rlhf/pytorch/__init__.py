"""What the worker process computes for these objectives with PyTorch."""
