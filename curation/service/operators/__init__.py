"""HTTP calls for operators: projects, imports, reviews, people."""
