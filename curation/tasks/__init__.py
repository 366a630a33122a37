"""Tasks, pages of tasks, and answers."""
