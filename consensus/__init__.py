"""Byzantine agreement without I/O: blocks, certificates, the schedule of leaders, evidence, and the light client."""
