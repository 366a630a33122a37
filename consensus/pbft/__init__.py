"""The PBFT replica: vote sets, views, block sync, and the rules by which a voter signs."""
