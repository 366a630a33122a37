"""The mempool, compact blocks, and the body of a block."""
