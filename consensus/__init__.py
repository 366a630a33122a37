"""Byzantine agreement without I/O: blocks, votes, certificates, leaders and the replica that puts them together."""
