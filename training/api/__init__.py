"""Jobs from requests of people: initial models, fields and texts."""
