"""One round of a job: what voters say of its proposals, when that is enough, and what follows from it."""
