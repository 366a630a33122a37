"""The computation of the RLHF objectives with PyTorch, in the worker process."""
