"""What annotators ask: sessions, tasks, answers; answers that are not opened yet."""
