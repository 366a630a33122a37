"""The PyTorch engine: model, inner optimizers, text generation.

The daemon never imports it. Worker processes import it, and processes of some commands, such as `peer evaluate`.
"""
