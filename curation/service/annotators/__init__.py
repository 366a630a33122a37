"""Calls of annotators: sessions, tasks, answers, and the opening of answers."""
