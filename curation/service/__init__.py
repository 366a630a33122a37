"""Annotation service of a peer: pages and HTTP calls for annotators, operators and programs."""
