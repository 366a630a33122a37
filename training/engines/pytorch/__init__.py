"""The PyTorch engine: model, inner optimizers, text generation. Only the worker process imports it."""
