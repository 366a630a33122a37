"""Service of a peer for annotators: pages and calls for annotators, operators and programs."""
