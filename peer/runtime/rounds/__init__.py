"""Training rounds: proposals, replays, loss spikes, and the pace of audit data."""
