"""The computation of these objectives with PyTorch, in the worker process."""
