"""Labels and annotators' reliability, estimated in fixed-point arithmetic."""
