"""What anybody may ask: leaderboards, exports, live figures, health."""
