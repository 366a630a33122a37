"""Objectives of jobs: tensors, losses and checks."""
