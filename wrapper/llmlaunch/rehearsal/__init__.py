"""Single ranks of a plan, run alone before the job is submitted: which ones, and what they show."""
