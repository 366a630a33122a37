"""Creation of jobs from people's requests: initial models, fields and texts."""
