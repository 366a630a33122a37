"""What a job's trainers compute: an objective is one module here, or in a feature's folder, and one line where it is named."""
