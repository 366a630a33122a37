"""The fast half of training: PyTorch, float32 on processors, nobody needs its exact bits. Only the worker process imports it."""
