"""The running peer: the driver of the node, and the tasks for rounds, audits, blobs and snapshots."""
