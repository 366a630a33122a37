"""Preference sets, prompts, rollouts and their tokenized forms."""
