"""The fast half of training: PyTorch, any hardware and precision. Only the worker process imports it."""
