"""The running peer: the driver carries out the node's effects and feeds it inputs; rounds, audits, blobs, snapshots."""
