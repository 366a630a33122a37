"""PyTorch's computations of client runs."""
