"""What operators ask: projects, imports, reviews, people."""
