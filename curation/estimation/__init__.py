"""Estimation of labels and of annotators' reliability, in integers and fractions that are equal on every machine."""
