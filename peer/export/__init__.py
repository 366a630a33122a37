"""Exports of a run, their replay, proofs of rows, model files."""
