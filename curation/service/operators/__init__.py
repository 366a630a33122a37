"""Calls of operators: projects, imports, reviews, people."""
