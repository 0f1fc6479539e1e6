"""What each technique does to memory and to the time of a step: a module for each, imported for jobs that use it."""
