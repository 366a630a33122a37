"""From what a person asks for to the specification of a job."""
