"""Byzantine agreement without I/O: blocks, certificates, the leader schedule, evidence, the light client."""
