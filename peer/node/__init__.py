"""The node: the decisions of a peer, without I/O and without a clock."""
