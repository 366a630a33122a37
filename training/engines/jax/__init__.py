"""The engine JAX: the objective `language` in float32 on processors, and on GPUs and TPUs for which JAX has a plugin.

It never imports torch, and only worker processes import it.
"""
