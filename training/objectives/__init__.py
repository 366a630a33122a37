"""Objectives: what a job's trainers compute."""
