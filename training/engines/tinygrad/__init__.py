"""The engine tinygrad: a portable engine and an oracle for others, pure Python with a C compiler. It is not a fast one.

It never imports torch, and only worker processes import it.
"""
