"""The PyTorch engine: model, inner optimizers, text generation.

The daemon never imports it. Worker processes do, and so do the processes of some commands, such as `peer evaluate`.
"""
