"""What a peer decides between what comes in and what goes out. No I/O, no clock."""
