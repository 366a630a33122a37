"""What a person types, and what a person sees."""
