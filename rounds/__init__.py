"""One round of a job: the voters' ballots on its proposals, when they are enough, and their outcome."""
