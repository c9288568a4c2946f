"""`optrun certify`: a claim about resume, proved on the user's own configuration."""
