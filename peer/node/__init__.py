"""The node: what a peer decides from what comes in. No I/O, no clock."""
